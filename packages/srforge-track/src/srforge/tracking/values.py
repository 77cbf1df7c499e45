"""Turn what a run reports into plain values: flat metrics, images as bytes, configurations without secrets."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from srforge.distributed.errors import ConfigurationError
from srforge.tracking.environment_variables import secret_values

if TYPE_CHECKING:
    import numpy.typing as npt

REDACTED = "[redacted]"
_SECRET_NAME = re.compile(
    r"(?:^|[_.\-])(?:api_?key|access_?key|secret|token|passw(?:or)?d|credentials?)$|^api_?key", re.IGNORECASE
)


def flatten_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return nested metrics as one level of floats, names joined by ``/``.

    Raises:
        ConfigurationError: A value is no single number, a name is taken twice, or a name is ``epoch``, the axis.
    """
    flat: dict[str, float] = {}
    for name, value in _leaves(metrics, ""):
        if name in flat or name == "epoch":
            reason = "the name of the axis" if name == "epoch" else "there twice"
            raise ConfigurationError(f"`metrics` must have names of their own, but {name!r} is {reason}. Rename it.")
        try:
            flat[name] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigurationError(
                f"`metrics[{name!r}]` must be one number, but is {type(value).__name__}. Reduce it first."
            ) from error
    return flat


def json_number(value: float) -> float | str:
    """Return a float as JSON can hold it: ``"nan"``, ``"inf"`` and ``"-inf"`` as text, which ``float`` reads back."""
    return value if math.isfinite(value) else str(value)


def plain_config(config: Any, name: str = "") -> Any:
    """Return a configuration as dicts, lists and scalars, with whatever may be a key or a password replaced.

    Strings under a telling name (``api_key``, ``token``, ``password``, ...) and strings that contain the value of
    ``WANDB_API_KEY`` are replaced; other types than JSON's become their text.
    """
    if isinstance(config, Mapping):
        return {str(key): plain_config(value, str(key)) for key, value in config.items()}
    if isinstance(config, Sequence) and not isinstance(config, (str, bytes)):
        return [plain_config(value, name) for value in config]
    if callable(getattr(config, "item", None)) and getattr(config, "ndim", None) == 0:
        config = config.item()  # a scalar of NumPy or torch
    if config is None or isinstance(config, (bool, int)):
        return config
    if isinstance(config, float):
        return json_number(float(config))
    text = str(config)
    is_secret = text and (_SECRET_NAME.search(name) or any(secret in text for secret in secret_values()))
    return REDACTED if is_secret else text


def to_pixels(image: Any) -> npt.NDArray[np.uint8]:
    """Return an image as a uint8 array ``(H, W, 3)``.

    Args:
        image: uint8 array ``(H, W)``, ``(H, W, 1)`` or ``(H, W, 3)``; or tensor ``(H, W)`` or ``(C, H, W)`` with C 1 or
            3, uint8 or float in [0, 1]. Floats are clamped and rounded half to even; NaN becomes 0.

    Raises:
        ConfigurationError: Another shape or dtype.
    """
    if isinstance(image, torch.Tensor):
        tensor = image.detach().to("cpu")
        if tensor.is_floating_point():
            tensor = (torch.nan_to_num(tensor.double(), nan=0.0).clamp(0.0, 1.0) * 255.0).round().to(torch.uint8)
        pixels: npt.NDArray[Any] = tensor.numpy()
        pixels = np.moveaxis(pixels, 0, -1) if pixels.ndim == 3 else pixels
    else:
        pixels = np.asarray(image)
    if pixels.ndim == 2:
        pixels = pixels[..., np.newaxis]
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[-1] not in {1, 3} or 0 in pixels.shape:
        raise ConfigurationError(
            "`image` must be a uint8 array (H, W, 3) or a tensor (C, H, W) with 1 or 3 channels, but is "
            f"{type(image).__name__} {tuple(image.shape) if hasattr(image, 'shape') else ''} "
            f"{getattr(image, 'dtype', '')}. Choose three bands of it, or convert it."
        )
    return np.ascontiguousarray(np.broadcast_to(pixels, (*pixels.shape[:2], 3)))


def _leaves(metrics: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in metrics.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{name}/")
        else:
            yield name, value
