"""The environment variables that ``srforge.data`` reads; nothing else in the package touches the environment.

A worker does not read them: what it needs travels with the loader, because a fork server keeps the environment that
it was started with.
"""

import os
from pathlib import Path

from srforge.distributed.errors import ConfigurationError

DEBUG_HANG = "DEBUG_HANG"
"""``1``: dump the stacks of all threads every 30 s; another number: that period in seconds; ``0`` or unset: off."""

CV2_THREADS = "SRFORGE_CV2_THREADS"
"""``1``: leave OpenCV's own thread pool on. Otherwise it is pinned to zero, in the rank and in its workers."""

RANK = "RANK"
"""Set by the launcher; names the hang files before a strategy exists."""

LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"
"""Set by the launcher: how many ranks share this machine's cores, memory and ``/dev/shm``."""

_DEFAULT_PERIOD_SECONDS = 30.0
_OFF = ("", "0", "false", "no", "off")
_ON = ("1", "true", "yes", "on")


def hang_period() -> float | None:
    """Return the period of hang reports in seconds, or None when they are off.

    Raises:
        ConfigurationError: ``DEBUG_HANG`` is neither a switch nor a positive number.
    """
    value = os.environ.get(DEBUG_HANG, "").strip().lower()
    if value in _OFF:
        return None
    if value in _ON:
        return _DEFAULT_PERIOD_SECONDS
    try:
        period = float(value)
    except ValueError:
        period = 0.0
    if not 0.0 < period < float("inf"):
        raise ConfigurationError(
            f"`{DEBUG_HANG}` must be 1, or a period in seconds > 0, but is {value!r}. Export {DEBUG_HANG}=1."
        )
    return period


def keep_opencv_threads() -> bool:
    """Return whether OpenCV keeps its own thread pool.

    Raises:
        ConfigurationError: ``SRFORGE_CV2_THREADS`` is neither on nor off.
    """
    value = os.environ.get(CV2_THREADS, "").strip().lower()
    if value not in _OFF + _ON:
        raise ConfigurationError(
            f"`{CV2_THREADS}` must be 0 or 1, but is {value!r}. Export {CV2_THREADS}=1, or unset it."
        )
    return value in _ON


def launched_rank() -> int:
    """Return the rank that the launcher announced, 0 when none did (or when it is no number: the topology says so)."""
    value = os.environ.get(RANK, "0")
    return int(value) if value.isdecimal() else 0


def ranks_on_this_machine() -> int:
    """Return how many ranks share this machine, 1 when the launcher does not say."""
    value = os.environ.get(LOCAL_WORLD_SIZE, "1")
    return max(int(value), 1) if value.isdecimal() else 1


def switch_on_flight_recorder(folder: Path) -> None:
    """Ask NCCL's flight recorder to keep its last 2,000 collectives and to write them into ``folder`` on a timeout.

    Only what the user left unset is set; it must happen before the process group exists.
    """
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_TRACE_BUFFER_SIZE", "2000")  # the same setting's name in torch < 2.9
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    os.environ.setdefault("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(folder / "nccl_trace_rank_"))
