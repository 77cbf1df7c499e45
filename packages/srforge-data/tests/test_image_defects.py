"""Files that must be refused: each error names the file and what is wrong with it, and nothing half read is returned."""

import io
import logging
import os
import pickle
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
import tifffile
from PIL import Image

from srforge.data.image_formats import MAX_PIXELS
from srforge.data.images import ImageReadError, read_image

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (40, 56, 3), dtype=np.uint8)


def encoded(suffix, pixels=PIXELS, **options):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, {"png": "PNG", "jpg": "JPEG", "tif": "TIFF"}[suffix], **options)
    return buffer.getvalue()


def chunk(name, content):
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def refused(tmp_path, name, data, match):
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(ImageReadError, match=match) as caught:
        read_image(path)
    assert str(caught.value).startswith(str(path))
    return str(caught.value)


@pytest.mark.parametrize("suffix", ["png", "jpg", "tif", "npy"])
def test_what_is_no_file_of_that_format_is_named(tmp_path, suffix):
    name = f"image.{suffix}"
    refused(tmp_path, name, b"", r"must hold an image, but is empty")
    refused(
        tmp_path, name, b"<html>404</html>", r"must hold what its suffix says, but holds something that is no image"
    )
    other = "jpg" if suffix == "png" else "png"
    refused(tmp_path, name, encoded(other), rf"but holds a {'JPEG' if other == 'jpg' else 'PNG'} file")
    with pytest.raises(ImageReadError, match=rf"missing.{suffix} must be a readable image file, but: No such file"):
        read_image(tmp_path / f"missing.{suffix}")
    (tmp_path / f"folder.{suffix}").mkdir()
    with pytest.raises(ImageReadError, match=r"must be an image file, but is a folder"):
        read_image(tmp_path / f"folder.{suffix}")


@pytest.mark.parametrize(
    ("head", "match"),
    [
        (b"RIFF\x10\0\0\0WEBPVP8 ", r"holds a WebP file, which is not read. Convert it"),
        (b"\0\0\0\x20ftypavif\0\0\0\0", r"holds an AVIF, HEIC or video file"),
        (b"GIF89a" + bytes(20), r"holds a GIF file"),
        (b"BM" + bytes(20), r"holds a BMP file"),
        (b"PK\x03\x04" + bytes(20), r"holds a ZIP archive \(as .npz is one\)\. Unpack it"),
        (b"version https://git-lfs.github.com/spec/v1\n", r"holds a Git LFS pointer, .*\. Run `git lfs pull`"),
        (b"RIFF\x10\0\0\0WAVEfmt ", r"holds something that is no image"),
    ],
)
def test_what_is_often_found_under_a_suffix_is_named(tmp_path, head, match):
    for suffix in ("png", "jpg", "tif", "npy"):
        refused(tmp_path, f"image.{suffix}", head, match)


def test_unknown_suffix_and_special_files_are_refused(tmp_path):
    refused(tmp_path, "image.webp", b"RIFF", r"must end in one of .png, .jpg, .jpeg, .tif, .tiff, .npy, but does not")
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(ImageReadError, match=r"must be an image file, but is no regular file"):
        read_image(tmp_path / "pipe.png")


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"restart_marker_rows": 1}])
def test_jpeg_cut_anywhere_is_refused(tmp_path, options):
    data = encoded("jpg", **options)
    for length in [*range(3, len(data), 7), *range(len(data) - 20, len(data))]:
        refused(tmp_path, "cut.jpg", data[:length], r"must (end with the JPEG end marker|hold whole JPEG segments)")


@pytest.mark.parametrize("missing", [1, 2, 10, 200, 700])
@pytest.mark.parametrize("options", [{}, {"subsampling": 0}, {"restart_marker_rows": 1}])
def test_cut_jpeg_with_an_end_marker_glued_on_is_refused(tmp_path, missing, options):
    data = encoded("jpg", quality=90, **options)
    whole = np.asarray(Image.open(io.BytesIO(data)))
    cut = data[: -2 - missing] + data[-2:]
    half = np.asarray(Image.open(io.BytesIO(cut)))  # Pillow returns it without a word
    path = tmp_path / "glued.jpg"
    path.write_bytes(cut)
    if missing >= 200:
        assert not np.array_equal(whole, half)
        refused(tmp_path, "glued.jpg", cut, r"coded data ends too early|restart markers")
    else:  # less than a block is gone: at worst that block is wrong, as an altered byte would make it
        assert np.array_equal(whole[:-16, :-16], half[:-16, :-16])


