"""Reading JPEG: the markers are walked here from start to end, the pixels are decoded by OpenCV.

libjpeg, in OpenCV as in Pillow, fills what a cut file lacks with grey and merely prints a warning. So a file is decoded
only if all its segments, scans, restart markers and its end marker are there. JPEG has no checksum: an altered byte
between two markers changes pixels, and no reader can know.
"""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from srforge.data.image_formats import (
    ImageArray,
    StoredImage,
    UnreadableContentError,
    check_size,
    exif_orientation,
)
from srforge.data.opencv import import_cv2

SIGNATURE = b"\xff\xd8\xff"

_END = 0xD9
_SCAN = 0xDA
_RESTART_INTERVAL = 0xDD
_READABLE_FRAMES = (0xC0, 0xC1, 0xC2)  # baseline, extended, progressive; all Huffman-coded
_UNKNOWN = 14  # bits of a coefficient before its first scan
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_MARKER = re.compile(rb"\xff[\x01-\xfe]")  # within coded data, ff00 stands for the byte ff

# Any bytes but ff, such that a decoder that wants more data gets some that change the picture.
_FILLER = bytes((37 * index + 11) % 251 for index in range(64))


@dataclass
class _Layout:
    """What the markers say."""

    precision: int = 0
    height: int = 0
    width: int = 0
    sampling: dict[int, tuple[int, int]] = field(default_factory=dict)  # component -> (horizontal, vertical)
    is_progressive: bool = False
    orientation: int | None = None  # of the first EXIF block
    restart_interval: int = 0
    missing_bits: dict[tuple[int, int], int] = field(default_factory=dict)  # (component, coefficient) -> bits to come
    scan_ends: list[int] = field(default_factory=list)


def read_jpeg(data: bytes) -> StoredImage:
    """Decode a whole JPEG file.

    Args:
        data: The file's content, from its start marker on.

    Returns:
        uint8 pixels, one channel (grey) or three (RGB).

    Raises:
        UnreadableContentError: The file is damaged, cut, too large or of a kind that is not read (CMYK, 12 bit,
            arithmetic coding, lossless).
    """
    layout = _walk_markers(data)
    pixels = _decode(data)
    if pixels.shape != (layout.height, layout.width, len(layout.sampling)) or pixels.dtype != np.uint8:
        raise UnreadableContentError(
            f"must decode to what its header says, but OpenCV gives {pixels.dtype} of shape {pixels.shape}. "
            "Save it anew."
        )
    if not layout.is_progressive and _looks_unfinished(pixels):
        # A decoder that had all the data it needs ignores bytes after it; one that ran out would have used them.
        bounds = [0, *layout.scan_ends, len(data)]
        filled = _FILLER.join(data[start:end] for start, end in pairwise(bounds))
        if not np.array_equal(pixels, _decode(filled)):
            raise UnreadableContentError(
                "must hold a whole picture, but its coded data ends too early. Replace the file."
            )
    return StoredImage(pixels, orientation=layout.orientation or 1)


def _decode(data: bytes) -> ImageArray:
    cv2 = import_cv2()
    try:
        decoded = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)
    except cv2.error as error:
        raise UnreadableContentError(f"must be a whole JPEG, but OpenCV says: {error}. Replace the file.") from error
    if decoded is None:
        raise UnreadableContentError("must be a whole JPEG, but its coded data cannot be decoded. Replace the file.")
    pixels: ImageArray = decoded[:, :, None] if decoded.ndim == 2 else cv2.cvtColor(decoded, cv2.COLOR_BGR2RGB)
    return pixels


def _looks_unfinished(pixels: ImageArray) -> bool:
    """Tell whether the last pixel has the brightness 128 that a decoder gives to blocks without data.

    Its hue may have been smoothed with a neighbour's; its brightness is exact up to rounding.
    """
    corner = pixels[-1, -1].astype(np.float64)
    brightness = corner[0] if corner.size == 1 else corner @ (0.299, 0.587, 0.114)
    return abs(float(brightness) - 128) <= 2


def _walk_markers(data: bytes) -> _Layout:
    """Check all segments from the start marker to the end marker."""
    layout = _Layout()
    position = 2
    while True:
        while data[position : position + 2] == b"\xff\xff":  # fill bytes
            position += 1
        if position + 2 > len(data):
            raise UnreadableContentError(
                "must end with the JPEG end marker, but ends before it. It is cut: replace it."
            )
        if data[position] != 0xFF or data[position + 1] in (0x00, 0x01, 0xD8) or 0xD0 <= data[position + 1] <= 0xD7:
            raise UnreadableContentError(
                f"must have a JPEG segment at byte {position}, but has none. Replace the file."
            )
        marker = data[position + 1]
        if marker == _END:
            _check_complete(layout)
            return layout
        length = int.from_bytes(data[position + 2 : position + 4], "big")
        end = position + 2 + length
        if length < 2 or end > len(data):
            raise UnreadableContentError(
                f"must hold whole JPEG segments, but the one at byte {position} is cut. Replace the file."
            )
        try:
            position = _read_segment(layout, marker, data[position + 4 : end], data, end)
        except (struct.error, ValueError, IndexError, KeyError, ZeroDivisionError) as error:
            raise UnreadableContentError(
                f"must hold valid JPEG segments, but the one at byte {position} is not. Replace the file."
            ) from error


