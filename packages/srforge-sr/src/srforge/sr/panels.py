"""Pictures for people: LR, bicubic, SR and HR side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from torch.nn import functional

from srforge.distributed.errors import ConfigurationError
from srforge.sr.colour import to_float, to_stored
from srforge.sr.resize import bicubic_upscale

if TYPE_CHECKING:
    from torch import Tensor

_GAP = 4
_TITLE_HEIGHT = 18


def panel(lr: Tensor, sr: Tensor, hr: Tensor, scale: int, *, bands: tuple[int, int, int] | None = None) -> np.ndarray:
    """Draw ``LR | bicubic | SR | HR`` with titles; the LR image is enlarged by repeating its pixels.

    Args:
        lr: ``(C, h, w)``, uint8, uint16 or floating point in [0, 1], any device.
        sr: ``(C, h * scale, w * scale)``, likewise; values outside [0, 1] are clamped.
        hr: ``(C, h * scale, w * scale)``, likewise.
        scale: SR factor.
        bands: Channels shown as red, green and blue. None: the first three, or the only one as grey.

    Returns:
        ``(h * scale + 18, 4 * w * scale + 12, 3)``, uint8, RGB.

    Raises:
        ConfigurationError: The sizes do not fit together, or a band does not exist.
    """
    expected = (lr.shape[-2] * scale, lr.shape[-1] * scale)
    for name, image in (("sr", sr), ("hr", hr)):
        if image.ndim != 3 or tuple(image.shape[-2:]) != expected:
            raise ConfigurationError(
                f"`{name}` must be (C, {expected[0]}, {expected[1]}) for an LR image {tuple(lr.shape)} and "
                f"scale={scale}, but is {tuple(image.shape)}. Pass one image of each, cut to multiples of the scale."
            )
    lr = to_float(lr.detach())
    blocks = functional.interpolate(lr.unsqueeze(0), scale_factor=scale, mode="nearest").squeeze(0)
    images = {"LR": blocks, "bicubic": bicubic_upscale(lr, scale), "SR": to_float(sr.detach()), "HR": to_float(hr)}
    height, width = expected
    canvas: np.ndarray = np.full((height + _TITLE_HEIGHT, 4 * width + 3 * _GAP, 3), 255, dtype=np.uint8)
    for column, (title, image) in enumerate(images.items()):
        left = column * (width + _GAP)
        canvas[_TITLE_HEIGHT:, left : left + width] = _as_rgb(image, bands)
        _write_title(canvas, title, left)
    return canvas


def _as_rgb(image: Tensor, bands: tuple[int, int, int] | None) -> np.ndarray:
    num_channels = image.shape[0]
    shown = bands if bands is not None else ((0, 1, 2) if num_channels >= 3 else (0, 0, 0))
    if not all(0 <= band < num_channels for band in shown):
        raise ConfigurationError(
            f"`bands` must be three channels in [0, {num_channels}), but is {shown}. Name bands that the images have."
        )
    rgb: np.ndarray = to_stored(image[list(shown)].cpu()).permute(1, 2, 0).numpy()
    return rgb


def _write_title(canvas: np.ndarray, title: str, left: int) -> None:
    from srforge.data.opencv import import_cv2  # only here: metrics and models need no image library

    cv2 = import_cv2()
    cv2.putText(canvas, title, (left + 3, 13), cv2.FONT_HERSHEY_SIMPLEX, 0.42, (0, 0, 0), 1, cv2.LINE_AA)
