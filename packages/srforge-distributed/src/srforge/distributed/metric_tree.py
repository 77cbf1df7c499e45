"""The nested mappings of metrics that a rank reports, and the sums at their leaves.

Turning a tree into numbers and back; what ranks say to each other about them is in ``reductions``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from srforge.distributed.errors import ConfigurationError

Key = str | int
Path = tuple[Key, ...]

REDUCTIONS = ("mean", "sum", "min", "max")


@dataclass(frozen=True)
class MetricSum:
    """What one rank knows of one metric: a total over its samples and how many there were.

    Attributes:
        total: Sum over this rank's samples (``mean``, ``sum``), or their extreme (``min``, ``max``): a number or a
            tensor of shape ``()`` on any device, best float64. Integers stay exact up to 2^53.
        count: Number of samples (or their weight) in ``total``, >= 0: a number or a tensor of shape ``()``.
        reduction: ``mean`` (sum of totals over sum of counts), ``sum``, ``min`` or ``max``.

    Raises:
        ConfigurationError: ``reduction`` is unknown, or a tensor is not a real one of shape ``()``.
    """

    total: Tensor | float
    count: Tensor | float
    reduction: str = "mean"

    def __post_init__(self) -> None:
        if self.reduction not in REDUCTIONS:
            raise ConfigurationError(
                f"`reduction` must be one of {', '.join(REDUCTIONS)}, but is {self.reduction!r}. "
                f"Combine other statistics from sums and counts after the reduction."
            )
        for name, number in (("total", self.total), ("count", self.count)):
            if isinstance(number, Tensor):
                if number.dim() != 0 or number.is_complex():
                    raise ConfigurationError(
                        f"`{name}` must be a real tensor of shape (), but is {number.dtype} of shape "
                        f"{tuple(number.shape)}. Sum over the batch first."
                    )
            elif not isinstance(number, (int, float)):
                raise ConfigurationError(
                    f"`{name}` must be a number or a tensor of shape (), but is {type(number).__name__}. Convert it."
                )


def spell(path: Path) -> str:
    """Return a path as people write it: ``("validation", "psnr", "B02")`` is ``validation/psnr/B02``."""
    return "/".join(str(key) for key in path)


def flatten(tree: Mapping[Any, Any], path: Path = ()) -> dict[Path, MetricSum | None]:
    """Return the leaves of a tree by path, in the tree's order; an empty group is a leaf with the value None.

    Raises:
        ConfigurationError: A key is no string and no integer, or a leaf is no ``MetricSum``.
    """
    if not isinstance(tree, Mapping):
        raise ConfigurationError(f"metrics must be a mapping, but are {type(tree).__name__}. Give each a key.")
    leaves: dict[Path, MetricSum | None] = {}
    for key, node in tree.items():
        here = (*path, key)
        if isinstance(key, bool) or not isinstance(key, (str, int)):
            raise ConfigurationError(
                f"a metric's key must be a string or an integer, but is {key!r} below `{spell(path)}`. Spell it out."
            )
        if isinstance(node, Mapping):
            leaves.update(flatten(node, here) or {here: None})
        elif isinstance(node, MetricSum):
            leaves[here] = node
        else:
            raise ConfigurationError(
                f"`{spell(here)}` must be a MetricSum, but is {type(node).__name__}. "
                f"Give the total and the count it covers: MetricSum(total, count)."
            )
    return leaves


def rebuild(tree: Mapping[Any, Any], union: Sequence[Path], values: Mapping[Path, float | None]) -> dict[Any, Any]:
    """Return ``tree`` in its own nesting and order with a float at each leaf that has one.

    Args:
        tree: This rank's metrics.
        union: Paths of all ranks' leaves and empty groups; those this rank lacks are appended to their groups.
        values: Reduced values by path; None where no rank counted anything, which leaves the key out.
    """
    result = _own_part(tree, (), values)
    for path in union:
        group = result
        for key in path[:-1]:
            group = group.setdefault(key, {})
        value = values.get(path)
        if value is not None:
            group.setdefault(path[-1], value)
        elif path not in values:
            group.setdefault(path[-1], {})
    return result


def _own_part(tree: Mapping[Any, Any], path: Path, values: Mapping[Path, float | None]) -> dict[Any, Any]:
    result: dict[Any, Any] = {}
    for key, node in tree.items():
        if isinstance(node, Mapping):
            result[key] = _own_part(node, (*path, key), values)
        else:
            value = values.get((*path, key))
            if value is not None:
                result[key] = value
    return result


def pack(leaves: Sequence[MetricSum | None]) -> Tensor:
    """Return totals and counts as float64 of shape ``(num_leaves, 2)`` on the CPU; None packs as (0, 0).

    One transfer per device and dtype that occurs, however many leaves. The conversion to float64 happens on the CPU,
    since not every device has that type (mps).
    """
    numbers: list[Tensor | float] = []
    for leaf in leaves:
        numbers += (0.0, 0.0) if leaf is None else (leaf.total, leaf.count)
    packed = [0.0 if isinstance(number, Tensor) else _as_float(number) for number in numbers]
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for position, number in enumerate(numbers):
        if isinstance(number, Tensor):
            groups.setdefault((number.device, number.dtype), []).append(position)
    for positions in groups.values():
        stacked = torch.stack([torch.as_tensor(numbers[position]) for position in positions])
        for position, value in zip(positions, stacked.cpu().double().tolist(), strict=True):
            packed[position] = value
    return torch.tensor(packed, dtype=torch.float64).reshape(len(leaves), 2)


def _as_float(number: float) -> float:
    try:
        return float(number)
    except OverflowError:  # an integer beyond the range of a double
        return float("inf") if number > 0 else float("-inf")