def test_fill_bytes_before_a_marker_change_nothing(tmp_path):
    grey = encoded("jpg", np.full((40, 40, 3), 128, np.uint8), restart_marker_rows=2)  # its last block needs the probe
    filled = grey
    for marker in (b"\xff\xd0", b"\xff\xd1", b"\xff\xd9"):
        filled = filled.replace(marker, b"\xff\xff\xff" + marker)
    assert len(filled) == len(grey) + 6
    (tmp_path / "filled.jpg").write_bytes(filled)
    np.testing.assert_array_equal(read_image(tmp_path / "filled.jpg"), np.asarray(Image.open(io.BytesIO(grey))))


def test_progressive_jpeg_without_its_last_scans_is_refused(tmp_path):
    data = encoded("jpg", progressive=True)
    scans = [index for index in range(len(data) - 1) if data[index : index + 2] == b"\xff\xda"]
    assert len(scans) == 10
    refused(tmp_path, "scans.jpg", data[: scans[5]] + data[-2:], r"\d+ of its 192 coefficients are in no scan")


def test_jpeg_whose_only_scan_begins_again_is_refused(tmp_path):
    data = encoded("jpg")
    scan = data.index(b"\xff\xda")
    with pytest.raises(OSError, match="broken data stream"):
        Image.open(io.BytesIO(data[: scan + 500] + data[scan:])).load()
    refused(tmp_path, "again.jpg", data[: scan + 500] + data[scan:], r"must bring each coefficient once")


def test_jpeg_with_a_lost_restart_interval_is_refused(tmp_path):
    data = encoded("jpg", restart_marker_rows=1)
    first, second = data.index(b"\xff\xd0"), data.index(b"\xff\xd1")
    refused(tmp_path, "order.jpg", data[:first] + data[second:], r"must have its restart markers in order")
    last = data.index(b"\xff\xd1")
    refused(tmp_path, "count.jpg", data[:last] + data[-2:], r"must have 2 restart markers in its scan, but has 1")


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        (b"\xff\xc0\x00\x11\x08", b"\xff\xc0\x00\x11\x0c", r"must be a JPEG of 8 bits, but has 12 bits"),
        (b"\xff\xc0", b"\xff\xc3", r"must be a baseline or progressive JPEG, but is of type SOF3"),
        (b"\xff\xc0", b"\xff\xc9", r"must be a baseline or progressive JPEG, but is of type SOF9"),
        (b"\x08\x00\x28\x00\x38\x03", b"\x08\x00\x00\x00\x38\x03", r"must have at least one pixel"),
        (b"\x08\x00\x28\x00\x38\x03", b"\x08\xff\xff\xff\xff\x03", r"must have at most 268435456 pixels"),
    ],
)
def test_jpeg_kinds_that_are_not_read_are_named(tmp_path, old, new, match):
    data = encoded("jpg")
    assert data.count(old) == 1
    refused(tmp_path, "kind.jpg", data.replace(old, new), match)


def test_cmyk_jpeg_is_refused(tmp_path):
    buffer = io.BytesIO()
    Image.fromarray(PIXELS).convert("CMYK").save(buffer, "JPEG")
    refused(tmp_path, "cmyk.jpg", buffer.getvalue(), r"must be grey or RGB, but is a CMYK JPEG")


def test_png_cut_anywhere_is_refused(tmp_path):
    data = encoded("png")
    for length in [*range(8, 120), *range(120, len(data), 97), *range(len(data) - 16, len(data))]:
        refused(tmp_path, "cut.png", data[:length], r"must (end with the PNG chunk IEND|hold whole chunks)")


def test_png_with_any_altered_byte_is_refused(tmp_path):
    data = encoded("png")
    for position in [*range(8, 60), *range(60, len(data), 61), *range(len(data) - 12, len(data))]:
        altered = bytearray(data)
        altered[position] ^= 0x10
        refused(tmp_path, "altered.png", bytes(altered), r"chunk|checksum|cut")


