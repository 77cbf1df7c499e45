"""Schedulers' variables to the torch contract: ``python -m srforge.distributed shim CMD...`` in each of their tasks.

Pure functions of the environment; nothing is guessed. What a scheduler does not say has to be exported by the user.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from srforge.distributed.environment_variables import (
    LOCAL_RANK,
    LOCAL_WORLD_SIZE,
    MASTER_ADDR,
    MASTER_PORT,
    RANK,
    WORLD_SIZE,
    whole_environment,
)
from srforge.distributed.errors import LaunchEnvironmentError
from srforge.distributed.topology import Topology

_LOOPBACK = "127.0.0.1"
_DEFAULT_PORT = "29500"


@dataclass(frozen=True)
class Task:
    """One task as its scheduler describes it; None stands for what the scheduler does not say.

    Attributes:
        scheduler: Its name, for messages.
        rank: Of the task.
        world_size: Number of tasks.
        local_rank: Rank on its host.
        local_world_size: Number of tasks on its host.
        address: Host of rank 0.
        port: A port that is the same in all tasks of the job, and another in other jobs.
    """

    scheduler: str
    rank: str
    world_size: str
    local_rank: str | None = None
    local_world_size: str | None = None
    address: str | None = None
    port: str | None = None


def _open_mpi(environ: Mapping[str, str]) -> Task:
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    return Task("Open MPI", *_values(environ, "Open MPI", [f"OMPI_COMM_WORLD_{name}" for name in names]))


def _lsf(environ: Mapping[str, str]) -> Task:
    rank, size, local_rank = _values(
        environ, "LSF", [f"JSM_NAMESPACE_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK")]
    )
    return Task("LSF", rank, size, local_rank, environ.get("JSM_NAMESPACE_LOCAL_SIZE"))


def _mpich(environ: Mapping[str, str]) -> Task:
    rank, size = _values(environ, "MPICH", ["PMI_RANK", "PMI_SIZE"])
    return Task("MPICH", rank, size, environ.get("MPI_LOCALRANKID"), environ.get("MPI_LOCALNRANKS"))


def _slurm(environ: Mapping[str, str]) -> Task:
    if "SLURM_STEP_NUM_TASKS" not in environ:
        # The batch script itself: it has a SLURM_PROCID too, and would wait for tasks that nobody starts.
        raise LaunchEnvironmentError(
            "the shim must run in a step of SLURM, but SLURM_STEP_NUM_TASKS is missing: this is the batch script itself. "
            "Put srun before `python -m srforge.distributed shim`."
        )
    names = ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"]
    rank, size, local_rank = _values(environ, "SLURM", names)
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    job, step = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_STEP_ID", "0")
    return Task(
        "SLURM",
        rank,
        size,
        local_rank,
        _tasks_of_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""), environ.get("SLURM_NODEID", "")),
        address=first_host(hosts) if hosts else None,
        # Jobs that share a host get different ports, and so do steps of one job that run side by side.
        port=str(20000 + (int(job) + 101 * int(step)) % 10000) if job.isdecimal() and step.isdecimal() else None,
    )


# In this order: mpirun runs inside allocations of SLURM, whose variables are there too; an srun may set those of PMI.
_SCHEDULERS: tuple[tuple[str, Callable[[Mapping[str, str]], Task]], ...] = (
    ("OMPI_COMM_WORLD_RANK", _open_mpi),
    ("JSM_NAMESPACE_RANK", _lsf),
    ("MPI_LOCALRANKID", _mpich),
    ("SLURM_PROCID", _slurm),
    ("PMI_RANK", _mpich),
)


def torch_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the torch contract's variables of one task.

    Args:
        environ: The task's environment. ``MASTER_ADDR`` and ``MASTER_PORT`` in it are taken as they are.

    Raises:
        LaunchEnvironmentError: No scheduler is known by its variables, or what it leaves out is not exported, or a
            torch variable is there already and says something else.
    """
    for name, read in _SCHEDULERS:
        if name in environ:
            task = read(environ)
            break
    else:
        raise LaunchEnvironmentError(
            "the shim must run in a task of SLURM, Open MPI, MPICH or LSF, but no variable of these is set. Put srun, "
            "mpirun, mpiexec or jsrun before it; torchrun needs no shim."
        )
    told = {
        RANK: task.rank,
        WORLD_SIZE: task.world_size,
        LOCAL_RANK: _local_rank(task, environ),
        MASTER_ADDR: _address(task, environ),
        MASTER_PORT: environ.get(MASTER_PORT) or task.port or _DEFAULT_PORT,
    }
    if task.local_world_size is not None:
        told[LOCAL_WORLD_SIZE] = task.local_world_size
    for name, value in told.items():
        if name in environ and environ[name].strip() not in ("", value):
            raise LaunchEnvironmentError(
                f"{name} must be {value}, as {task.scheduler} says, but is {environ[name]!r} already. Unset it; two "
                "launchers are at work."
            )
    Topology.from_environment(told)  # refuses what is out of range
    return told


