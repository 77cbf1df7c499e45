"""Pixel losses. Adversarial criteria live in ``srforge.training``, the perceptual loss in ``perceptual``.

Each loss gives one value a sample, so that any grouping of samples over ranks and micro-batches averages to the same
number. With a mask it gives a sum and a count instead: the mean over what the mask keeps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from srforge.distributed.errors import ConfigurationError
from srforge.sr.colour import require_float


def l1(prediction: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """Mean absolute difference.

    Args:
        prediction: ``(N, C, H, W)``, floating point.
        target: ``(N, C, H, W)``, floating point.
        mask: ``(N, 1, H, W)`` or ``(N, C, H, W)``, boolean or weights >= 0; kept pixels are 1. None keeps all.

    Returns:
        Without a mask one value a sample, ``(N,)``; with a mask the pair (sum, count) over the batch, both ``()``.

    Raises:
        ConfigurationError: The shapes do not fit, or an image is not floating point.
    """
    return _averaged(_difference(prediction, target, mask).abs(), mask)


def charbonnier(
    prediction: Tensor, target: Tensor, mask: Tensor | None = None, *, epsilon: float = 1e-3
) -> Tensor | tuple[Tensor, Tensor]:
    """Smooth L1: ``sqrt((prediction - target)^2 + epsilon^2)``, which is ``epsilon`` at equality.

    Args:
        prediction: ``(N, C, H, W)``, floating point.
        target: ``(N, C, H, W)``, floating point.
        mask: As in ``l1``.
        epsilon: Rounding of the corner at 0, in units of the image, > 0.

    Returns:
        As ``l1``.

    Raises:
        ConfigurationError: As ``l1``, or ``epsilon`` is not positive.

    Source: W.-S. Lai et al., "Deep Laplacian Pyramid Networks for Fast and Accurate Super-Resolution", 2017, eq. 1.
    """
    if epsilon <= 0:
        raise ConfigurationError(f"`epsilon` must be positive, but is {epsilon}. Use l1 for the loss with a corner.")
    return _averaged((_difference(prediction, target, mask).square() + epsilon**2).sqrt(), mask)


def _difference(prediction: Tensor, target: Tensor, mask: Tensor | None) -> Tensor:
    """``prediction - target``, 0 where the mask drops a pixel."""
    if prediction.shape != target.shape or prediction.ndim != 4:
        raise ConfigurationError(
            f"`prediction` must be (N, C, H, W) of the shape of `target` {tuple(target.shape)}, "
            f"but is {tuple(prediction.shape)}. Compare the scale and out_channels of the model with the data."
        )
    require_float(prediction, target)
    if mask is None:
        return prediction - target
    fits = mask.ndim == 4 and mask.shape[1] in (1, target.shape[1])
    if not fits or mask.shape[0] != target.shape[0] or mask.shape[2:] != target.shape[2:]:
        raise ConfigurationError(
            f"`mask` must be (N, 1 or C, H, W) for images {tuple(target.shape)}, but is {tuple(mask.shape)}. "
            "Give it the size of the HR images."
        )
    # Replaced before the difference: a dropped pixel may be NaN, and 0 * NaN is NaN, in the value and in the gradient.
    return prediction - torch.where(mask > 0, target, prediction.detach())


def _averaged(values: Tensor, mask: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
    if mask is None:
        return values.mean(dim=(1, 2, 3))
    kept = mask.to(values.dtype).expand_as(values)
    return (values * kept).sum(), kept.sum()
