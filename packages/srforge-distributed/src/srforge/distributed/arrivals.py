"""The ranks meet before the process group opens: who is missing is named, and who runs something else is refused.

Each rank leaves a record at the store. The group's own start would say no more than that a time is up.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from srforge.distributed.announcements import say_once
from srforge.distributed.code_digests import package_digests, script_digests, versions
from srforge.distributed.environment_variables import GLOO_SOCKET_IFNAME
from srforge.distributed.errors import LaunchEnvironmentError
from srforge.distributed.topology import Topology

FIRST_MESSAGE_SECONDS = 10.0
_GRACE_SECONDS = 3.0
#: Addresses of a host whose own name leads back to itself, while gloo would tell the others what the name leads to.
LOOPBACK = "loopback"
_ABOUT_A_RANK = ("host", "pid", LOOPBACK)  # differ between ranks, and tell which one is meant

# A group may be opened, closed and opened again over one store; every rank counts alike.
_meetings = itertools.count()


def own_record(topology: Topology, facts: Mapping[str, Any]) -> dict[str, str]:
    """Return what this rank tells the others of itself.

    All but what is about the rank itself must be equal everywhere; a module that only one rank has imported so far is
    let pass.

    Args:
        topology: Place in the fleet.
        facts: Further values that must be the same on every rank, by name.
    """
    record = {"host": socket.gethostname(), "pid": str(os.getpid()), "WORLD_SIZE": str(topology.world_size)}
    record |= {"torch": torch.__version__, **versions(), **package_digests(), **script_digests()}
    return record | {name: str(value) for name, value in facts.items()}


def meet(store: Any, topology: Topology, record: Mapping[str, str], timeout_seconds: float) -> None:
    """Wait until every rank has left its record, and compare them.

    Args:
        store: Reached by every rank.
        topology: Place in the fleet.
        record: Of this rank.
        timeout_seconds: How long the others may take, > 0.

    Raises:
        LaunchEnvironmentError: Ranks did not arrive, two processes have one rank, records differ, or a host's name
            leads the others to themselves; names the ranks.

    Collective: every rank must call.
    """
    store = dist.PrefixStore(f"srforge/meeting-{next(_meetings)}", store)  # type: ignore[attr-defined]  # torch builds without it exist
    if store.add(f"claims/{topology.rank}", 1) > 1:
        raise LaunchEnvironmentError(
            f"RANK must be another one in each process, but {topology.rank} was taken when this process "
            f"({_named(topology.rank, record)}) came. Export RANK per process, or launch with torchrun; if another job uses "
            f"{topology.master_addr}:{topology.master_port}, choose another MASTER_PORT."
        )
    store.set(f"record/{topology.rank}", json.dumps(dict(record)))
    # Rank 0 first: with another WORLD_SIZE, waiting for all would be in vain.
    deadline = time.monotonic() + timeout_seconds
    _wait_for(store, [0], deadline, topology)
    first = _read(store, 0)
    store.set(f"has-read/{topology.rank}", "")
    _compare(record, topology.rank, {0: first})
    everyone = range(topology.world_size)
    _wait_for(store, everyone, deadline, topology)
    if topology.rank == 0:
        others = {rank: _read(store, rank) for rank in everyone[1:]}
        try:
            _compare(record, 0, others)
        except LaunchEnvironmentError:
            # It may host the store: every other rank is to tell the same from its record.
            _are_there(store, [f"has-read/{rank}" for rank in everyone], _GRACE_SECONDS)
            raise


def _wait_for(store: Any, ranks: Sequence[int], deadline: float, topology: Topology) -> None:
    keys = [f"record/{rank}" for rank in ranks]
    patience = FIRST_MESSAGE_SECONDS
    while True:
        left = deadline - time.monotonic()
        if _are_there(store, keys, max(0.001, min(left, patience))):
            return
        missing = [rank for rank in ranks if not store.check([f"record/{rank}"])]  # raises if the store is gone
        if missing and time.monotonic() >= deadline:
            if topology.rank == 0:
                time.sleep(_GRACE_SECONDS)  # it may host the store, which the others are asking too
            raise LaunchEnvironmentError(describe_missing(missing, topology))
        if missing and topology.rank == 0:
            say_waiting(missing, topology, left)
        patience = max(1.0, left)


def _are_there(store: Any, keys: list[str], seconds: float) -> bool:
    try:
        store.wait(keys, timedelta(seconds=seconds))
    except RuntimeError:
        return False
    return True


def say_waiting(missing: Sequence[int], topology: Topology, seconds: float) -> None:
    """Say once whom the others wait for, and for how many seconds more."""
    say_once(f"waiting for {_ranks(missing)} of {topology.world_size}, up to {seconds:.0f} s more")


def describe_missing(missing: Sequence[int], topology: Topology) -> str:
    """Return what to tell the user of ranks that did not arrive in time."""
    where = f"{topology.master_addr}:{topology.master_port}"
    return (
        f"every rank must arrive at {where} within `timeout_minutes`, but {_ranks(missing)} of {topology.world_size} did "
        f"not (seen by rank {topology.rank}). Look at the output of the missing: not started, ended before, still "
        "loading, or without a way to that address."
    )


def _compare(own: Mapping[str, str], rank: int, others: Mapping[int, Mapping[str, str]]) -> None:
    _refuse_names_on_loopback(own, rank, others)
    differing = {
        other: [name for name in own if _must_agree(name, record) and record.get(name) != own[name]]
        for other, record in others.items()
    }
    differing = {other: names for other, names in differing.items() if names}
    if not differing:
        return
    parts = [
        f"{name} is {own[name]} on {_named(rank, own)}, {others[other].get(name, 'missing')} on "
        f"{_named(other, others[other])}"
        for other, names in differing.items()
        for name in names
    ]
    raise LaunchEnvironmentError(
        f"all ranks must run the same code with the same options, but {'; '.join(parts[:8])}. Give every host the same "
        "environment, script and command line."
    )


def _refuse_names_on_loopback(own: Mapping[str, str], rank: int, others: Mapping[int, Mapping[str, str]]) -> None:
    """Refuse hosts whose own names lead to 127.0.1.1 (Debian's habit): the others would connect to themselves."""
    elsewhere = {other: record for other, record in others.items() if record["host"] != own["host"]}
    for each, record in {rank: own, **elsewhere}.items() if elsewhere else ():
        if addresses := record.get(LOOPBACK):
            raise LaunchEnvironmentError(
                f"the host name {record['host']} must resolve to an address that the other hosts reach, but is "
                f"{addresses} on {_named(each, record)}. Set {GLOO_SOCKET_IFNAME} to the interface between the hosts, or "
                "correct /etc/hosts there."
            )


def _must_agree(name: str, record: Mapping[str, str]) -> bool:
    is_module = name.startswith("code of ") and name.endswith(".py")
    return name in record if is_module else name not in _ABOUT_A_RANK


def _read(store: Any, rank: int) -> dict[str, str]:
    record: dict[str, str] = json.loads(store.get(f"record/{rank}"))
    return record


def _named(rank: int, record: Mapping[str, str]) -> str:
    return f"rank {rank} (host {record['host']}, pid {record['pid']})"


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:16]) + (", ..." if len(ranks) > 16 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
