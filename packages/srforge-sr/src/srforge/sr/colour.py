"""Pixel values: stored integers to floats and back, rounding to a number of levels, and luma.

No colour management and no gamma: super-resolution figures are taken on the stored values.
"""

import torch
from torch import Tensor

from srforge.distributed.errors import ConfigurationError

_PEAKS = {torch.uint8: 255.0, torch.uint16: 65535.0}


def to_float(image: Tensor) -> Tensor:
    """Bring stored values to [0, 1]: uint8 is divided by 255, uint16 by 65535, floating point is returned as it is.

    Args:
        image: Any shape; uint8, uint16 or floating point.

    Returns:
        Floating point tensor of the same shape, float32 for integer input.

    Raises:
        ConfigurationError: The dtype is another one, whose range nobody stated.
    """
    if image.is_floating_point():
        return image
    if image.dtype not in _PEAKS:
        raise ConfigurationError(
            f"`image` must be uint8, uint16 or floating point, but is {image.dtype}. Convert it where it is read."
        )
    return image.to(torch.float32) / _PEAKS[image.dtype]


def require_float(prediction: Tensor, target: Tensor) -> None:
    """Refuse stored integers where images in [0, 1] are compared: arithmetic on both would give a number, a wrong one.

    Args:
        prediction: Any shape.
        target: Any shape.

    Raises:
        ConfigurationError: One of them is not floating point.
    """
    if not (prediction.is_floating_point() and target.is_floating_point()):
        raise ConfigurationError(
            f"`prediction` and `target` must be floating point in [0, 1], but are {prediction.dtype} and {target.dtype}. "
            "Convert stored images with to_float."
        )


def to_stored(image: Tensor, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Round an image in [0, 1] to stored integers; values outside are clamped.

    Args:
        image: Any shape, floating point.
        dtype: ``torch.uint8`` or ``torch.uint16``.

    Returns:
        Tensor of ``dtype`` and the same shape, rounded to nearest (not cut off, which loses about 4 dB at high PSNR).

    Raises:
        ConfigurationError: ``dtype`` is another one, or the image is not floating point.
    """
    if not image.is_floating_point():
        raise ConfigurationError(
            f"`image` must be floating point in [0, 1], but is {image.dtype}. It holds stored values already: leave it."
        )
    if dtype not in _PEAKS:
        raise ConfigurationError(f"`dtype` must be torch.uint8 or torch.uint16, but is {dtype}. Choose one of them.")
    peak = _PEAKS[dtype]
    # float64 keeps the rounding of 16-bit values away from float32's last bits; MPS has none.
    wide = torch.float32 if image.device.type == "mps" else torch.float64
    return (image.to(wide).clamp(0.0, 1.0) * peak).round().to(dtype)


def rgb_to_luma(image: Tensor) -> Tensor:
    """Luma of RGB images by BT.601 in studio range: black is 16 / 255, white is 235 / 255.

    ``Y = 16 + 65.481 R + 128.553 G + 24.966 B`` with R, G, B in [0, 1] and Y in units of 1 / 255. Full-range luma
    would give a PSNR that is lower by 20 log10(255 / 219) = 1.32 dB.

    Args:
        image: ``(..., 3, H, W)`` in [0, 1], floating point, channels in the order R, G, B.

    Returns:
        ``(..., 1, H, W)`` in [16 / 255, 235 / 255], same dtype, not rounded.

    Raises:
        ConfigurationError: The image has another number of channels, or is not floating point.

    Source: ITU-R BT.601-7, section 2.5.1, with 8-bit levels 16 to 235.
    """
    if not image.is_floating_point():
        raise ConfigurationError(
            f"`image` must be floating point in [0, 1] for luma, but is {image.dtype}. Convert it with to_float."
        )
    if image.shape[-3] != 3:
        raise ConfigurationError(
            f"`image` must have 3 channels (R, G, B) for luma, but has {image.shape[-3]}. "
            "Use the metric on all channels."
        )
    red, green, blue = image.unbind(dim=-3)  # a weight tensor would be a copy to the device, hence a host sync
    return (16.0 + 65.481 * red + 128.553 * green + 24.966 * blue).unsqueeze(-3) / 255.0
