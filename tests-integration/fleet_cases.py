"""What every case shares that runs on the ranks of a fleet.

Cases of one world size run one after the other in the same processes, each with a strategy of its own over the one
process group: starting processes is most of the cost.
"""

import importlib
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from harness import asked_backend, asked_device
from srforge.distributed import (
    DistributedOptions,
    TrainingStrategy,
    get_active_strategy,
    resolve_strategy,
    set_active_strategy,
)


def run_cases(names: list[str]) -> dict[str, Any]:
    """Run ``"module:function"`` cases and return their results; an exception's traceback in the place of a result."""
    results: dict[str, Any] = {}
    for name in names:
        torch.manual_seed(0)
        try:
            module, _, function = name.partition(":")
            results[name] = getattr(importlib.import_module(module), function)()
        except Exception:  # noqa: BLE001 - shown by the test of that case
            results[name] = traceback.format_exc()
        finally:
            set_active_strategy(None)
    return results


def start(**options: Any) -> TrainingStrategy:
    """Make a strategy of this fleet the active one; with NCCL also a fleet of one is wrapped."""
    if asked_backend() == "nccl":
        options = {"strategy": "ddp", **options}
    strategy = resolve_strategy(asked_device(), DistributedOptions(backend=asked_backend(), **options))
    strategy.setup()
    set_active_strategy(strategy)
    return strategy


def seeded(*shape: int, seed: int) -> Tensor:
    """Return normal numbers that depend on the seed only."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rank_data(*shape: int, rank: int | None = None) -> Tensor:
    """Return the data of one rank (this one), on the device."""
    strategy = get_active_strategy()
    return seeded(*shape, seed=100 + (strategy.rank if rank is None else rank)).to(strategy.device)


@contextmanager
def raises(kind: type[Exception]) -> Iterator[list[str]]:
    """Collect the message of an expected exception."""
    messages: list[str] = []
    try:
        yield messages
    except kind as error:
        messages.append(str(error))
