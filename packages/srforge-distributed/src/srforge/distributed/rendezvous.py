"""Opening the process group, and what to do when it does not open."""

import re
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from srforge.distributed.arrivals import LOOPBACK, meet, own_record
from srforge.distributed.attempts import name_attempt
from srforge.distributed.environment_variables import (
    GLOO_SOCKET_IFNAME,
    MASTER_ADDR,
    MASTER_PORT,
    NCCL_SOCKET_IFNAME,
    has_agent_store,
    wants_libuv,
)
from srforge.distributed.errors import LaunchEnvironmentError
from srforge.distributed.networking import own_name_on_loopback, refuse_unusable_network
from srforge.distributed.termination import run_bounded
from srforge.distributed.topology import Topology

_PATIENCE_SECONDS = 3.0
_GRACE_SECONDS = 10.0

_T = TypeVar("_T")


def open_process_group(
    topology: Topology,
    backend: str,
    device: torch.device,
    timeout_minutes: float,
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Open the default process group, once every rank has arrived and runs the same.

    Args:
        topology: Place in the fleet; a fleet of one without an address meets in memory and needs no port.
        backend: ``nccl`` or ``gloo``.
        device: The device of this rank.
        timeout_minutes: How long the start and each collective wait for the other ranks, in minutes.
        facts: Values that must be the same on every rank, by name; versions and code are compared anyway.

    Raises:
        LaunchEnvironmentError: This torch has no distributed package, or the group did not open: names the ranks that
            are missing or differ, and what usually cures that.

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
    try:
        if topology.master_addr is None:
            from torch._C._distributed_c10d import HashStore

            arguments["store"] = HashStore()
        else:
            record = own_record(topology, {"backend": backend, "device": device.type, **(facts or {})})
            if backend == "gloo":
                record[LOOPBACK] = own_name_on_loopback()
            store = _answered(
                lambda: _meet_at_store(topology, backend, record, arguments["timeout"]), arguments["timeout"]
            )
            arguments["store"] = dist.PrefixStore("default_pg", store)  # type: ignore[attr-defined]  # the name that torch itself gives it
        dist.init_process_group(**arguments)
    except (RuntimeError, ValueError) as error:
        raise LaunchEnvironmentError(start_failure(str(error), topology, backend)) from error


def _meet_at_store(topology: Topology, backend: str, record: Mapping[str, str], timeout: timedelta) -> Any:
    store = _open_store(topology, backend, timeout)
    meet(store, topology, record, timeout.total_seconds())
    return store


def _answered(ask: Callable[[], _T], timeout: timedelta) -> _T:
    """Return what ``ask`` does, from a thread: behind a cable that is cut meanwhile a store never answers.

    Raises:
        RuntimeError: It took longer than connecting and meeting may.
    """
    outcomes: list[tuple[_T | None, Exception | None]] = []

    def run() -> None:
        try:
            outcomes.append((ask(), None))
        except Exception as error:  # noqa: BLE001 - raised again below, in the thread that asked
            outcomes.append((None, error))

    run_bounded([run], 2 * timeout.total_seconds() + _GRACE_SECONDS)
    if not outcomes:
        raise RuntimeError("the store stopped answering: its host ended or is cut off")
    value, error = outcomes[0]
    if error is not None:
        raise error
    return cast("_T", value)


def _open_store(topology: Topology, backend: str, timeout: timedelta) -> Any:
    """Return the store at the fleet's address; rank 0 hosts it, unless torchrun's agent does."""
    hosts_store = topology.rank == 0 and not has_agent_store()
    refuse_unusable_network(topology, backend, hosts_store=hosts_store)
    assert topology.master_addr is not None
    assert topology.master_port is not None
    store = dist.TCPStore(  # type: ignore[attr-defined]  # torch builds without it exist
        topology.master_addr,
        topology.master_port,
        topology.world_size,
        hosts_store,
        timeout,
        wait_for_workers=False,  # `meet` waits, and knows who is missing
        multi_tenant=not has_agent_store(),
        use_libuv=wants_libuv(),
    )
    if has_agent_store():
        # One store over all restarts: without this a key of an earlier attempt would be taken for one of this.
        # Rank 0 knows who is missing: the others give it time to say so first.
        patience = timeout.total_seconds() + (_PATIENCE_SECONDS if topology.rank > 0 else 0.0)
        attempt = name_attempt(store, topology, patience)
        return dist.PrefixStore(f"srforge/attempt-{attempt}", store)  # type: ignore[attr-defined]  # as above
    return store


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
    first_line = message.strip().splitlines()[0].rstrip(".") if message.strip() else "no reason given"
    if reason := re.search(r"\(errno: \d+ - ([^)]+)\)", first_line):
        first_line = reason[1]  # torch prints addresses that are none beside it
    return (
        f"the {backend} process group must open at {where} for rank {topology.rank} of {topology.world_size}, but does "
        f"not: {first_line}. {cure}"
    )