@pytest.mark.parametrize(
    ("chunks", "match"),
    [
        ([chunk(b"tEXt", b"a"), chunk(b"IEND", b"")], r"must begin with the PNG chunk IHDR"),
        ([chunk(b"IHDR", b"\0" * 12), chunk(b"IEND", b"")], r"must have a PNG header of 13 bytes"),
        ([chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 4, 2, 0, 0, 0)), chunk(b"IEND", b"")], r"type 2 with 4 bits"),
        ([chunk(b"IHDR", struct.pack(">IIBBBBB", 4, 4, 8, 2, 0, 0, 0)), chunk(b"IEND", b"")], r"has 0 bytes of pixel"),
        (
            [
                chunk(b"IHDR", struct.pack(">IIBBBBB", 4, 4, 8, 0, 0, 0, 0)),
                chunk(b"IDAT", zlib.compress(b"\0" * 15)),  # 4 rows have 20 bytes
                chunk(b"IEND", b""),
            ],
            r"its pixel data cannot be decoded",
        ),
        (
            [
                chunk(b"IHDR", struct.pack(">IIBBBBB", 4, 4, 8, 0, 0, 0, 0)),
                chunk(b"acTL", b"\0" * 8),
                chunk(b"IEND", b""),
            ],
            r"must be a still image, but is an animated PNG",
        ),
    ],
)
def test_png_with_intact_checksums_and_wrong_content_is_refused(tmp_path, chunks, match):
    refused(tmp_path, "content.png", b"\x89PNG\r\n\x1a\n" + b"".join(chunks), match)


def bombs():
    """Return small files that promise more than any training image has, each with the rule that it breaks."""
    side = 100_000
    header = struct.pack(">IIBBBBB", side, side, 8, 6, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(99999)))
    small_png = png.replace(chunk(b"IHDR", header), chunk(b"IHDR", struct.pack(">IIBBBBB", 9999, 9999, 8, 6, 0, 0, 0)))
    npy = io.BytesIO()
    np.lib.format.write_array_header_1_0(npy, {"descr": "<f4", "fortran_order": False, "shape": (side, side)})
    tiff = io.BytesIO()
    tifffile.imwrite(tiff, np.zeros((4096, 4096), np.uint8), compression="zlib", rowsperstrip=4096, metadata=None)
    claims = tiff.getvalue().replace(struct.pack("<HHII", 256, 4, 1, 4096), struct.pack("<HHII", 256, 4, 1, 2**30))
    return {
        "pixels.png": (png + chunk(b"IEND", b""), rf"must have at most {MAX_PIXELS} pixels"),
        "empty.png": (small_png + chunk(b"IEND", b""), r"must hold the 9999 x 9999 pixels of its header"),
        "pixels.npy": (npy.getvalue(), r"must be a whole .npy file"),
        "pixels.tif": (claims, rf"must have at most {MAX_PIXELS} pixels"),
    }


@pytest.mark.parametrize("name", ["pixels.png", "empty.png", "pixels.npy", "pixels.tif"])
def test_bombs_are_refused_before_memory_is_taken(tmp_path, name):
    data, match = bombs()[name]
    refused(tmp_path, name, data, match)  # once before counting: the imports take memory too
    tracemalloc.start()
    try:
        refused(tmp_path, name, data, match)
        assert tracemalloc.get_traced_memory()[1] < 4e6
    finally:
        tracemalloc.stop()


def test_deflated_strip_that_explodes_is_refused(tmp_path):
    buffer = io.BytesIO()
    tifffile.imwrite(buffer, np.zeros((8192, 16384), np.uint8), compression="zlib", rowsperstrip=8192, metadata=None)
    rows = struct.pack("<HHII", 257, 4, 1, 8192)
    assert rows in buffer.getvalue()
    lying = buffer.getvalue().replace(rows, struct.pack("<HHII", 257, 4, 1, 16))
    refused(tmp_path, "explodes.tif", lying, r"must have strips or tiles of 262144 bytes, but the one at \d+ inflates")


@pytest.mark.parametrize("compression", [None, "zlib"])
@pytest.mark.parametrize("layout", [{"rowsperstrip": 8}, {"tile": (16, 16)}, {}])
def test_tiff_without_all_its_pixels_is_refused(tmp_path, layout, compression):
    buffer = io.BytesIO()
    tifffile.imwrite(buffer, PIXELS[..., 0], compression=compression, metadata=None, **layout)
    data = buffer.getvalue()
    for length in [*range(5, 300, 7), *range(300, len(data), 101), len(data) - 1]:
        refused(tmp_path, "cut.tif", data[:length], r"must ")


def test_sparse_tiff_is_refused(tmp_path):
    tifffile.imwrite(tmp_path / "whole.tif", PIXELS[..., 0], rowsperstrip=8, metadata=None)
    with tifffile.TiffFile(tmp_path / "whole.tif", mode="r+") as tiff:
        tag = tiff.pages[0].tags["StripByteCounts"]
        tag.overwrite([0, *tag.value[1:]])
    assert not tifffile.imread(tmp_path / "whole.tif")[:8].any()  # what a lenient reader makes of it
    refused(
        tmp_path,
        "sparse.tif",
        (tmp_path / "whole.tif").read_bytes(),
        r"must hold all its strips or tiles, but one of 0 bytes",
    )