def run_under_torch_variables(command: Sequence[str]) -> NoReturn:
    """Replace this process by a command that sees the torch contract, so that signals reach it directly.

    Args:
        command: Program and arguments.

    Raises:
        LaunchEnvironmentError: See ``torch_variables``; or there is no command, or it cannot be started.
    """
    if not command:
        raise LaunchEnvironmentError("the shim must be given a command, but has none. Write `shim python train.py`.")
    environ = whole_environment()
    environ |= torch_variables(environ)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(command[0], list(command), environ)  # noqa: S606 - to start the user's command is the purpose
    except OSError as error:
        raise LaunchEnvironmentError(
            f"`{command[0]}` must be a program that the shim can start, but is not: {error.strerror}. Check its path."
        ) from error


def first_host(hosts: str) -> str:
    """Return the first host of SLURM's compressed list: ``gpu[03-05,9]-ib,login1`` gives ``gpu03-ib``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", hosts.strip())
    assert first is not None
    return re.sub(r"\[([^,\]-]*)[^\]]*\]", r"\1", first[0])


def _values(environ: Mapping[str, str], scheduler: str, names: Sequence[str]) -> list[str]:
    missing = [name for name in names if not environ.get(name, "").strip()]
    if missing:
        raise LaunchEnvironmentError(
            f"{missing[0]} must be set where {scheduler} starts the task ({names[0]} is), but is missing. Check how the "
            "task is started."
        )
    return [environ[name].strip() for name in names]


def _local_rank(task: Task, environ: Mapping[str, str]) -> str:
    if task.local_rank is not None:
        return task.local_rank
    if environ.get(LOCAL_RANK, "").strip():
        return environ[LOCAL_RANK].strip()
    if task.world_size == "1":
        return "0"
    raise LaunchEnvironmentError(
        f"{LOCAL_RANK} must be exported in every task, but is missing: PMI tells no rank on the host (no MPI_LOCALRANKID), "
        "and 0 would put all tasks of a host on one device. Export it, or use an mpiexec that sets MPI_LOCALRANKID."
    )


def _address(task: Task, environ: Mapping[str, str]) -> str:
    if environ.get(MASTER_ADDR, "").strip():
        return environ[MASTER_ADDR].strip()
    if task.world_size in (task.local_world_size, "1"):
        return _LOOPBACK  # all tasks are on this host
    if task.address is not None:
        return task.address
    raise LaunchEnvironmentError(
        f"{MASTER_ADDR} must be exported, but is missing: {task.scheduler} tells no address of rank 0, and the tasks are "
        f"on several hosts. Export the first host's name in every task ({_how_to_export(task.scheduler)})."
    )


def _how_to_export(scheduler: str) -> str:
    return {
        "Open MPI": f"mpirun -x {MASTER_ADDR}=...",
        "MPICH": f"mpiexec -genv {MASTER_ADDR} ...",
        "LSF": f"jsrun -E {MASTER_ADDR}=...",
    }.get(scheduler, f"export {MASTER_ADDR}=...")


def _tasks_of_node(tasks_per_node: str, node: str) -> str | None:
    """Return the tasks of node number ``node`` from SLURM's ``4(x2),3``; None if it cannot be read."""
    counts: list[str] = []
    for entry in tasks_per_node.split(","):
        found = re.fullmatch(r"\s*([0-9]+)(?:\(x([0-9]+)\))?\s*", entry)
        if found is None:
            return None
        counts += [found[1]] * min(int(found[2] or 1), 10**6)
    return counts[int(node)] if node.isdecimal() and int(node) < len(counts) else None
