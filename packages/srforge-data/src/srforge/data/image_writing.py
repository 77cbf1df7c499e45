"""Writing images: losslessly apart from JPEG, whole or not at all."""

from __future__ import annotations

import io
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from srforge.data.image_formats import PIXEL_DTYPES, ImageArray
from srforge.data.opencv import import_cv2
from srforge.distributed.errors import ConfigurationError

if TYPE_CHECKING:
    import os

# Suffix -> (data types, channel counts; None stands for any number)
_HOLDS: dict[str, tuple[tuple[str, ...], tuple[int, ...] | None]] = {
    ".png": (("uint8", "uint16"), (1, 3, 4)),
    ".jpg": (("uint8",), (1, 3)),
    ".jpeg": (("uint8",), (1, 3)),
    ".tif": (PIXEL_DTYPES, None),
    ".tiff": (PIXEL_DTYPES, None),
    ".npy": (PIXEL_DTYPES, None),
}


def write_image(path: str | os.PathLike[str], array: ImageArray, *, jpeg_quality: int = 95) -> None:
    """Write an image in the format of the path's suffix.

    The file appears under its name only when it is complete: a killed process leaves no half image behind.

    Args:
        path: ``.png`` (uint8, uint16; 1, 3 or 4 channels, the fourth being alpha), ``.jpg`` (uint8; 1 or 3 channels),
            ``.tif`` or ``.npy`` (any pixel type and number of channels, none of them alpha).
        array: Shape ``(H, W, C)`` or ``(H, W)``, RGB order.
        jpeg_quality: 1 to 100.

    Raises:
        ConfigurationError: The format cannot hold the array unchanged.
        OSError: The folder is missing or cannot be written to.
    """
    path = Path(path)
    array = np.asarray(array)
    if array.ndim == 2:
        array = array[:, :, None]
    _check_holds(path, array)
    if not isinstance(jpeg_quality, int) or not 1 <= jpeg_quality <= 100:
        raise ConfigurationError(
            f"`jpeg_quality` must be an integer in 1..100, but is {jpeg_quality!r}. Use 95 for good pictures."
        )
    # OpenCV takes swapped bytes for native ones, and says nothing.
    content = _encode(
        path.suffix.lower(), np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("=")), jpeg_quality
    )
    temporary = path.with_name(f".{uuid.uuid4().hex}.tmp")  # without the name: that may be as long as names can be
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _check_holds(path: Path, array: ImageArray) -> None:
    if path.suffix.lower() not in _HOLDS:
        raise ConfigurationError(f"{path} must end in one of {', '.join(_HOLDS)}, but does not. Choose a format.")
    if array.ndim != 3 or array.size == 0:
        raise ConfigurationError(
            f"`array` must have shape (H, W) or (H, W, C) and a pixel, but has shape {array.shape}. Reshape it."
        )
    dtypes, channels = _HOLDS[path.suffix.lower()]
    if array.dtype.name not in dtypes:
        raise ConfigurationError(
            f"`array` must be one of {', '.join(dtypes)} for {path.name}, but is {array.dtype}. "
            "Convert it, or write .tif or .npy."
        )
    if channels is not None and array.shape[2] not in channels:
        raise ConfigurationError(
            f"`array` must have one of {channels} channels for {path.name}, but has {array.shape[2]}. "
            "Write .tif or .npy."
        )


def _encode(suffix: str, array: ImageArray, jpeg_quality: int) -> bytes:
    if suffix == ".npy":
        buffer = io.BytesIO()
        np.save(buffer, array, allow_pickle=False)
        return buffer.getvalue()
    if suffix in (".tif", ".tiff"):
        return _encode_tiff(array)
    cv2 = import_cv2()
    conversion = {3: cv2.COLOR_RGB2BGR, 4: cv2.COLOR_RGBA2BGRA}.get(array.shape[2])
    options = [] if suffix == ".png" else [cv2.IMWRITE_JPEG_QUALITY, jpeg_quality]
    try:
        is_encoded, encoded = cv2.imencode(
            suffix, array if conversion is None else cv2.cvtColor(array, conversion), options
        )
    except cv2.error as error:
        raise ConfigurationError(
            f"`array` must be an image that {suffix} can hold, but OpenCV says: {error}. Write .tif or .npy."
        ) from error
    if not is_encoded:
        raise ConfigurationError(
            f"`array` must be an image that {suffix} can hold, but has shape {array.shape}. Cut it."
        )
    content: bytes = encoded.tobytes()
    return content


def _encode_tiff(array: ImageArray) -> bytes:
    import tifffile

    channels = array.shape[2]
    buffer = io.BytesIO()
    tifffile.imwrite(
        buffer,
        # One band goes as (H, W): as (H, W, 1) tifffile would take the last axis for the width.
        array[:, :, 0] if channels == 1 else array,
        photometric="rgb" if channels == 3 else "minisblack",
        planarconfig=None if channels == 1 else "contig",
        extrasamples=None if channels in (1, 3) else ["unspecified"] * (channels - 1),
        metadata=None,
    )
    return buffer.getvalue()
