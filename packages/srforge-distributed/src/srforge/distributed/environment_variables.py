"""Every environment variable that ``srforge.distributed`` looks at, with what it means.

The torch contract and the schedulers' task counts are read in one place, ``Topology.from_environment``; every other
variable is read by a function here. Nothing else in the package touches ``os.environ``.
"""

import os

#: Rank of this process in the fleet, 0 .. WORLD_SIZE - 1. Required when WORLD_SIZE > 1.
RANK = "RANK"
#: Rank of this process on its host; picks the device. Missing under Kubeflow v1: then 0.
LOCAL_RANK = "LOCAL_RANK"
#: Number of processes in the fleet. Unset means one.
WORLD_SIZE = "WORLD_SIZE"
#: Number of processes on this host. Optional.
LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"
#: Host on which rank 0 listens. Required when WORLD_SIZE > 1.
MASTER_ADDR = "MASTER_ADDR"
#: Port on which rank 0 listens, 1 .. 65535. Required when WORLD_SIZE > 1.
MASTER_PORT = "MASTER_PORT"

#: Task counts that schedulers set, by scheduler. More than one task without WORLD_SIZE means that nobody mapped the
#: scheduler's variables to the torch contract.
SCHEDULER_TASK_COUNTS = {
    "SLURM_STEP_NUM_TASKS": "SLURM (srun)",
    "OMPI_COMM_WORLD_SIZE": "Open MPI (mpirun)",
    "PMI_SIZE": "MPICH (mpiexec)",
    "JSM_NAMESPACE_SIZE": "LSF (jsrun)",
}

#: Network interface that gloo binds to; needed where the host's own name resolves to a loopback address.
GLOO_SOCKET_IFNAME = "GLOO_SOCKET_IFNAME"
#: Network interface that NCCL binds to.
NCCL_SOCKET_IFNAME = "NCCL_SOCKET_IFNAME"
#: File in which torchrun looks for the first failing rank's error.
TORCHELASTIC_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


def error_file() -> str | None:
    """Return the path at which the launcher expects a report of an uncaught exception, or None."""
    return os.environ.get(TORCHELASTIC_ERROR_FILE) or None


def asked_interface(variable: str) -> str:
    """Return the network interface that one of the two variables above names; empty if it is unset."""
    return os.environ.get(variable, "").strip()


#: The GPUs that CUDA shows to this process, by index or UUID.
CUDA_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


def visible_devices() -> str | None:
    """Return the list of GPUs that this process was restricted to, None if it was not."""
    return os.environ.get(CUDA_VISIBLE_DEVICES)


#: Set to True by torchrun where its agent listens at MASTER_ADDR:MASTER_PORT, so that rank 0 must not.
TORCHELASTIC_USE_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"


def has_agent_store() -> bool:
    """Return whether the launcher's agent hosts the store of the fleet."""
    return os.environ.get(TORCHELASTIC_USE_AGENT_STORE) == "True"


#: Set to 0, torch's store does without libuv; builds for Windows may lack it.
USE_LIBUV = "USE_LIBUV"


def wants_libuv() -> bool:
    """Return whether the store is to be served through libuv."""
    return os.environ.get(USE_LIBUV, "1") == "1"


#: Identity of the job, set by torchrun in every rank that it starts.
TORCHELASTIC_RUN_ID = "TORCHELASTIC_RUN_ID"


def launched_by_torchrun() -> bool:
    """Return whether torchrun started this process."""
    return TORCHELASTIC_RUN_ID in os.environ


#: How often torchrun started its ranks again.
TORCHELASTIC_RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"
#: How often SLURM queued the job again; unset until it does.
SLURM_RESTART_COUNT = "SLURM_RESTART_COUNT"
#: Number of the job under SLURM; the same after it was queued again.
SLURM_JOB_ID = "SLURM_JOB_ID"


def num_restarts() -> int:
    """Return how often the job of this process was started again by itself, as far as this host knows."""
    counts = (os.environ.get(name, "") for name in (TORCHELASTIC_RESTART_COUNT, SLURM_RESTART_COUNT))
    return sum(int(count) for count in counts if count.isdecimal())


def job_name() -> str:
    """Return what names the job of this process to torchrun and SLURM: the same after a restart; empty outside both."""
    run, job = os.environ.get(TORCHELASTIC_RUN_ID), os.environ.get(SLURM_JOB_ID)
    if run == "none" and not job:  # so torchrun calls every job that was given no --rdzv-id
        run = f"torchrun {os.getppid()}"
    return " ".join(filter(None, (run, job)))


#: Set to 1, errors of SR-Forge are shown with their traceback instead of as one line.
SRFORGE_FULL_TRACEBACK = "SRFORGE_FULL_TRACEBACK"


def full_traceback() -> bool:
    """Return whether errors raised on purpose are to be shown with their traceback."""
    return os.environ.get(SRFORGE_FULL_TRACEBACK, "0") not in ("", "0")


def whole_environment() -> dict[str, str]:
    """Return a copy of all variables, to be handed to a program that takes this one's place."""
    return dict(os.environ)