def _read_segment(layout: _Layout, marker: int, content: bytes, data: bytes, end: int) -> int:
    """Note what one segment says, and return where the next one begins."""
    if marker in _FRAMES:
        _read_frame(layout, marker, content)
    elif marker == _RESTART_INTERVAL:
        (layout.restart_interval,) = struct.unpack(">H", content)
    elif marker == 0xE1 and content[:6] == b"Exif\x00\x00" and layout.orientation is None:
        layout.orientation = exif_orientation(content)
    elif marker == _SCAN:
        return _read_scan(layout, content, data, end)
    return end


def _read_frame(layout: _Layout, marker: int, content: bytes) -> None:
    if marker not in _READABLE_FRAMES:
        raise UnreadableContentError(
            f"must be a baseline or progressive JPEG, but is of type SOF{marker - 0xC0} (lossless or arithmetic). "
            "Convert it once."
        )
    if layout.sampling:
        raise UnreadableContentError("must hold one JPEG frame, but holds several. Replace the file.")
    precision, layout.height, layout.width, num_components = struct.unpack_from(">BHHB", content)
    if precision != 8:
        raise UnreadableContentError(f"must be a JPEG of 8 bits, but has {precision} bits. Convert it once to PNG.")
    if num_components == 4:
        raise UnreadableContentError(
            "must be grey or RGB, but is a CMYK JPEG, whose colours depend on its print profile. "
            "Convert it once to RGB with a tool that applies the profile."
        )
    check_size(layout.height, layout.width, num_components)
    layout.is_progressive = marker == 0xC2
    for index in range(num_components):
        component, factors = content[6 + 3 * index], content[7 + 3 * index]
        layout.sampling[component] = (factors >> 4, factors & 15)
        # Every coefficient of every component starts unknown; a scan brings it down to the bit `low`.
        layout.missing_bits.update({(component, coefficient): _UNKNOWN for coefficient in range(64)})
    if len(layout.sampling) != num_components or num_components not in (1, 3):
        raise UnreadableContentError(
            f"must have 1 or 3 components, but is a JPEG with {num_components}. Convert it once."
        )


def _read_scan(layout: _Layout, content: bytes, data: bytes, start: int) -> int:
    """Check one scan's restart markers, note which coefficients it brings, and return where it ends."""
    num_components = content[0]
    components = [content[1 + 2 * index] for index in range(num_components)]
    first, last, bits = content[1 + 2 * num_components : 4 + 2 * num_components]
    if not layout.is_progressive:
        first, last, bits = 0, 63, 0
    before, after = bits >> 4 or _UNKNOWN, bits & 15
    for key in ((component, coefficient) for component in components for coefficient in range(first, last + 1)):
        if layout.missing_bits[key] != before or after >= before:
            raise UnreadableContentError(
                "must bring each coefficient once, but a scan brings some that are there or not yet due. Replace the file."
            )
        layout.missing_bits[key] = after
    for restarts, match in enumerate(_MARKER.finditer(data, start)):
        marker = data[match.end() - 1]
        if not 0xD0 <= marker <= 0xD7:
            expected = _num_restarts(layout, components)
            if restarts != expected:
                raise UnreadableContentError(
                    f"must have {expected} restart markers in its scan, but has {restarts}. Replace the file."
                )
            end = match.start()
            while end > start and data[end - 1] == 0xFF:  # fill bytes belong to the marker
                end -= 1
            layout.scan_ends.append(end)
            return end
        if marker != 0xD0 + restarts % 8:
            raise UnreadableContentError(
                f"must have its restart markers in order, but has number {marker - 0xD0} at byte {match.start()}. "
                "Replace the file."
            )
    raise UnreadableContentError("must end with the JPEG end marker, but ends inside a scan. It is cut: replace it.")


def _num_restarts(layout: _Layout, components: list[int]) -> int:
    """Return how many restart markers a scan of these components has.

    Source: ITU-T T.81, A.2 (block order) and E.1.4 (restart intervals).
    """
    if not layout.restart_interval:
        return 0
    horizontal = max(h for h, _ in layout.sampling.values())
    vertical = max(v for _, v in layout.sampling.values())
    if len(components) > 1:
        columns, rows = math.ceil(layout.width / (8 * horizontal)), math.ceil(layout.height / (8 * vertical))
    else:
        own_h, own_v = layout.sampling[components[0]]
        columns = math.ceil(math.ceil(layout.width * own_h / horizontal) / 8)
        rows = math.ceil(math.ceil(layout.height * own_v / vertical) / 8)
    return math.ceil(columns * rows / layout.restart_interval) - 1


def _check_complete(layout: _Layout) -> None:
    """Refuse a file that has its end marker but not all the scans of its picture."""
    if not layout.sampling:
        raise UnreadableContentError("must hold a picture, but is a JPEG without one. Replace the file.")
    missing = sum(bits > 0 for bits in layout.missing_bits.values())
    if missing:
        raise UnreadableContentError(
            f"must hold the whole picture, but {missing} of its {len(layout.missing_bits)} coefficients are in no scan "
            "or not to the last bit. It is cut: replace it."
        )
