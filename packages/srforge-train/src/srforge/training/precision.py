"""Number formats and speed: autocast, the gradient scaler, memory format, determinism, compilation."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from srforge.training.options import RunnerOptions

_AUTOCAST_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """How numbers are kept during forward and backward passes.

    Attributes:
        scaler: Scales the loss under ``fp16``; for the other formats it is disabled and passes everything through.

    Args:
        mode: ``fp32``, ``tf32``, ``bf16`` or ``fp16``.
        device: Where the model computes.
    """

    def __init__(self, mode: str, device: torch.device) -> None:
        self.mode = mode
        self._device_type = device.type
        self.scaler = torch.amp.GradScaler(device.type, enabled=mode == "fp16")

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context for a forward pass; the backward pass that follows it computes in the same format."""
        if self._device_type == "cuda":
            # Global switches of torch, set at each forward: a runner of another mode may have run in between.
            torch.backends.cuda.matmul.allow_tf32 = self.mode == "tf32"
            torch.backends.cudnn.allow_tf32 = self.mode == "tf32"
        if self.mode not in _AUTOCAST_TYPES:
            return nullcontext()
        return torch.autocast(self._device_type, dtype=_AUTOCAST_TYPES[self.mode])


def accelerate(model: nn.Module, options: RunnerOptions) -> Any:
    """Apply the speed options to a prepared model and return what the loop is to call.

    ``torch.compile`` goes around the **wrapped** module: inside, the gradient sync would split the graph. A batch of
    another shape than the first (a short last one) runs the model as it is.
    """
    if options.deterministic:
        torch.use_deterministic_algorithms(mode=True)
        torch.backends.cudnn.benchmark = False
    if options.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if options.compile == "off":
        return model
    return CompiledForFirstShape(model, options.compile)


class CompiledForFirstShape:
    """A model that runs compiled for inputs shaped like the first ones, and as it is for any other.

    Args:
        model: The model to call, wrapped by its strategy.
        mode: Mode of ``torch.compile``.
    """

    def __init__(self, model: nn.Module, mode: str) -> None:
        self._model = model
        self._compiled = torch.compile(model, mode=mode, dynamic=False)
        self._shapes: tuple[Any, ...] | None = None

    def __call__(self, *inputs: Any) -> Any:
        """Run the model."""
        shapes = (self._model.training, *(_shape_of(value) for value in inputs))
        self._shapes = self._shapes or shapes
        return (self._compiled if shapes == self._shapes else self._model)(*inputs)


def _shape_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    if isinstance(value, dict):
        return tuple((key, _shape_of(part)) for key, part in value.items())
    return None
