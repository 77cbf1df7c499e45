"""Exponential moving average of a model's weights."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from srforge.distributed import ConfigurationError, copy_unwrapped, unwrap_module


class ExponentialMovingAverage:
    """A bare copy of a model whose parameters follow the trained ones slowly; buffers are copied as they are.

    Every rank keeps the same average of the same weights, so no communication is needed.

    Attributes:
        model: The averaged copy, without wrappers, in evaluation mode and without gradients.

    Args:
        model: The prepared model.
        decay: Share of the old average kept at each optimizer step, in [0, 1).
        warmup: Let the decay grow as ``(1 + n) / (10 + n)`` over the first steps n, so that the average does not cling
            to the initial weights.

    Raises:
        ConfigurationError: ``decay`` is outside its range.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999, *, warmup: bool = True) -> None:
        if not 0 <= decay < 1:
            raise ConfigurationError(f"`decay` must be in [0, 1), but is {decay}.")
        self.decay = decay
        self.warmup = warmup
        self.num_updates = 0
        self._source = model
        self.model = copy_unwrapped(model).eval().requires_grad_(False)  # torch's signature
        pairs = list(zip(self.model.parameters(), model.parameters(), strict=True))
        moving = [pair for pair in pairs if pair[1].is_floating_point() or pair[1].is_complex()]
        self._averages: list[torch.Tensor] = [average for average, _ in moving]
        self._sources: list[torch.Tensor] = [source for _, source in moving]
        # Integers have no average: they are copied, as buffers are.
        self._copied = [pair for pair in pairs if not (pair[1].is_floating_point() or pair[1].is_complex())]

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the current weights; call it after each optimizer step.

        Raises:
            ConfigurationError: The model has other buffers by now.
        """
        decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates)) if self.warmup else self.decay
        self.num_updates += 1
        if self._averages:
            torch._foreach_lerp_(self._averages, self._sources, 1 - decay)  # torch's documented fused loop
        averages, sources = list(self.model.buffers()), list(self._source.buffers())
        if len(averages) != len(sources):
            self._refuse_other_buffers()
        for average, source in (*self._copied, *zip(averages, sources, strict=True)):
            average.copy_(source)

    def _refuse_other_buffers(self) -> None:
        known = {name for name, _ in self.model.named_buffers()}
        found = {name for name, _ in bare_view(self._source).named_buffers()}
        raise ConfigurationError(
            f"The model must keep the buffers that it had when its average was made, but {sorted(known ^ found)} came or "
            "went. Register them in __init__, or run one forward pass before making the average."
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the averaged weights, buffers and the number of updates."""
        return {"model": self.model.state_dict(), "num_updates": self.num_updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the average back."""
        self.model.load_state_dict(state["model"])
        self.num_updates = state["num_updates"]


def bare_view(model: nn.Module) -> nn.Module:
    """Return the model without the wrappers of its strategy, at any depth, sharing all parameters and buffers with it.

    A module that holds a wrapped one is stood for by a shallow copy that holds the bare one.
    """
    bare = unwrap_module(model)
    children = {name: None if child is None else bare_view(child) for name, child in bare._modules.items()}  # noqa: SLF001  # the registry is what must differ
    if all(child is bare._modules[name] for name, child in children.items()):  # noqa: SLF001  # as above
        return bare
    view = copy.copy(bare)
    view._modules = children  # noqa: SLF001  # as above
    return view
