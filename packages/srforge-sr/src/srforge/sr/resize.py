"""Bicubic resizing, the one kernel of this package, and the degradation that makes LR images from HR images.

Libraries mean different things by "bicubic": the kernel's coefficient and, when reducing, whether it is widened
against aliasing. Here it is always Keys' kernel with a = -0.5, widened by the reduction factor (``antialias=True`` in
torch), in float32 (float64 stays so). That is what most published SR figures were made with; a kernel that is not
widened moves PSNR-Y by about a dB.
"""

import torch
from torch import Tensor
from torch.nn import functional

from srforge.distributed.errors import ConfigurationError

_INTEGER_PEAKS = {torch.uint8: 255.0, torch.uint16: 65535.0}


def resize_bicubic(image: Tensor, scale: float) -> Tensor:
    """Resize by ``scale`` in both directions: 2 doubles the sides, 1 / 2 halves them.

    Args:
        image: ``(C, H, W)`` or ``(N, C, H, W)``; uint8, uint16 or floating point.
        scale: Ratio of output side to input side, > 0. Sides are rounded to whole pixels.

    Returns:
        Image in the dtype of ``image``. Integers are rounded to nearest and clamped to their range; floating point
        images may overshoot their range a little, as bicubic interpolation does.

    Raises:
        ConfigurationError: ``scale`` is not positive, an output side would be empty, or the dtype or shape is another.

    Source: R. Keys, "Cubic convolution interpolation for digital image processing", 1981.
    """
    if image.ndim not in (3, 4) or not (image.is_floating_point() or image.dtype in _INTEGER_PEAKS):
        raise ConfigurationError(
            "`image` must be (C, H, W) or (N, C, H, W) of uint8, uint16 or floating point, "
            f"but is {tuple(image.shape)} of {image.dtype}. Convert it first."
        )
    height, width = image.shape[-2:]
    size = (round(height * scale), round(width * scale))
    if scale <= 0 or min(size) < 1:
        raise ConfigurationError(
            f"`scale` must be positive and leave at least one pixel of {height}x{width}, but is {scale}. "
            "Use larger images or a scale nearer to 1."
        )
    batch = image if image.ndim == 4 else image.unsqueeze(0)
    # torch's own uint8 path uses fixed-point weights that depend on the processor, and it has none for 16-bit floats on
    # the CPU; float32 is the same everywhere.
    exact = batch if image.dtype in (torch.float32, torch.float64) else batch.to(torch.float32)
    resized = functional.interpolate(exact, size=size, mode="bicubic", antialias=True)
    if image.dtype in _INTEGER_PEAKS:
        resized = resized.round().clamp(0.0, _INTEGER_PEAKS[image.dtype])
    resized = resized.to(image.dtype)
    return resized if image.ndim == 4 else resized.squeeze(0)


def bicubic_upscale(lr: Tensor, scale: int) -> Tensor:
    """Enlarge LR images: the baseline every model is compared with, and the global skip of the models.

    Args:
        lr: ``(C, h, w)`` or ``(N, C, h, w)``; uint8, uint16 or floating point.
        scale: SR factor, >= 1.

    Returns:
        ``(..., C, h * scale, w * scale)`` in the dtype of ``lr``.

    Raises:
        ConfigurationError: As ``resize_bicubic``.
    """
    return resize_bicubic(lr, scale)


def bicubic_downscale(hr: Tensor, scale: int) -> Tensor:
    """Reduce HR images to LR images, the classical degradation of super-resolution.

    Args:
        hr: ``(C, H, W)`` or ``(N, C, H, W)`` with H and W multiples of ``scale`` (see ``mod_crop``).
        scale: SR factor, >= 1.

    Returns:
        ``(..., C, H // scale, W // scale)`` in the dtype of ``hr``, rounded: the LR image that would be stored.

    Raises:
        ConfigurationError: A side is no multiple of ``scale``, ``scale`` is no whole number >= 1, and as ``resize_bicubic``.
    """
    _require_whole(scale)
    height, width = hr.shape[-2:]
    if height % scale or width % scale:
        raise ConfigurationError(
            f"`hr` must have sides that are multiples of scale={scale}, but is {height}x{width}. Apply mod_crop first."
        )
    return resize_bicubic(hr, 1 / scale)


def mod_crop(image: Tensor, scale: int) -> Tensor:
    """Cut the bottom and right so that both sides are multiples of ``scale``.

    Args:
        image: ``(..., H, W)``, any dtype.
        scale: SR factor, >= 1.

    Returns:
        View ``(..., H - H % scale, W - W % scale)``.

    Raises:
        ConfigurationError: The image is smaller than ``scale``, or ``scale`` is no whole number >= 1.
    """
    _require_whole(scale)
    height, width = image.shape[-2:]
    if min(height, width) < scale:
        raise ConfigurationError(
            f"`image` must have sides of at least scale={scale}, but is {height}x{width}. Leave it out."
        )
    return image[..., : height - height % scale, : width - width % scale]


def _require_whole(scale: int) -> None:
    if int(scale) != scale or scale < 1:
        raise ConfigurationError(f"`scale` must be a whole number of at least 1, but is {scale}. Use 2, 3 or 4.")
