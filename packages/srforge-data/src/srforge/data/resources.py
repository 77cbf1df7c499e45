"""Limits of this machine that the asked workers would run into: said before the first batch, with the numbers."""

import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch.multiprocessing

_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - its size is asked, nothing is written
_FILES_PER_WORKER = 8  # pipes, sentinel and queues of one worker, in the rank
_TENSORS_PER_BATCH = 8  # each tensor in flight is one open file under torch's default sharing strategy
_SPARE_FILES = 512  # for batches that the training keeps, and everything else
_SMALL_BATCH_BYTES = 16 * 2**20
_FEWEST_BATCHES = 2


@dataclass(frozen=True, kw_only=True)
class MachineLimits:
    """What this machine allows; None where it does not say.

    Attributes:
        open_files: Limit of open files of this process, where tensors travel as open files.
        files_in_use: Files that it has open now.
        shared_memory: Free bytes in ``/dev/shm``.
        memory: Available bytes of memory, the container's limit included.
        cores: Cores that this process may use.
    """

    open_files: int | None = None
    files_in_use: int = 0
    shared_memory: int | None = None
    memory: int | None = None
    cores: int | None = None


def read_limits() -> MachineLimits:
    """Read the limits of this process and machine."""
    open_files = shared_memory = None
    files_in_use = 0
    if sys.platform != "win32":
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        strategy = torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
        shared_by_file = strategy == "file_system"  # needs no open files
        open_files = None if soft == resource.RLIM_INFINITY or shared_by_file else soft
    with suppress(OSError):
        files_in_use = sum(1 for _ in Path("/proc/self/fd").iterdir())
    with suppress(OSError, AttributeError):
        status = os.statvfs(_SHARED_MEMORY)
        shared_memory = status.f_bavail * status.f_frsize
    return MachineLimits(
        open_files=open_files,
        files_in_use=files_in_use,
        shared_memory=shared_memory,
        memory=_available_memory(),
        cores=_usable_cores(),
    )


def resource_warnings(
    limits: MachineLimits, *, num_workers: int, prefetch_factor: int, pickle_bytes: int, local_world_size: int
) -> list[str]:
    """Return what the asked workers would run into, one message each.

    Args:
        limits: What the machine allows.
        num_workers: Workers of the loader, > 0.
        prefetch_factor: Batches that each worker makes ahead.
        pickle_bytes: Size of the data set's pickle.
        local_world_size: Ranks on this machine, each with as many workers.

    Returns:
        Messages with the limit, the numbers and the cure.
    """
    messages = []
    in_flight = num_workers * prefetch_factor
    all_workers = num_workers * local_world_size
    needed = limits.files_in_use + num_workers * _FILES_PER_WORKER + in_flight * _TENSORS_PER_BATCH + _SPARE_FILES
    if limits.open_files is not None and limits.open_files < needed:
        messages.append(
            f"The limit of open files (ulimit -n) must be about {needed} for {num_workers} workers with {in_flight} "
            f"batches ahead, but is {limits.open_files}. Each tensor of a kept batch holds one open file. Raise it "
            '(ulimit -n 65535), or call torch.multiprocessing.set_sharing_strategy("file_system").'
        )
    batches = max(in_flight * local_world_size, _FEWEST_BATCHES)
    if limits.shared_memory is not None and limits.shared_memory < batches * _SMALL_BATCH_BYTES:
        messages.append(
            f"{_SHARED_MEMORY} must hold the {batches} batches that {all_workers} workers make ahead, but has "
            f"{limits.shared_memory / 2**20:.0f} MiB free: {limits.shared_memory / batches / 2**20:.1f} MiB a batch. "
            "A larger batch ends a worker with a bus error. Enlarge it (docker run --shm-size=8g or --ipc=host), or "
            "lower num_workers, prefetch_factor or the batch size."
        )
    copies = pickle_bytes * all_workers
    if limits.memory is not None and copies > limits.memory:
        messages.append(
            f"Memory must hold {all_workers} copies of the pickled data set ({copies / 2**30:.1f} GiB), one per worker, "
            f"but {limits.memory / 2**30:.1f} GiB are available. Lower num_workers, or open the data in __getitem__."
        )
    if limits.cores is not None and all_workers > limits.cores:
        messages.append(
            f"num_workers x ranks on this machine must be at most its {limits.cores} cores, but is {num_workers} x "
            f"{local_world_size}. Set num_workers to {limits.cores // local_world_size}."
        )
    return messages


def _available_memory() -> int | None:
    available = []
    with suppress(OSError, ValueError, KeyError):
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines())
        available.append(int(fields["MemAvailable"].split()[0]) * 1024)
    with suppress(OSError, ValueError):  # "max" is no number: no limit
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8"))
        used = int(Path("/sys/fs/cgroup/memory.current").read_text(encoding="utf-8"))
        available.append(max(limit - used, 0))
    return min(available, default=None)


def _usable_cores() -> int | None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="utf-8").split()
        allowed = max(int(quota) // int(period), 1)
        return allowed if cores is None else min(cores, allowed)
    return cores
