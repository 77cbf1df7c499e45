"""What the readers of all image formats share: the result, the error, the limits, the orientation.

Here belongs what PNG, JPEG, TIFF and ``.npy`` have in common. Reading one format lives in its own module
(``image_png.py``, ``image_jpeg.py``, ``image_tiff.py``, ``image_npy.py``), choosing between them in ``images.py``.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from srforge.distributed.errors import SRForgeError

ImageArray: TypeAlias = npt.NDArray[Any]

MAX_PIXELS = 2**28
"""Largest number of pixels (height times width) that is read: 16384 squared. A Sentinel-2 tile has 1.2e8."""

MAX_VALUES = 2**31
"""Largest number of values (height times width times channels) that is read."""

PIXEL_DTYPES = ("uint8", "uint16", "uint32", "int8", "int16", "int32", "float16", "float32", "float64")
"""Data types that an image may have."""


# EXIF says SHORT (3); some cameras and programs write LONG (4).
_ORIENTATION_TYPES = {3: "H", 4: "I"}


class ImageReadError(SRForgeError):
    """A file cannot be read as a whole image. The message names the file, what is wrong with it and what to do."""


class UnreadableContentError(SRForgeError):
    """What a format's reader found wrong. ``read_image`` adds the file's name and raises ``ImageReadError``."""


@dataclass(frozen=True)
class StoredImage:
    """An image as its file stores it.

    Attributes:
        pixels: Shape ``(H, W, C)``, RGB order, the file's data type in native byte order.
        has_alpha: Whether the last channel is alpha.
        orientation: How to turn it upright, as EXIF counts: 1 (as it is) to 8.
    """

    pixels: ImageArray
    has_alpha: bool = False
    orientation: int = 1


def check_size(height: int, width: int, channels: int) -> None:
    """Refuse sizes that no training image has, before memory is taken for them.

    Args:
        height: Pixels, from the file's header.
        width: Pixels.
        channels: Values per pixel.

    Raises:
        UnreadableContentError: The size is zero, or over ``MAX_PIXELS`` or ``MAX_VALUES``.
    """
    size = f"{height} x {width} pixels of {channels} channels"
    if min(height, width, channels) < 1:
        raise UnreadableContentError(f"must have at least one pixel, but its header says {size}. Replace the file.")
    if height * width > MAX_PIXELS or height * width * channels > MAX_VALUES:
        raise UnreadableContentError(
            f"must have at most {MAX_PIXELS} pixels and {MAX_VALUES} values, but its header says {size}. "
            "Cut it into smaller images."
        )


def check_dtype(dtype: np.dtype[Any]) -> None:
    """Refuse data types that are no pixel values.

    Args:
        dtype: Of the stored array, any byte order.

    Raises:
        UnreadableContentError: It is not one of ``PIXEL_DTYPES``.
    """
    if dtype.name not in PIXEL_DTYPES:
        raise UnreadableContentError(f"must hold one of {', '.join(PIXEL_DTYPES)}, but holds {dtype}. Convert it once.")


def exif_orientation(exif: bytes) -> int:
    """Return the orientation that an EXIF block states.

    Viewers show an image whose EXIF block is damaged as it is stored, and so does this function.

    Args:
        exif: The block from its byte-order mark on (``II`` or ``MM``), or with JPEG's ``Exif`` before it, as some
            programs leave it in PNG.

    Returns:
        1 to 8; 1 if the block states none or cannot be read.

    Source: EXIF 2.32, section 4.6.4, tag 274.
    """
    exif = exif.removeprefix(b"Exif\x00\x00")
    order = {b"II*\x00": "<", b"MM\x00*": ">"}.get(exif[:4])
    if order is None:
        return 1
    try:
        (start,) = struct.unpack_from(order + "I", exif, 4)
        (num_tags,) = struct.unpack_from(order + "H", exif, start)
        for index in range(num_tags):
            entry = start + 2 + 12 * index
            tag, kind, count = struct.unpack_from(order + "HHI", exif, entry)
            if tag == 274 and kind in _ORIENTATION_TYPES and count == 1:
                (value,) = struct.unpack_from(order + _ORIENTATION_TYPES[kind], exif, entry + 8)
                return int(value) if 1 <= value <= 8 else 1
    except struct.error:
        return 1
    return 1


def turn_upright(pixels: ImageArray, orientation: int) -> ImageArray:
    """Turn an image the way its orientation says.

    Args:
        pixels: Shape ``(H, W, C)``.
        orientation: 1 to 8.

    Returns:
        Shape ``(H, W, C)``, or ``(W, H, C)`` for orientations 5 to 8; a view.

    Source: EXIF 2.32, section 4.6.4, tag 274.
    """
    if orientation >= 5:
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return pixels
