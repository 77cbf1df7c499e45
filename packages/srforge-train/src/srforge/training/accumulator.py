"""Sums and counts of metrics over an epoch, kept on the device: nothing here makes the host wait."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from srforge.distributed import MetricSum
from srforge.training.objective import Value, mean_of

Path = tuple[str, ...]


class MetricAccumulator:
    """Running (sum, count) of every metric leaf of an epoch.

    The sums of one step are stacked and added as one vector for each set of names, so the cost is one small kernel
    a leaf and two a step, however many bands there are.

    Args:
        device: Where values arrive; sums stay there in float64 (on the CPU if the device has no float64).
    """

    def __init__(self, device: torch.device) -> None:
        self._device = torch.device("cpu") if device.type == "mps" else device
        self._sums: dict[tuple[Path, ...], Tensor] = {}
        self._counts: dict[Path, Any] = {}  # a number where the host knows the count, a tensor where a mask decides

    @torch.no_grad()
    def update(self, values: Mapping[str, Value], count: int) -> None:
        """Add one batch.

        Args:
            values: Values of terms by name, as described in ``srforge.training.objective``.
            count: Real samples behind a batch mean of shape ``()``, >= 0. With 0 nothing is added: the batch only
                repeats samples that another rank counts.
        """
        if count == 0 or not values:
            return
        leaves = list(_leaves(values, count))
        schema = tuple(path for path, _, _ in leaves)
        vector = torch.stack([total.to(self._device) for _, total, _ in leaves])
        if schema in self._sums:
            self._sums[schema].add_(vector)
        else:
            self._sums[schema] = vector
        for path, _, leaf_count in leaves:
            self._counts[path] = self._counts.get(path, 0) + leaf_count

    def result(self) -> dict[str, Any]:
        """Return the sums and counts as a nested mapping with ``MetricSum`` leaves; a leaf per name that occurred."""
        totals: dict[Path, Tensor] = {}
        for schema, vector in self._sums.items():
            for path, total in zip(schema, vector.unbind(), strict=True):
                totals[path] = totals[path] + total if path in totals else total
        tree: dict[str, Any] = {}
        for path, total in totals.items():
            node = tree
            for name in path[:-1]:
                node = node.setdefault(name, {})
            node[path[-1]] = MetricSum(total, self._counts[path])
        return tree


def _leaves(values: Mapping[str, Any], count: int, prefix: Path = ()) -> Iterator[tuple[Path, Tensor, Any]]:
    """Yield ``(path, sum float64 (), count)`` of every leaf."""
    for name, value in values.items():
        path = (*prefix, name)
        if isinstance(value, Mapping):
            yield from _leaves(value, count, path)
        elif not isinstance(value, (tuple, Tensor)):
            mean_of("/".join(path), value)  # a hook's: refused by name
        elif isinstance(value, tuple):
            yield path, value[0].detach().double(), value[1]
        elif value.ndim == 1:
            yield path, value.detach().sum(dtype=torch.float64), value.shape[0]
        else:
            yield path, value.detach().double() * count, count
