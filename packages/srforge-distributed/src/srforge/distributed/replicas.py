"""Replicas are checked, not assumed, to be identical: 128-bit fingerprints of parameters and buffers."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from srforge.distributed.errors import ReplicaDivergenceError
from srforge.distributed.packing import flatten, named_tensors, packs

# Odd 64-bit constants as signed integers. Multiplication by an odd number is a bijection modulo 2**64.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FIRST = 0xBF58476D1CE4E5B9 - 2**64
_SECOND = 0x94D049BB133111EB - 2**64
_THIRD = 0xD6E8FEB86659FD93 - 2**64
# Words mixed at a time: what a CPU's cache holds, what a GPU takes in few kernels.
_CPU_BLOCK, _DEVICE_BLOCK = 2**15, 2**24
_SHOWN = 3


def fingerprint(tensors: Iterable[Tensor]) -> Tensor:
    """Return 128 bits that depend on every bit of the tensors and on its place, int64, shape ``(2,)``.

    Two lanes of sums over mixed 64-bit words, each word mixed with its position first: equal sums of different
    content need a coincidence of 2**-128. Everything runs on the tensors' device, without a host sync.
    Source: the mixing constants are those of SplitMix64 (Steele et al., 2014).
    """
    total: Tensor | None = None
    for pack in packs(tensors):
        flat = flatten(pack)
        lanes = _mixed_sums(_as_words(flat), offset=flat.numel() * flat.element_size())
        total = lanes if total is None else total * _THIRD + lanes.to(total.device)
    return torch.zeros(2, dtype=torch.int64) if total is None else total


def _as_words(flat: Tensor) -> Tensor:
    """Return flat integers of any width as int64 words, padded with zero bytes."""
    flat_bytes = flat.view(torch.uint8)
    padding = torch.zeros(-flat_bytes.numel() % 8, dtype=torch.uint8, device=flat.device)
    if padding.numel():
        flat_bytes = torch.cat([flat_bytes, padding])
    return flat_bytes.view(torch.int64)


def _mixed_sums(words: Tensor, offset: int) -> Tensor:
    """Return the two sums over one pack, int64, shape ``(2,)``; positions count from ``offset``, its length."""
    sums = torch.zeros(2, dtype=torch.int64, device=words.device)
    for block in torch.split(words, _CPU_BLOCK if words.device.type == "cpu" else _DEVICE_BLOCK):
        mixed = torch.arange(offset, offset + block.numel(), dtype=torch.int64, device=words.device).mul_(_GOLDEN)
        mixed.add_(block)
        for lane, multiplier in enumerate((_FIRST, _SECOND)):
            # int64 shifts are arithmetic: the mask makes them logical.
            mixed.bitwise_xor_((mixed >> 31).bitwise_and_(2**33 - 1)).mul_(multiplier)
            mixed.bitwise_xor_((mixed >> 29).bitwise_and_(2**35 - 1))
            sums[lane] += mixed.sum()
        offset += block.numel()
    return sums


def check_replicas(
    model: nn.Module,
    all_gather: Callable[[Tensor], Tensor],
    all_gather_object: Callable[[Any], list[Any]],
    *,
    buffers: bool = True,
) -> None:
    """Compare the replicas of a model in one collective of 16 bytes per rank.

    Args:
        model: The model, wrapped or not.
        all_gather: ``(n,) -> (world_size, n)`` in rank order.
        all_gather_object: Value -> every rank's value; called only where the replicas differ.
        buffers: Compare the buffers too.

    Raises:
        ReplicaDivergenceError: On every rank: names the first differing tensors, the ranks and the largest difference.

    Collective: every rank must call.
    """
    named = named_tensors(model, buffers=buffers)
    prints = all_gather(fingerprint(tensor for _, tensor in named))
    if bool((prints == prints[0]).all()):
        return
    _raise_divergence(named, all_gather, all_gather_object)


def _raise_divergence(
    named: Sequence[tuple[str, Tensor]],
    all_gather: Callable[[Tensor], Tensor],
    all_gather_object: Callable[[Any], list[Any]],
) -> None:
    refuse_different_structures(named, all_gather, all_gather_object)
    own = [fingerprint([tensor]).cpu() for _, tensor in named]
    everyones = all_gather(torch.stack(own)).cpu()  # (world_size, tensors, 2)
    differs = (everyones != everyones[0]).any(dim=2)  # (world_size, tensors)
    positions = differs.any(dim=0).nonzero().flatten().tolist()
    lines = []
    for position in positions[:_SHOWN]:
        name, tensor = named[position]
        ranks = differs[:, position].nonzero().flatten().tolist()
        values = all_gather(tensor)
        lines.append(f"`{name}` on rank {', '.join(map(str, ranks))} ({_largest_difference(values)})")
    more = f" and {len(positions) - _SHOWN} more" if len(positions) > _SHOWN else ""
    raise ReplicaDivergenceError(
        f"replicas must be identical, but {len(positions)} of {len(named)} tensors differ from rank 0's: "
        f"{'; '.join(lines)}{more}. Call every part through the module that setup_device returned, exactly once per "
        "backward; unfreeze parameters before setup_device; step the optimizer on every rank; take random decisions from a "
        "generator that all ranks share."
    )


def _largest_difference(values: Tensor) -> str:
    """Return the largest absolute difference to rank 0 in words; ``values`` has shape ``(world_size, ...)``."""
    if values.is_complex():
        values = torch.view_as_real(values)
    values = values.to(torch.float64)
    difference = (values - values[0]).abs()
    if bool(difference.isnan().any()):
        return "NaN or inf among them"
    return f"largest difference {float(difference.max()):.3g}"


def refuse_different_structures(
    named: Sequence[tuple[str, Tensor]],
    all_gather: Callable[[Tensor], Tensor],
    all_gather_object: Callable[[Any], list[Any]],
) -> None:
    """Refuse models whose tensors differ between ranks in name, shape, type or in taking a gradient.

    Unlike shapes would reach rank 0's collectives unnoticed, unlike types would abort the process.

    Raises:
        ReplicaDivergenceError: On every rank: names the first difference and the ranks.

    Collective: every rank must call.
    """
    own = [
        f"{name}: {tuple(tensor.shape)} {tensor.dtype}{' trainable' if tensor.requires_grad else ''}"
        for name, tensor in named
    ]
    digest = hashlib.blake2b("\n".join(own).encode(), digest_size=16).digest()
    prints = all_gather(torch.tensor(list(digest), dtype=torch.uint8))
    if bool((prints == prints[0]).all()):
        return  # the names themselves travel only where they differ
    everyones = all_gather_object(own)
    for rank, theirs in enumerate(everyones):
        if theirs == everyones[0]:
            continue
        first = next((i for i, pair in enumerate(zip(everyones[0], theirs)) if pair[0] != pair[1]), None)  # noqa: B905 - unlike lengths are the case
        if first is None:
            first = min(len(everyones[0]), len(theirs))
        here, there = (lines[first] if first < len(lines) else "nothing" for lines in (everyones[0], theirs))
        raise ReplicaDivergenceError(
            f"the model must have the same tensors on every rank, but rank 0 has {here} where rank {rank} has {there}. "
            "Build the model from the same configuration on every rank."
        )
