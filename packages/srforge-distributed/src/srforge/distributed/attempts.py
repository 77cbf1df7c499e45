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

_POLL_SECONDS = 0.01


def name_attempt(store: Any, rank: int, world_size: int, timeout_seconds: float) -> str:
    """Return a name for this attempt: the same on every rank, and another one in every attempt.

    Args:
        store: Reached by every rank, perhaps full of keys of earlier attempts.
        rank: Of this process.
        world_size: Number of ranks.
        timeout_seconds: How long the others may take, > 0.

    Raises:
        RuntimeError: Ranks did not arrive in time; names them on rank 0.

    Collective: every rank must call.
    """
    if rank == 0:
        return _welcome_all(store, world_size, timeout_seconds)
    number = secrets.token_hex(8)
    store.set(f"srforge/hello/{rank}", number)
    key = f"srforge/welcome/{rank}/{number}"
    store.wait([key], timedelta(seconds=timeout_seconds))
    name: str = store.get(key).decode()
    store.set(f"srforge/thanks/{name}/{rank}", "")
    return name


def _welcome_all(store: Any, world_size: int, timeout_seconds: float) -> str:
    name, missing = secrets.token_hex(8), set(range(1, world_size))
    deadline = time.monotonic() + timeout_seconds
    while missing:
        for rank in sorted(missing):
            if store.check([f"srforge/thanks/{name}/{rank}"]):
                missing.discard(rank)
            elif store.check([f"srforge/hello/{rank}"]):  # of a dead process, perhaps: the living one replaces it soon
                number = store.get(f"srforge/hello/{rank}").decode()
                store.set(f"srforge/welcome/{rank}/{number}", name)
        if missing and time.monotonic() > deadline:
            raise RuntimeError(f"ranks {sorted(missing)} did not arrive within {timeout_seconds:.0f} s")
        time.sleep(_POLL_SECONDS if missing else 0)
    return name
