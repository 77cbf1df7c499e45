"""Reading PNG: the container is checked here chunk by chunk, the pixels are decoded by OpenCV.

OpenCV is asked for the file as it is (16 bit stay 16 bit), but some of its versions give back a partly decoded image
for a damaged file. So length, checksum and end of every chunk are checked before it sees the file.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from srforge.data.image_formats import (
    ImageArray,
    StoredImage,
    UnreadableContentError,
    check_size,
    exif_orientation,
)
from srforge.data.opencv import import_cv2

if TYPE_CHECKING:
    from collections.abc import Iterator

SIGNATURE = b"\x89PNG\r\n\x1a\n"

# Channels and allowed bit depths by colour type: grey, RGB, palette, grey with alpha, RGB with alpha.
_CHANNELS = {0: 1, 2: 3, 3: 3, 4: 2, 6: 4}
_BIT_DEPTHS = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}

_KEY_SIZES = {0: 2, 2: 6}  # bytes of the transparent value in grey and in RGB

# The best that deflate can do: 258 bytes in two bits. A header that promises more than this is wrong.
_MAX_DEFLATE_RATIO = 1032


@dataclass(frozen=True)
class _Header:
    width: int
    height: int
    bit_depth: int
    color_type: int
    transparency: bytes | None
    orientation: int

    @property
    def has_alpha(self) -> bool:
        return self.color_type in (4, 6) or self.transparency is not None

    @property
    def num_channels(self) -> int:
        return _CHANNELS[self.color_type] + (self.transparency is not None)


def read_png(data: bytes) -> StoredImage:
    """Decode a whole PNG file.

    Args:
        data: The file's content, from its signature on.

    Returns:
        uint8 (1 to 8 bits, spread over 0..255) or uint16 pixels; palettes are applied.

    Raises:
        UnreadableContentError: The file is damaged, cut, animated or too large.
    """
    header = _read_header(data)
    cv2 = import_cv2()
    try:
        decoded = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)
    except cv2.error as error:
        raise UnreadableContentError(f"must be a whole PNG, but OpenCV says: {error}. Replace the file.") from error
    if decoded is None:
        raise UnreadableContentError("must be a whole PNG, but its pixel data cannot be decoded. Replace the file.")
    pixels = _to_rgb(decoded, header)
    dtype = np.uint16 if header.bit_depth == 16 else np.uint8
    if pixels.shape != (header.height, header.width, header.num_channels) or pixels.dtype != dtype:
        raise UnreadableContentError(
            f"must decode to what its header says, but OpenCV gives {decoded.dtype} of shape {decoded.shape}. "
            "Save it anew as plain RGB or grey."
        )
    return StoredImage(pixels, header.has_alpha, header.orientation)


def _to_rgb(decoded: ImageArray, header: _Header) -> ImageArray:
    """Bring OpenCV's channels (grey, BGR, BGRA) into the file's (grey, grey and alpha, RGB, RGB and alpha)."""
    cv2 = import_cv2()
    if decoded.ndim == 2:
        if header.transparency is None:
            return decoded[:, :, None]
        # OpenCV drops a grey image's transparent value. Levels of under 8 bits were spread over 0..255.
        key = int.from_bytes(header.transparency, "big") % 2**header.bit_depth
        key *= 255 // (2 ** min(header.bit_depth, 8) - 1)
        return np.stack([decoded, np.where(decoded == key, 0, np.iinfo(decoded.dtype).max).astype(decoded.dtype)], -1)
    if header.color_type == 4 and decoded.shape[2] == 4:  # grey with alpha comes as B = G = R and alpha
        return decoded[:, :, (0, 3)]
    conversion = {3: cv2.COLOR_BGR2RGB, 4: cv2.COLOR_BGRA2RGBA}.get(decoded.shape[2])
    rgb: ImageArray = decoded if conversion is None else cv2.cvtColor(decoded, conversion)
    return rgb


def _read_header(data: bytes) -> _Header:
    """Walk all chunks, check each, and return what they say about the pixels."""
    chunks = dict[bytes, bytes]()
    compressed_size = 0
    for name, content in _checked_chunks(data):
        if not chunks and name != b"IHDR":
            raise UnreadableContentError(f"must begin with the PNG chunk IHDR, but begins with {name!r}. Replace it.")
        if name == b"acTL":
            raise UnreadableContentError("must be a still image, but is an animated PNG. Save the frame that you want.")
        if name == b"IDAT":
            compressed_size += len(content)
        chunks.setdefault(name, b"" if name == b"IDAT" else bytes(content))
    if len(chunks[b"IHDR"]) != 13:
        raise UnreadableContentError("must have a PNG header of 13 bytes, but has another one. Replace the file.")
    width, height, bit_depth, color_type = struct.unpack_from(">IIBB", chunks[b"IHDR"])
    if bit_depth not in _BIT_DEPTHS.get(color_type, ()):
        raise UnreadableContentError(
            f"must have a PNG colour type with a bit depth of its, but has type {color_type} with {bit_depth} bits. "
            "Replace the file."
        )
    check_size(height, width, _CHANNELS[color_type])
    stored_channels = 1 if color_type == 3 else _CHANNELS[color_type]
    if height * ((width * stored_channels * bit_depth + 7) // 8) > compressed_size * _MAX_DEFLATE_RATIO:
        raise UnreadableContentError(
            f"must hold the {height} x {width} pixels of its header, but has {compressed_size} bytes of pixel data. "
            "Replace the file."
        )
    transparency = chunks.get(b"tRNS") if color_type in (0, 2, 3) else None
    if transparency is not None and len(transparency) != _KEY_SIZES.get(color_type, len(transparency)):
        raise UnreadableContentError(
            f"must have a transparent value of {_KEY_SIZES[color_type]} bytes, but has one of {len(transparency)}. "
            "Save it anew."
        )
    return _Header(width, height, bit_depth, color_type, transparency, exif_orientation(chunks.get(b"eXIf", b"")))


def _checked_chunks(data: bytes) -> Iterator[tuple[bytes, memoryview]]:
    """Yield name and content of each chunk up to IEND; lengths and checksums are checked."""
    view = memoryview(data)
    position = len(SIGNATURE)
    name = b""
    while name != b"IEND":
        if position + 12 > len(data):
            raise UnreadableContentError("must end with the PNG chunk IEND, but ends before it. It is cut: replace it.")
        (length,) = struct.unpack_from(">I", data, position)
        name = data[position + 4 : position + 8]
        end = position + 12 + length
        if end > len(data):
            raise UnreadableContentError(f"must hold whole chunks, but ends inside {name!r}. It is cut: replace it.")
        if zlib.crc32(view[position + 4 : end - 4]) != int.from_bytes(view[end - 4 : end], "big"):
            raise UnreadableContentError(
                f"must have intact chunks, but the checksum of {name!r} at byte {position} does not match. "
                "Replace the file."
            )
        yield name, view[position + 8 : end - 4]
        position = end
