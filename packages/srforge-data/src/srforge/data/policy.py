"""The worker policy: a pure function from what was asked to what torch's ``DataLoader`` gets."""

import multiprocessing
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

_NEED_WORKERS = ("multiprocessing_context", "persistent_workers", "prefetch_factor", "timeout")


def worker_policy(
    *, num_workers: int, device_type: str, start_methods: Sequence[str], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the worker-related arguments of a ``DataLoader``; what was given explicitly wins.

    ========================== ===================================== ==========================================
    argument                   default                               why
    ========================== ===================================== ==========================================
    ``multiprocessing_context`` ``forkserver`` where offered          no lock or thread of the rank is copied
    ``persistent_workers``     True with workers                     workers start once, not once an epoch
    ``pin_memory``             True on CUDA, dropped elsewhere       pinning needs CUDA
    ========================== ===================================== ==========================================

    Args:
        num_workers: Number of worker processes, >= 0.
        device_type: Where batches go: ``cuda``, ``cpu``, ``mps``.
        start_methods: Start methods that the platform offers.
        given: Explicit arguments of the ``DataLoader``; others than those above pass through.

    Returns:
        Arguments for ``torch.utils.data.DataLoader``, ``num_workers`` included.
    """
    policy = {"num_workers": num_workers, **given}
    if num_workers == 0:
        idle = [name for name in _NEED_WORKERS if policy.pop(name, None)]
        if idle:
            warnings.warn(
                f"`{'`, `'.join(idle)}` must come with num_workers > 0, but num_workers is 0: no effect. Leave it out.",
                stacklevel=3,
            )
    else:
        policy.setdefault("persistent_workers", True)
        if policy.get("multiprocessing_context") is None and "forkserver" in start_methods:
            policy["multiprocessing_context"] = "forkserver"
    if device_type == "cuda":
        policy.setdefault("pin_memory", True)
    else:
        policy["pin_memory"] = False
    return policy


def start_method_of(policy: Mapping[str, Any]) -> str:
    """Return the name of the start method that a policy's workers use.

    Args:
        policy: What ``worker_policy`` returned.
    """
    chosen = policy.get("multiprocessing_context")
    if chosen is None:
        return multiprocessing.get_start_method()
    return chosen if isinstance(chosen, str) else str(chosen.get_start_method())
