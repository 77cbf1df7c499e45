"""Reading TIFF by tifffile: one image of any number of bands, in either planar layout.

tifffile forgives a lot: a strip that is missing becomes zeros, an odd tag a line in the log. For training data both are
errors, so what it logs while it reads ends the reading, and all strips and tiles are looked up before.
"""

from __future__ import annotations

import logging
import math
import threading
import zlib
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from srforge.data.image_formats import (
    ImageArray,
    StoredImage,
    UnreadableContentError,
    check_dtype,
    check_size,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SIGNATURES = (b"II*\x00", b"MM\x00*", b"II+\x00", b"MM\x00+")

_COMPRESSIONS = {1: "none", 5: "LZW", 8: "deflate", 32946: "deflate", 32773: "PackBits", 50000: "ZSTD"}
_DEFLATE = (8, 32946)
_PHOTOMETRICS = {1: 1, 2: 3}  # grey (or bands) and RGB -> number of colour channels
_STRAIGHT_ALPHA = 2
_PREMULTIPLIED_ALPHA = 1
_MAX_PAGES = 64

# Compressed strips up to this size cannot grow beyond 64 MiB, deflate's ratio being at most 1032.
_SMALL_STRIP = 65_000

# Complaints about these are none about pixels: GDAL writes -9999 as "no data" also into files of unsigned integers, and
# scanners write 0 as orientation (274) and unit of the resolution (296).
_TAGS_BESIDE_PIXELS = ("GDAL_NODATA", "TiffTag 274 ", "TiffTag 296 ")

_reading = threading.local()  # .complaints: what tifffile said of the file that this thread reads


def read_tiff(path: Path) -> StoredImage:
    """Read the one full-size image of a TIFF file.

    Args:
        path: The file.

    Returns:
        All bands as stored (bits become uint8 0 and 255). The last band is alpha if the file's tags say so.

    Raises:
        UnreadableContentError: The file is damaged, cut, too large or of a kind that is not read.
    """
    import tifffile

    complaints: list[str] = []
    try:
        with _collected_complaints(complaints), tifffile.TiffFile(path) as tiff:
            page = _only_page(tiff)
            _check_kind(page)
            _check_segments(page, path.stat().st_size)
            _check_no_stack(tiff, page, path.stat().st_size)
            if not complaints:
                pixels = page.asarray(squeeze=False, maxworkers=1)
    except (UnreadableContentError, OSError):
        raise
    except Exception as error:
        # A damaged file makes tifffile raise whatever its parsing ran into: struct.error, KeyError, RecursionError.
        raise _failure(error) from error
    if complaints:
        raise UnreadableContentError(
            f"must be a TIFF without faults, but tifffile says: {complaints[0]}. Save it anew."
        )
    return StoredImage(_to_channels_last(pixels), _ends_with_alpha(page), _orientation(page))


def _failure(error: Exception) -> UnreadableContentError:
    asks = "imagecodecs" in str(error) or isinstance(
        error, ModuleNotFoundError
    )  # ZSTD asks for a module of Python 3.14
    if asks and find_spec("imagecodecs") is None:
        return UnreadableContentError(
            f"must have a compression that can be undone here, but needs the package imagecodecs ({error}). "
            "Install `srforge-data[tiff]`."
        )
    return UnreadableContentError(
        f"must be a whole TIFF, but tifffile says: {type(error).__name__}: {error}. Replace the file."
    )


def _to_channels_last(pixels: ImageArray) -> ImageArray:
    """Bring tifffile's (planes, 1, H, W, samples) to (H, W, C); either planes or samples is 1."""
    num_planes, _, height, width, num_samples = pixels.shape
    image = np.moveaxis(pixels[:, 0], 0, 2).reshape(height, width, num_planes * num_samples)
    if image.dtype == np.bool_:
        return image.astype(np.uint8) * np.uint8(255)
    return image.astype(image.dtype.newbyteorder("="), copy=False)


def _only_page(tiff: Any) -> Any:
    pages = list(islice(tiff.pages, _MAX_PAGES))
    full = [page for page in pages if not page.subfiletype & 0b101]  # neither a smaller version nor a mask
    if len(full) != 1:
        raise UnreadableContentError(
            f"must hold one image, but holds {len(full)} pages. Save the bands as samples of one page "
            '(tifffile: photometric="minisblack", planarconfig="separate").'
        )
    return full[0]


def _check_kind(page: Any) -> None:
    """Refuse what has no plain pixel values, and sizes that memory should not be taken for."""
    if int(page.compression) not in _COMPRESSIONS:
        raise UnreadableContentError(
            f"must be compressed by one of {', '.join(dict.fromkeys(_COMPRESSIONS.values()))}, but is a TIFF with "
            f"{_name_of(page.compression)}. Convert it once."
        )
    if int(page.photometric) not in _PHOTOMETRICS:
        raise UnreadableContentError(
            f"must be grey, RGB or bands, but is a TIFF of {_name_of(page.photometric)}. Convert it once."
        )
    # 4 or 12 bits would come as uint8 and uint16 whose range is not their type's.
    if not _has_whole_bytes(page) or page.imagedepth != 1 or page.tiledepth > 1:
        raise UnreadableContentError(
            f"must hold a flat image of whole bytes, but has {page.bitspersample} bits per sample and depth "
            f"{page.imagedepth}. Convert it once."
        )
    if _PREMULTIPLIED_ALPHA in page.extrasamples:
        raise UnreadableContentError(
            "must have straight alpha, but its colours are multiplied by it. Save it without alpha."
        )
    check_size(page.imagelength, page.imagewidth, page.samplesperpixel)
    if page.dtype != np.bool_:
        check_dtype(page.dtype)
    if page.samplesperpixel < _PHOTOMETRICS[int(page.photometric)]:
        raise UnreadableContentError(
            f"must have three bands to be RGB, but has {page.samplesperpixel}. Replace the file."
        )


def _has_whole_bytes(page: Any) -> bool:
    if page.dtype is None:
        return False
    return bool(page.dtype == np.bool_ or page.bitspersample == 8 * page.dtype.itemsize)


def _check_no_stack(tiff: Any, page: Any, file_size: int) -> None:
    """Refuse a stack of images that lists one page: ImageJ and tifffile let the others follow the first one's pixels."""
    num_images = (tiff.imagej_metadata or {}).get("images", 1)
    for described in tiff.shaped_metadata or ():
        num_images = max(num_images, math.prod(described["shape"]) // page.size)
    # A tool that cut the image may have kept its old description: then there are no bytes of other images.
    if num_images > 1 and page.dataoffsets[0] + num_images * page.nbytes <= file_size:
        raise UnreadableContentError(f"must hold one image, but is a stack of {num_images}. Save each as its own file.")


def _name_of(tag_value: Any) -> str:
    """Return ``LZW`` for a value that tifffile knows, the number for one that it does not."""
    return str(getattr(tag_value, "name", tag_value))


def _check_segments(page: Any, file_size: int) -> None:
    """Check that every strip or tile lies in the file, and that deflated ones do not explode."""
    expected = math.prod(page.chunked)
    offsets, sizes = page.dataoffsets, page.databytecounts
    if len(offsets) != expected or len(sizes) != expected:
        raise UnreadableContentError(
            f"must have {expected} strips or tiles, but lists {len(offsets)} offsets and {len(sizes)} sizes. "
            "Replace the file."
        )
    for offset, size in zip(offsets, sizes, strict=True):
        if offset <= 0 or size <= 0 or offset + size > file_size:
            raise UnreadableContentError(
                f"must hold all its strips or tiles, but one of {size} bytes at {offset} is not within its "
                f"{file_size} bytes. It is cut or sparse: replace it."
            )
    if page.compression == 1 and sum(sizes) < page.nbytes and page.dtype != np.bool_:
        raise UnreadableContentError(
            f"must hold {page.nbytes} bytes of pixels, but its strips or tiles have {sum(sizes)}. Replace the file."
        )
    if int(page.compression) in _DEFLATE:
        limit = math.prod(page.chunks) * page.dtype.itemsize
        for offset, size in zip(offsets, sizes, strict=True):
            if size > _SMALL_STRIP:
                _check_inflated_size(page, offset, size, limit)


def _check_inflated_size(page: Any, offset: int, size: int, limit: int) -> None:
    file = page.parent.filehandle
    file.seek(offset)
    if len(zlib.decompressobj().decompress(file.read(size), limit + 1)) > limit:
        raise UnreadableContentError(
            f"must have strips or tiles of {limit} bytes, but the one at {offset} inflates to more. Replace the file."
        )


def _ends_with_alpha(page: Any) -> bool:
    return bool(page.extrasamples) and page.extrasamples[-1] == _STRAIGHT_ALPHA


def _orientation(page: Any) -> int:
    value = page.tags.valueof(274, default=1)
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


class _Overheard(logging.Logger):
    """A logger that also tells a reading thread what it is given, whatever the application silenced."""

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802 - logging's name
        is_heard = level >= logging.WARNING and getattr(_reading, "complaints", None) is not None
        return is_heard or super().isEnabledFor(level)

    def handle(self, record: logging.LogRecord) -> None:
        complaints: list[str] | None = getattr(_reading, "complaints", None)
        message = record.getMessage()
        is_remark = any(tag in message for tag in _TAGS_BESIDE_PIXELS)
        if complaints is not None and record.levelno >= logging.WARNING and not is_remark:
            complaints.append(message)
        if super().isEnabledFor(record.levelno):
            super().handle(record)


@contextmanager
def _collected_complaints(complaints: list[str]) -> Iterator[None]:
    """Collect what tifffile logs in this thread, apart from remarks on metadata that no pixel depends on."""
    logger = logging.getLogger("tifffile")
    if not isinstance(logger, _Overheard):
        logger.__class__ = type("Overheard", (_Overheard, type(logger)), {})
    _reading.complaints = complaints
    try:
        yield
    finally:
        _reading.complaints = None
