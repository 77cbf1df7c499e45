"""Plain functions for people with a training script of their own, in the shape that such scripts expect.

They stand on the active strategy, so that gates, samplers and metrics of this package work beside them, with one
process as well as under torchrun.
"""

from __future__ import annotations

import math
import random
import sys
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from srforge.distributed.active import get_active_strategy, is_strategy_chosen, resolve_strategy, set_active_strategy
from srforge.distributed.errors import ConfigurationError, EmptyReductionError
from srforge.distributed.options import DistributedOptions

if TYPE_CHECKING:
    from torch import nn


def setup_ddp() -> tuple[int, int, int]:
    """Join the fleet that the launcher started, or be alone; idempotent.

    ``get_active_strategy().device`` is the device to train on: this rank's GPU, else the CPU.

    Returns:
        ``(rank, world_size, local_rank)``; ``(0, 1, 0)`` without a launcher.

    Raises:
        LaunchEnvironmentError: The launcher's variables are missing or wrong.

    Collective: every rank must call.
    """
    strategy = get_active_strategy()
    if not is_strategy_chosen():
        strategy = resolve_strategy("auto", DistributedOptions())
        strategy.setup()
        set_active_strategy(strategy)
    topology = strategy.topology
    return topology.rank, topology.world_size, topology.local_rank


def cleanup_ddp() -> None:
    """Leave the fleet: close the process group, if this package opened it; idempotent."""
    get_active_strategy().teardown()
    set_active_strategy(None)


def set_seed(seed: int, rank: int = 0) -> None:
    """Seed python, numpy (if it is loaded) and torch on all devices with ``seed + rank``, and make cudnn repeatable.

    Build the model with the same seed on every rank, or let ``setup_device`` send rank 0's weights; give the rank when
    the ranks' augmentations are to differ.

    Args:
        seed: Seed of the run, >= 0.
        rank: Rank of this process.

    Raises:
        ConfigurationError: ``seed + rank`` is negative.
    """
    actual = seed + rank
    if actual < 0:
        raise ConfigurationError(f"`seed` + `rank` must be >= 0, but is {actual}. Choose a seed from 0 up.")
    random.seed(actual)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(actual % 2**32)
    torch.manual_seed(actual)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def reduce_tensor(tensor: Tensor, op: str = "mean", count: float | None = None) -> Tensor:
    """Return a tensor reduced over the ranks, the same bits on every rank; the argument stays as it is.

    Meant for losses and metrics: all ranks' tensors are gathered.

    Args:
        tensor: This rank's value, any shape, the same on every rank.
        op: ``mean`` or ``sum``.
        count: Number of samples behind this rank's mean. Given, the means are weighted by it, which makes the result
            the mean over all samples; a rank with count 0 adds nothing. All ranks give one, or none does.

    Returns:
        The reduced tensor, on the same device. Sums keep the dtype, means of integers are float64.

    Raises:
        ConfigurationError: ``op`` is unknown, or ``count`` is given for a sum.
        EmptyReductionError: On every rank: the count is 0 on all of them.

    Collective: every rank must call.
    """
    if op not in ("mean", "sum"):
        raise ConfigurationError(f"`op` must be mean or sum, but is {op!r}. Use reduce_metrics for other reductions.")
    if op == "sum" and count is not None:
        raise ConfigurationError(f"`count` must be None for a sum, but is {count}. Use op='mean' to weight by count.")
    strategy = get_active_strategy()
    if op == "sum":
        return _sum_in_rank_order(strategy.all_gather(tensor.detach()))
    weight = 1.0 if count is None else float(count)
    # float64 on the CPU: not every device has it.
    packed = torch.cat([tensor.detach().cpu().double().reshape(-1), torch.tensor([weight], dtype=torch.float64)])
    gathered = strategy.all_gather(packed)
    values, weights = gathered[:, :-1], gathered[:, -1:]
    total_weight = _sum_in_rank_order(weights)
    if total_weight.item() == 0:
        raise EmptyReductionError(
            "`count` must be above 0 on at least one rank, but is 0 on all of them. Skip the reduction of what nobody saw."
        )
    # Not values * 0: the mean of no samples is NaN.
    weighted = torch.where(weights > 0, values * weights, 0.0)
    mean = (_sum_in_rank_order(weighted) / total_weight).reshape(tensor.shape)
    return mean.to(tensor.device, tensor.dtype) if tensor.is_floating_point() else mean


def get_model_size(model: nn.Module) -> str:
    """Return the number of trainable parameters as people say it: ``950``, ``18.4K``, ``16.7M``, ``1.2B``."""
    size = float(sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad))
    for unit in ("", "K", "M"):
        if size < 999.95:  # above it, one decimal would show 1000.0
            return f"{size:.1f}{unit}" if unit else f"{size:.0f}"
        size /= 1000
    return f"{size:.1f}B"


def format_time(seconds: float) -> str:
    """Return a duration as ``1:02:03``, with days in front where there are any (``2 days, 1:02:03``).

    Raises:
        ConfigurationError: The duration is negative or not finite.
    """
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ConfigurationError(
            f"`seconds` must be finite and >= 0, but is {seconds}. Subtract the start from the end."
        )
    return str(timedelta(seconds=round(seconds)))


def _sum_in_rank_order(gathered: Tensor) -> Tensor:
    """Add ``(world_size, ...)`` one rank after another: a vectorised sum may associate differently per machine."""
    total = gathered[0].clone()
    for value in gathered[1:]:
        total += value
    return total
