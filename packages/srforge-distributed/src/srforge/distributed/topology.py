"""Who this process is in the fleet: read once from the launcher's variables, checked, never guessed."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from srforge.distributed.announcements import say_once
from srforge.distributed.environment_variables import (
    LOCAL_RANK,
    LOCAL_WORLD_SIZE,
    MASTER_ADDR,
    MASTER_PORT,
    RANK,
    SCHEDULER_TASK_COUNTS,
    WORLD_SIZE,
)
from srforge.distributed.errors import LaunchEnvironmentError

LAUNCH_CURE = "Launch with torchrun, or export the torch variables in every process."


@dataclass(frozen=True)
class Topology:
    """Place of one process in the fleet.

    Attributes:
        rank: Rank of the process, ``0 <= rank < world_size``.
        local_rank: Rank of the process on its host; picks the device.
        world_size: Number of processes, >= 1.
        local_world_size: Number of processes on this host; None where the launcher does not say.
        master_addr: Host on which rank 0 listens; None for one process.
        master_port: Port on which rank 0 listens, 1 .. 65535; None for one process.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int | None = None
    master_addr: str | None = None
    master_port: int | None = None

    @classmethod
    def single(cls) -> "Topology":
        """Return the topology of a process that trains alone."""
        return cls(rank=0, local_rank=0, world_size=1, local_world_size=1)

    @classmethod
    def from_environment(
        cls, environ: Mapping[str, str] | None = None, *, group: tuple[int, int] | None = None
    ) -> "Topology":
        """Read the topology from the torch variables, and check it before any socket is opened.

        Args:
            environ: The environment to read; None means the process's own.
            group: Rank and size in a process group that somebody else opened: it is right about both.

        Returns:
            One process when ``WORLD_SIZE`` is unset or 1, else the place that the variables describe.

        Raises:
            LaunchEnvironmentError: A variable is missing, malformed, out of range or contradicts another, or a
                scheduler started several tasks and ``WORLD_SIZE`` is unset, or the group tells another rank or size.
        """
        environ = os.environ if environ is None else environ
        if group is not None:
            return cls._of_group(*group, environ)
        if WORLD_SIZE not in environ:
            _refuse_unmapped_scheduler(environ)
            _refuse_rank_of_no_world(environ)
            return cls.single()
        world_size = _integer(environ, WORLD_SIZE, "must be an integer >= 1", minimum=1)
        if world_size == 1:
            _integer(environ, RANK, "must be 0 when WORLD_SIZE is 1", default=0, maximum=0)
            return cls.single()
        rank = _integer(environ, RANK, f"must be in [0, WORLD_SIZE={world_size})", maximum=world_size - 1)
        local_world_size = None
        if LOCAL_WORLD_SIZE in environ:
            rule = f"must be in [1, WORLD_SIZE={world_size}]"
            local_world_size = _integer(environ, LOCAL_WORLD_SIZE, rule, minimum=1, maximum=world_size)
        return cls(
            rank=rank,
            local_rank=_local_rank(environ, local_world_size, world_size),
            world_size=world_size,
            local_world_size=local_world_size,
            master_addr=_address(environ),
            master_port=_integer(environ, MASTER_PORT, "must be in [1, 65535]", minimum=1, maximum=65535),
        )

    @classmethod
    def _of_group(cls, rank: int, world_size: int, environ: Mapping[str, str]) -> "Topology":
        """Return the topology of a process group that exists; only the place on the host is the environment's."""
        for name, value in ((RANK, rank), (WORLD_SIZE, world_size)):
            rule = f"must be {value}, as in the existing process group"
            _integer(environ, name, rule, minimum=value, maximum=value, default=value)
        if world_size == 1:
            return cls.single()
        told = {WORLD_SIZE: str(world_size), RANK: str(rank), MASTER_ADDR: "unused", MASTER_PORT: "1"}
        own = cls.from_environment({**environ, **told})
        return cls(rank, own.local_rank, world_size, own.local_world_size)


def _local_rank(environ: Mapping[str, str], local_world_size: int | None, world_size: int) -> int:
    if LOCAL_RANK in environ:
        limit, name = (world_size, WORLD_SIZE) if local_world_size is None else (local_world_size, LOCAL_WORLD_SIZE)
        return _integer(environ, LOCAL_RANK, f"must be in [0, {name}={limit})", maximum=limit - 1)
    if local_world_size is not None and local_world_size > 1:
        # 0 would put all processes of this host on one device.
        raise LaunchEnvironmentError(
            f"{LOCAL_RANK} must be set when {LOCAL_WORLD_SIZE} is {local_world_size}, but is missing. {LAUNCH_CURE}"
        )
    say_once(f"{LOCAL_RANK} is not set: using 0, as for one process per host.")
    return 0


def _address(environ: Mapping[str, str]) -> str:
    address = environ.get(MASTER_ADDR, "").strip()
    if not address or re.search(r"\s", address):
        shown = repr(environ[MASTER_ADDR]) if MASTER_ADDR in environ else "missing"
        raise LaunchEnvironmentError(
            f"{MASTER_ADDR} must be the host name or address of rank 0, but is {shown}. {LAUNCH_CURE}"
        )
    return address


def _integer(
    environ: Mapping[str, str],
    name: str,
    rule: str,
    *,
    minimum: int = 0,
    maximum: int | None = None,
    default: int | None = None,
) -> int:
    """Return an integer variable within ``[minimum, maximum]``; ``rule`` says the bounds in words."""
    text = environ.get(name)
    if text is None:
        if default is not None:
            return default
        raise LaunchEnvironmentError(f"{name} {rule}, but is missing. {LAUNCH_CURE}")
    # int() would also take "1_0" and digits of other scripts, which no launcher writes.
    value = int(text) if re.fullmatch(r"\s*[+-]?[0-9]{1,18}\s*", text) else None
    if value is None or value < minimum or (maximum is not None and value > maximum):
        shown = repr(text) if value is None else text
        raise LaunchEnvironmentError(f"{name} {rule}, but is {shown}. {LAUNCH_CURE}")
    return value


def _refuse_rank_of_no_world(environ: Mapping[str, str]) -> None:
    """Refuse RANK > 0 without WORLD_SIZE: each such process would train a model of its own."""
    rank = environ.get(RANK, "0").strip()
    if rank.isdecimal() and int(rank) > 0:
        raise LaunchEnvironmentError(f"{WORLD_SIZE} must be set when {RANK} is {rank}, but is missing. {LAUNCH_CURE}")


def _refuse_unmapped_scheduler(environ: Mapping[str, str]) -> None:
    """Refuse several scheduler tasks without WORLD_SIZE: they would train as many separate models."""
    for name, scheduler in SCHEDULER_TASK_COUNTS.items():
        text = environ.get(name, "").strip()
        if not text:
            continue
        tasks = _integer(environ, name, "must be an integer", minimum=-(10**18))
        if tasks > 1:
            raise LaunchEnvironmentError(
                f"{WORLD_SIZE} must be set when {scheduler} starts several tasks ({name}={tasks}), but is missing: "
                f"they would train {tasks} separate models. Put `python -m srforge.distributed shim` before the "
                "command, or say that they are separate with `strategy: single`."
            )
