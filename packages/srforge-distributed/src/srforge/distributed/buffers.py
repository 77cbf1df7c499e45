"""Buffers that are the same on every rank: BatchNorm's running statistics averaged, every other buffer rank 0's."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from srforge.distributed.packing import flatten, named_tensors, packs, unflatten


def sync_buffers(
    model: nn.Module, all_gather: Callable[[Tensor], Tensor], broadcast: Callable[[Tensor], Tensor]
) -> None:
    """Give every rank the same buffers, in one packed collective per kind and element width.

    Each rank's BatchNorm has seen its own shard: the mean of the running statistics is what a model of all shards
    would track, up to the spread of the batch means. Other buffers (spectral norm's vectors, counters, tables) have no
    mean that means something, so they become rank 0's.

    Args:
        model: The model, wrapped or not; changed in place.
        all_gather: ``(n,) -> (world_size, n)`` in rank order.
        broadcast: Returns rank 0's tensor.

    Collective: every rank must call, with the same buffers.
    """
    named_tensors(model)  # refuses what cannot travel, by name
    statistics = batchnorm_statistics(model)
    averaged = {id(tensor) for tensor in statistics}
    for dtype in sorted({tensor.dtype for tensor in statistics}, key=str):
        pack = [tensor for tensor in statistics if tensor.dtype == dtype]
        gathered = all_gather(torch.cat([tensor.reshape(-1) for tensor in pack]))
        # Float64 and rank order: equal values stay equal to the bit, and every rank computes the same bits.
        mean = gathered.to(torch.float64).mean(dim=0).to(dtype)
        for tensor, values in zip(pack, torch.split(mean, [tensor.numel() for tensor in pack]), strict=True):
            tensor.copy_(values.reshape(tensor.shape))
    for pack in packs([tensor for tensor in model.buffers() if id(tensor) not in averaged]):
        unflatten(broadcast(flatten(pack)), pack)


def batchnorm_statistics(model: nn.Module) -> list[Tensor]:
    """Return the running means and variances of every BatchNorm layer in the model."""
    found: list[Tensor] = []
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            found += [tensor for tensor in (module.running_mean, module.running_var) if tensor is not None]
    return found
