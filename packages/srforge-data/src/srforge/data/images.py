"""Reading images of every kind that super-resolution trains on, whole or not at all.

The rules (which file gives which array, alpha, orientation, errors) are written down in ``docs/images.md``. Skipping
unreadable files is the data set's matter: ``skipping.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from srforge.data import image_jpeg, image_npy, image_png, image_tiff
from srforge.data.image_formats import (
    MAX_PIXELS,
    MAX_VALUES,
    ImageArray,
    ImageReadError,
    StoredImage,
    UnreadableContentError,
    turn_upright,
)
from srforge.data.image_writing import write_image
from srforge.distributed.errors import ConfigurationError

if TYPE_CHECKING:
    import os

__all__ = ["MAX_PIXELS", "MAX_VALUES", "AlphaRule", "ImageReadError", "read_image", "write_image"]

# What is often found under an image's suffix.
_FOREIGN = (
    (b"GIF8", "a GIF file, which is not read. Convert it"),
    (b"BM", "a BMP file, which is not read. Convert it"),
    (b"PK\x03\x04", "a ZIP archive (as .npz is one). Unpack it"),
    (b"version https://", "a Git LFS pointer, not the file itself. Run `git lfs pull`"),
)

AlphaRule = Literal["drop", "keep", "error"]

_SUFFIXES = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".tif": "TIFF", ".tiff": "TIFF", ".npy": "NPY"}
_SIGNATURES = (
    (image_png.SIGNATURE, "PNG"),
    (image_jpeg.SIGNATURE, "JPEG"),
    (image_npy.SIGNATURE, "NPY"),
    *((signature, "TIFF") for signature in image_tiff.SIGNATURES),
)


def read_image(path: str | os.PathLike[str], *, alpha: AlphaRule = "drop", channels: int | None = None) -> ImageArray:
    """Read a PNG, JPEG, TIFF or ``.npy`` file as the array it stores.

    Args:
        path: The file. Its suffix must tell its format.
        alpha: What to do with an alpha channel: leave it out, keep it as the last channel, or refuse the file.
        channels: Number of channels to return. It wins over ``alpha``: a file whose channels are that many with alpha
            keeps it, others lose it. A grey image is repeated to 3 channels, and an RGB image whose channels are equal
            is reduced to 1; any other difference is an error. None: as many as the file has.

    Returns:
        Shape ``(H, W, C)``, RGB order, C-contiguous and writable, upright (EXIF orientation applied), the file's data
        type: uint8 stays 0..255, uint16 0..65535, floats as stored.

    Raises:
        ImageReadError: The file is missing, empty, cut, damaged, of another format than its suffix says, too large, or
            holds other channels than asked.
        ConfigurationError: An argument has no meaning.
    """
    if alpha not in ("drop", "keep", "error"):
        raise ConfigurationError(f"`alpha` must be drop, keep or error, but is {alpha!r}. Choose one of the three.")
    if channels is not None and (not isinstance(channels, int) or isinstance(channels, bool) or channels < 1):
        raise ConfigurationError(f"`channels` must be a positive integer or None, but is {channels!r}. Give the count.")
    path = Path(path)
    try:
        stored = _read_stored(path)
        pixels = _select_channels(stored, alpha, channels)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ImageReadError(f"{path} must be a readable image file, but: {reason}. Check the path.") from error
    except UnreadableContentError as error:
        raise ImageReadError(f"{path} {error}") from error
    except MemoryError as error:
        raise ImageReadError(f"{path} must fit into memory, but does not. Cut it into smaller images.") from error
    upright = turn_upright(pixels, stored.orientation)
    return np.require(upright, requirements=["C_CONTIGUOUS", "WRITEABLE"])


def _read_stored(path: Path) -> StoredImage:
    """Choose the reader by suffix and content, which must agree."""
    expected = _SUFFIXES.get(path.suffix.lower())
    if path.is_dir():
        raise UnreadableContentError("must be an image file, but is a folder. Give the path of a file.")
    if path.exists() and not path.is_file():
        raise UnreadableContentError("must be an image file, but is no regular file. Give the path of a file.")
    with path.open("rb") as file:
        head = file.read(16)
        if not head:
            raise UnreadableContentError("must hold an image, but is empty. Replace the file.")
        if expected is None:
            raise UnreadableContentError(
                f"must end in one of {', '.join(_SUFFIXES)}, but does not. Convert or rename it."
            )
        found = next((name for signature, name in _SIGNATURES if head.startswith(signature)), None)
        if found != expected:
            holds = _foreign_kind(head) if found is None else f"a {found} file. Rename it"
            raise UnreadableContentError(f"must hold what its suffix says, but holds {holds}.")
        if found == "TIFF":
            return image_tiff.read_tiff(path)
        if found == "NPY":
            return image_npy.read_npy(path)
        data = head + file.read()
    return image_png.read_png(data) if found == "PNG" else image_jpeg.read_jpeg(data)


def _foreign_kind(head: bytes) -> str:
    """Name a file that no reader takes, with what to do about it where renaming is no cure."""
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "a WebP file, which is not read. Convert it"
    if head[4:8] == b"ftyp":
        return "an AVIF, HEIC or video file, which is not read. Convert it"
    return next((kind for start, kind in _FOREIGN if head.startswith(start)), "something that is no image. Replace it")


def _select_channels(stored: StoredImage, alpha: AlphaRule, channels: int | None) -> ImageArray:
    """Apply the alpha rule and the configured channel count."""
    pixels = stored.pixels
    num_stored = pixels.shape[2]
    if stored.has_alpha:
        if alpha == "error":
            raise UnreadableContentError('must have no alpha channel, but has one. Remove it, or set `alpha="drop"`.')
        keeps_alpha = alpha == "keep" if channels is None else channels == num_stored
        if not keeps_alpha:
            pixels = pixels[:, :, :-1]
    num_found = pixels.shape[2]
    if channels is None or num_found == channels:
        return pixels
    if (num_found, channels) == (1, 3):
        return np.repeat(pixels, 3, axis=2)
    if (num_found, channels) == (3, 1) and (pixels[:, :, :1] == pixels[:, :, 1:]).all():
        return pixels[:, :, :1]
    raise UnreadableContentError(
        f"must have the configured `channels`={channels}, but has {num_found}"
        f"{' and an alpha channel' if stored.has_alpha else ''}. Convert the data set once, or set `channels`."
    )