def test_tiff_kinds_that_are_not_read_are_named(tmp_path):
    def tiff(pixels, **options):
        buffer = io.BytesIO()
        tifffile.imwrite(buffer, pixels, metadata=None, **options)
        return buffer.getvalue()

    pages = np.stack([PIXELS[..., 0]] * 3)
    refused(tmp_path, "a.tif", tiff(pages, photometric="minisblack"), r"must hold one image, but holds 3 pages")
    refused(tmp_path, "a.tif", tiff(PIXELS[..., 0], photometric="miniswhite"), r"but is a TIFF of .*MINISWHITE")
    rgba = np.concatenate([PIXELS, PIXELS[..., :1]], -1)
    premultiplied = tiff(rgba, photometric="rgb", extrasamples=["assocalpha"])
    refused(tmp_path, "a.tif", premultiplied, r"must have straight alpha")
    refused(tmp_path, "a.tif", tiff(PIXELS[..., 0].astype(np.complex64)), r"must hold one of .*, but holds complex64")
    refused(
        tmp_path, "a.tif", encoded("tif", compression="jpeg"), r"must be compressed by one of .*, but is a TIFF with"
    )


def test_what_tifffile_only_logs_is_an_error(tmp_path):
    buffer = io.BytesIO()
    tifffile.imwrite(buffer, PIXELS[..., 0], rowsperstrip=8, metadata=None)
    count = struct.pack("<HHI", 279, 4, 5)
    count = count if count in buffer.getvalue() else struct.pack("<HHI", 279, 3, 5)
    assert count in buffer.getvalue()
    damaged = buffer.getvalue().replace(count, count[:2] + b"\x63\x00" + count[4:])  # a type that does not exist
    refused(tmp_path, "tag.tif", damaged, r"must be a TIFF without faults|strips or tiles")


@pytest.mark.parametrize("silence", ["level", "disabled", "all"])
def test_what_tifffile_logs_is_heard_where_the_application_silenced_it(tmp_path, silence, monkeypatch, caplog):
    logger = logging.getLogger("tifffile")
    if silence == "level":
        monkeypatch.setattr(logger, "level", logging.CRITICAL)
    elif silence == "disabled":  # as logging.config leaves the loggers that it does not know
        monkeypatch.setattr(logger, "disabled", True)
    else:
        monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)
    logger._cache.clear()  # of levels; setLevel and logging.disable clear it
    buffer = io.BytesIO()
    tifffile.imwrite(buffer, PIXELS[..., 0], metadata=None)
    tag = struct.pack("<HHI", 282, 5, 1)  # the resolution
    damaged = buffer.getvalue().replace(tag, tag[:2] + b"\x63\x00" + tag[4:])  # a type that does not exist
    assert damaged != buffer.getvalue()
    refused(tmp_path, "tag.tif", damaged, r"must be a TIFF without faults")
    assert not caplog.records  # what was silenced stays silent
    logger._cache.clear()


def test_npy_must_be_one_whole_numeric_array(tmp_path):
    def npy(array, **options):
        buffer = io.BytesIO()
        np.save(buffer, array, **options)
        return buffer.getvalue()

    data = npy(PIXELS)
    for length in [*range(7, 140), len(data) // 2, len(data) - 1]:
        refused(tmp_path, "cut.npy", data[:length], r"must be a whole .npy file")
    refused(tmp_path, "long.npy", data + b"\0", r"must hold one array and nothing else, but has 1 bytes after it")
    refused(tmp_path, "flat.npy", npy(np.zeros(4)), r"must hold an array .*, but its shape is \(4,\)")
    refused(tmp_path, "type.npy", npy(PIXELS.astype(np.complex64)), r"must hold one of .*, but holds complex64")
    refused(tmp_path, "bool.npy", npy(PIXELS > 3), r"must hold one of .*, but holds bool")
    refused(tmp_path, "none.npy", npy(np.zeros((0, 3))), r"must (have at least one pixel|be a whole .npy file)")
    refused(tmp_path, "pickle.npy", npy(np.array([[{}]]), allow_pickle=True), r"must be a whole .npy file")


def test_error_survives_the_way_from_a_loader_worker(tmp_path):
    message = refused(tmp_path, "empty.png", b"", "is empty")
    assert str(pickle.loads(pickle.dumps(ImageReadError(message)))) == message
