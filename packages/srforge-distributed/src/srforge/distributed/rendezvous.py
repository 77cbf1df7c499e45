"""Opening the process group, and what to do when it does not open."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from srforge.distributed.environment_variables import (
    GLOO_SOCKET_IFNAME,
    MASTER_ADDR,
    MASTER_PORT,
    NCCL_SOCKET_IFNAME,
)
from srforge.distributed.errors import LaunchEnvironmentError
from srforge.distributed.topology import Topology


def open_process_group(topology: Topology, backend: str, device: torch.device, timeout_minutes: float) -> None:
    """Open the default process group.

    Args:
        topology: Place in the fleet; a fleet of one without an address meets in memory and needs no port.
        backend: ``nccl`` or ``gloo``.
        device: The device of this rank.
        timeout_minutes: How long the start and each collective wait for the other ranks, in minutes.

    Raises:
        LaunchEnvironmentError: This torch has no distributed package, or the group did not open; says what usually
            cures that.

    Collective: every rank must call.
    """
    if not dist.is_available():
        raise LaunchEnvironmentError(
            "torch must be built with its distributed package for several processes, but is not. Install a usual build "
            "of torch, or train in one process."
        )
    arguments: dict[str, Any] = {
        "backend": backend,
        "rank": topology.rank,
        "world_size": topology.world_size,
        "timeout": timedelta(minutes=timeout_minutes),
    }
    if backend == "nccl":
        # Eager: a wrong device shows here and not in the first collective.
        arguments["device_id"] = device
    if topology.master_addr is None:
        from torch._C._distributed_c10d import HashStore

        arguments["store"] = HashStore()
    try:
        dist.init_process_group(**arguments)
    except (RuntimeError, ValueError) as error:
        raise LaunchEnvironmentError(start_failure(str(error), topology, backend)) from error


def start_failure(message: str, topology: Topology, backend: str) -> str:
    """Return what to tell the user of a process group that did not open.

    Args:
        message: What torch said.
        topology: Place in the fleet.
        backend: ``nccl`` or ``gloo``.
    """
    lowered = message.lower()
    where = f"{topology.master_addr}:{topology.master_port}"
    interface = NCCL_SOCKET_IFNAME if backend == "nccl" else GLOO_SOCKET_IFNAME
    if "libuv" in lowered:
        cure = "This torch lacks libuv (builds for Windows do): set USE_LIBUV=0."
    elif "eaddrinuse" in lowered or "address already in use" in lowered:
        cure = f"Another program of this host has the port: launch with torchrun --standalone, or choose another {MASTER_PORT}."
    elif "unsupported gloo device" in lowered or "makedevice" in lowered:
        cure = f"gloo found no network interface for this host's name (virtual adapters do that): set {interface}."
    else:
        cure = (
            f"Check that rank 0 runs on {MASTER_ADDR}, that every host reaches it and that all ranks were started; where "
            f"a host has several interfaces, set {interface}."
        )
    first_line = message.strip().splitlines()[0] if message.strip() else "no reason given"
    return (
        f"the {backend} process group must open at {where} for rank {topology.rank} of {topology.world_size}, but does "
        f"not: {first_line}. {cure}"
    )
