"""Image quality, one float64 value an image: PSNR and SSIM on all channels or on luma.

A data set's figure is the mean of its images' values, so the runners only average. Rules that change published
decibels are arguments here: the border that is cut, the rounding, the colour space.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from srforge.distributed.errors import ConfigurationError
from srforge.sr.colour import require_float, rgb_to_luma

_WINDOW = 11
_SIGMA = 1.5


def psnr(
    prediction: Tensor,
    target: Tensor,
    *,
    scale: int,
    border: int | None = None,
    levels: int | None = 255,
    cap: float = 100.0,
) -> Tensor:
    """Peak signal-to-noise ratio over all channels, in dB, with peak 1.

    Args:
        prediction: ``(N, C, H, W)``, floating point, nominally in [0, 1]; values outside are clamped.
        target: ``(N, C, H, W)``, floating point in [0, 1].
        scale: SR factor; it is the default border.
        border: Pixels cut from each side before comparing, >= 0. None: ``scale``.
        levels: Both images are rounded to this many steps of [0, 1] first: 255 is what an 8-bit file would hold,
            65535 a 16-bit file. None compares the floats as they are.
        cap: Value of an identical pair, and upper bound of any other, in dB: one perfect image must not make the mean
            infinite.

    Returns:
        ``(N,)``, float64 (float32 on devices without it), at most ``cap``. NaN where the prediction is not finite.

    Raises:
        ConfigurationError: Shapes differ, an image is not floating point, or the border leaves no pixel.
    """
    predicted, wanted = _comparable(prediction, target, scale if border is None else border, levels)
    return _decibels(predicted, wanted, cap)


def psnr_y(
    prediction: Tensor,
    target: Tensor,
    *,
    scale: int,
    border: int | None = None,
    levels: int | None = 255,
    cap: float = 100.0,
) -> Tensor:
    """Peak signal-to-noise ratio of luma (BT.601, studio range 16 to 235, peak 255), in dB: the usual SR figure.

    RGB is rounded to ``levels`` first; luma itself is not rounded.

    Args:
        prediction: ``(N, 3, H, W)``; the rest as in ``psnr``.
        target: ``(N, 3, H, W)``.
        scale: As in ``psnr``.
        border: As in ``psnr``.
        levels: As in ``psnr``.
        cap: As in ``psnr``.

    Returns:
        As ``psnr``.

    Raises:
        ConfigurationError: As ``psnr``, or the images are not RGB.
    """
    predicted, wanted = _comparable(prediction, target, scale if border is None else border, levels)
    return _decibels(rgb_to_luma(predicted), rgb_to_luma(wanted), cap)


def ssim(
    prediction: Tensor, target: Tensor, *, scale: int, border: int | None = None, levels: int | None = 255
) -> Tensor:
    """Structural similarity, mean over channels and over the windows that lie wholly inside the image.

    Gaussian window 11 x 11 with sigma 1.5, K1 = 0.01, K2 = 0.03, data range 1, population (co)variances.

    Args:
        prediction: ``(N, C, H, W)``; the rest as in ``psnr``.
        target: ``(N, C, H, W)``.
        scale: As in ``psnr``.
        border: As in ``psnr``.
        levels: As in ``psnr``.

    Returns:
        ``(N,)`` in [-1, 1], float64 (float32 on devices without it). NaN where the prediction is not finite.

    Raises:
        ConfigurationError: As ``psnr``, or less than 11 x 11 pixels are left inside the border.

    Source: Z. Wang et al., "Image Quality Assessment: From Error Visibility to Structural Similarity", 2004.
    """
    predicted, wanted = _comparable(prediction, target, scale if border is None else border, levels)
    return _structural_similarity(predicted, wanted)


def ssim_y(
    prediction: Tensor, target: Tensor, *, scale: int, border: int | None = None, levels: int | None = 255
) -> Tensor:
    """Structural similarity of luma (BT.601, studio range), otherwise as ``ssim``.

    Args:
        prediction: ``(N, 3, H, W)``; the rest as in ``psnr``.
        target: ``(N, 3, H, W)``.
        scale: As in ``psnr``.
        border: As in ``psnr``.
        levels: As in ``psnr``.

    Returns:
        As ``ssim``.

    Raises:
        ConfigurationError: As ``ssim``, or the images are not RGB.
    """
    predicted, wanted = _comparable(prediction, target, scale if border is None else border, levels)
    return _structural_similarity(rgb_to_luma(predicted), rgb_to_luma(wanted))


def gradient_energy_ratio(prediction: Tensor, target: Tensor, *, scale: int, border: int | None = None) -> Tensor:
    """Gradient energy of the prediction over that of the target: below 1 is blurred, above 1 sharpened or noisy.

    It sees how much detail there is, not whether it is right: read it beside PSNR. It is what adversarial training moves.

    Args:
        prediction: ``(N, C, H, W)``; the rest as in ``psnr``; not rounded.
        target: ``(N, C, H, W)``.
        scale: As in ``psnr``.
        border: As in ``psnr``.

    Returns:
        ``(N,)``, >= 0, float64 (float32 on devices without it): mean squared differences of neighbours. 1e-8 is added
        to both energies, so that a flat target gives a number. NaN where the prediction is not finite.

    Raises:
        ConfigurationError: As ``psnr``.
    """
    predicted, wanted = _comparable(prediction, target, scale if border is None else border, None)
    return (_gradient_energy(predicted) + 1e-8) / (_gradient_energy(wanted) + 1e-8)


def _comparable(prediction: Tensor, target: Tensor, border: int, levels: int | None) -> tuple[Tensor, Tensor]:
    """Both images in the widest float of the device, clamped, rounded to ``levels``, without their border."""
    if prediction.shape != target.shape or prediction.ndim != 4:
        raise ConfigurationError(
            f"`prediction` must be (N, C, H, W) of the shape of `target` {tuple(target.shape)}, "
            f"but is {tuple(prediction.shape)}. Compare the scale and out_channels of the model with the data."
        )
    require_float(prediction, target)
    height, width = prediction.shape[-2:]
    if border < 0 or 2 * border >= min(height, width):
        raise ConfigurationError(
            f"`border` must be at least 0 and leave pixels of a {height}x{width} image, but is {border}. "
            "Use a smaller border or larger images."
        )
    inner = (..., slice(border, height - border), slice(border, width - border))
    return _rounded(prediction[inner], levels), _rounded(target[inner], levels)


def _rounded(image: Tensor, levels: int | None) -> Tensor:
    wide = image.detach().to(torch.float32 if image.device.type == "mps" else torch.float64)
    # x - x is 0 for numbers and NaN otherwise: clamping alone would turn an infinite pixel into a white one.
    clamped = wide.clamp(0.0, 1.0) + (wide - wide)
    return clamped if levels is None else (clamped * levels).round() / levels


def _gradient_energy(image: Tensor) -> Tensor:
    rows, columns = image.diff(dim=-2).square(), image.diff(dim=-1).square()
    return (rows.sum(dim=(1, 2, 3)) + columns.sum(dim=(1, 2, 3))) / image.shape[1:].numel()


def _decibels(prediction: Tensor, target: Tensor, cap: float) -> Tensor:
    squared_error = (prediction - target).square().mean(dim=(1, 2, 3))
    return (-10.0 * squared_error.log10()).clamp(max=cap)


def _structural_similarity(prediction: Tensor, target: Tensor) -> Tensor:
    height, width = prediction.shape[-2:]
    if min(height, width) < _WINDOW:
        raise ConfigurationError(
            f"`prediction` must have at least {_WINDOW}x{_WINDOW} pixels inside the border for SSIM, "
            f"but has {height}x{width}. Use larger images."
        )
    mean_p, mean_t = _windowed(prediction), _windowed(target)
    variance_p = _windowed(prediction.square()) - mean_p.square()
    variance_t = _windowed(target.square()) - mean_t.square()
    covariance = _windowed(prediction * target) - mean_p * mean_t
    c1, c2 = 0.01**2, 0.03**2
    luminance = (2 * mean_p * mean_t + c1) / (mean_p.square() + mean_t.square() + c1)
    structure = (2 * covariance + c2) / (variance_p + variance_t + c2)
    return (luminance * structure).mean(dim=(1, 2, 3))


def _windowed(image: Tensor) -> Tensor:
    """Gaussian-weighted mean around each pixel whose window lies inside the image, ``(N, C, H - 10, W - 10)``."""
    num_images, num_channels, height, width = image.shape
    # Made on the device: copying a list there would be a host sync.
    offsets = torch.arange(_WINDOW, dtype=image.dtype, device=image.device) - _WINDOW // 2
    kernel = (-offsets.square() / (2 * _SIGMA**2)).exp()
    kernel = kernel / kernel.sum()
    planes = image.reshape(num_images * num_channels, 1, height, width)
    planes = functional.conv2d(functional.conv2d(planes, kernel.view(1, 1, -1, 1)), kernel.view(1, 1, 1, -1))
    return planes.view(num_images, num_channels, *planes.shape[-2:])
