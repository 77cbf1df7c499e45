"""A store without the past: torchrun's agent keeps one store over all restarts, with what dead ranks left in it.

A key of an earlier attempt would be taken for one of this attempt: a rank that has arrived, work that is done. The count
of restarts is no cure, as it may differ between the nodes of a job. So rank 0 draws a name for the attempt, and gives it
to whoever shows a number that nobody can have shown before.
"""

from __future__ import annotations

import secrets
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from srforge.distributed.arrivals import FIRST_MESSAGE_SECONDS, describe_missing, say_waiting
from srforge.distributed.errors import LaunchEnvironmentError
from srforge.distributed.topology import Topology

_POLL_SECONDS = 0.01


def name_attempt(store: Any, topology: Topology, timeout_seconds: float) -> str:
    """Return a name for this attempt: the same on every rank, and another one in every attempt.

    Args:
        store: Reached by every rank, perhaps full of keys of earlier attempts.
        topology: Place in the fleet.
        timeout_seconds: How long the others may take, > 0.

    Raises:
        LaunchEnvironmentError: Ranks did not arrive in time; names them.

    Collective: every rank must call.
    """
    rank = topology.rank
    if rank == 0:
        return _welcome_all(store, topology, timeout_seconds)
    number = secrets.token_hex(8)
    store.set(f"srforge/hello/{rank}", number)
    key = f"srforge/welcome/{rank}/{number}"
    try:
        store.wait([key], timedelta(seconds=timeout_seconds))
    except dist.DistStoreError as error:
        raise LaunchEnvironmentError(describe_missing([0], topology)) from error
    name: str = store.get(key).decode()
    store.set(f"srforge/thanks/{name}/{rank}", "")
    return name


def _welcome_all(store: Any, topology: Topology, timeout_seconds: float) -> str:
    name, missing = secrets.token_hex(8), set(range(1, topology.world_size))
    started, has_told = time.monotonic(), False
    while missing:
        for rank in sorted(missing):
            if store.check([f"srforge/thanks/{name}/{rank}"]):
                missing.discard(rank)
            elif store.check([f"srforge/hello/{rank}"]):  # of a dead process, perhaps: the living one replaces it soon
                number = store.get(f"srforge/hello/{rank}").decode()
                store.set(f"srforge/welcome/{rank}/{number}", name)
        waited = time.monotonic() - started
        if missing and waited > timeout_seconds:
            raise LaunchEnvironmentError(describe_missing(sorted(missing), topology))
        if missing and waited > FIRST_MESSAGE_SECONDS and not has_told:
            say_waiting(sorted(missing), topology, timeout_seconds - waited)
            has_told = True
        time.sleep(_POLL_SECONDS if missing else 0)
    return name
