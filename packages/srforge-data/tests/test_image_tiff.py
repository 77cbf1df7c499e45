"""TIFF's own rules, each alone: a file that breaks one is refused by that rule's words, whatever else would refuse it."""

import struct
from importlib.util import find_spec

import numpy as np
import pytest
import tifffile

from srforge.data import image_tiff
from srforge.data.images import ImageReadError, read_image

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (24, 32), dtype=np.uint8)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "image.tif"


def overwrite(path, name, value, **options):
    with tifffile.TiffFile(path, mode="r+") as tiff:
        tiff.pages[0].tags[name].overwrite(value, **options)


def refused(path, match):
    with pytest.raises(ImageReadError, match=match) as caught:
        read_image(path)
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize("kind", ["tifffile", "imagej"])
def test_stack_that_lists_one_page_is_refused(path, kind):
    stack = RNG.integers(0, 256, (5, 20, 30), dtype=np.uint8)
    if kind == "tifffile":
        tifffile.imwrite(path, stack, truncate=True, photometric="minisblack")
    else:  # what ImageJ writes where a stack has over 4 GiB
        tifffile.imwrite(path, stack[0], description="ImageJ=1.54f\nimages=5\nslices=5\n", metadata=None)
        path.write_bytes(path.read_bytes() + stack[1:].tobytes())
    with tifffile.TiffFile(path) as tiff:
        assert len(tiff.pages) == 1
    refused(path, r"must hold one image, but is a stack of 5. Save each as its own file")


@pytest.mark.parametrize("description", ["ImageJ=1.54f\nimages=5\nslices=5\n", '{"shape": [5, 24, 32]}'])
def test_description_that_another_tool_kept_is_no_stack(path, description):
    tifffile.imwrite(path, PIXELS, description=description, metadata=None)
    np.testing.assert_array_equal(read_image(path)[..., 0], PIXELS)


@pytest.mark.parametrize("bits", [2, 4, 6, 12])
def test_bits_that_do_not_fill_their_type_are_refused(path, bits):
    dtype = np.uint8 if bits <= 8 else np.uint16
    tifffile.imwrite(path, PIXELS.astype(dtype), metadata=None)
    overwrite(path, "BitsPerSample", bits)
    refused(path, rf"must hold a flat image of whole bytes, but has {bits} bits per sample")


@pytest.mark.parametrize(
    "error",
    [ValueError("LZW requires the 'imagecodecs' package"), ModuleNotFoundError("No module named 'compression'")],
)
def test_missing_codecs_are_named_with_what_brings_them(path, error, monkeypatch):
    def fail(*args, **options):
        raise error

    tifffile.imwrite(path, PIXELS, metadata=None)
    monkeypatch.setattr(tifffile.TiffPage, "asarray", fail)
    monkeypatch.setattr(image_tiff, "find_spec", lambda name: None)
    refused(path, r"needs the package imagecodecs \(.*\). Install `srforge-data\[tiff\]`")
    monkeypatch.setattr(image_tiff, "find_spec", lambda name: object())
    refused(path, r"must be a whole TIFF, but tifffile says: \w+: .*. Replace the file")


@pytest.mark.parametrize("options", [{"compression": "lzw"}, {"compression": "zlib", "predictor": 3}])
def test_what_needs_codecs_is_read_with_them_and_named_without(path, options):
    stored = PIXELS.astype(np.float32) / 7 if "predictor" in options else PIXELS
    if find_spec("imagecodecs") is not None:
        tifffile.imwrite(path, stored, metadata=None, **options)
        np.testing.assert_array_equal(read_image(path)[..., 0], stored)
        return
    # without the package tifffile cannot write them either: a tag alone says what the strips hold
    tifffile.imwrite(path, PIXELS, metadata=None, compression="zlib", predictor=2)
    overwrite(path, *(("Predictor", 3) if "predictor" in options else ("Compression", 5)))
    refused(path, r"needs the package imagecodecs")


def test_flat_images_only(path):
    tifffile.imwrite(path, np.zeros((16, 32, 32), np.uint8), tile=(16, 16, 16), volumetric=True, metadata=None)
    refused(path, r"must hold a flat image of whole bytes, but has 8 bits per sample and depth 16")


def test_rgb_needs_three_bands(path):
    tifffile.imwrite(path, PIXELS, metadata=None)
    overwrite(path, "PhotometricInterpretation", 2)
    refused(path, r"must have three bands to be RGB, but has 1")


def test_pixels_must_fill_the_strips(path):
    tifffile.imwrite(path, PIXELS, rowsperstrip=8, metadata=None)
    overwrite(path, "StripByteCounts", [8 * 32, 8 * 32 - 1, 8 * 32])
    refused(path, r"must hold 768 bytes of pixels, but its strips or tiles have 767")


def test_strips_must_be_as_many_as_the_image_has(path):
    tifffile.imwrite(path, PIXELS, rowsperstrip=8, metadata=None)
    overwrite(path, "RowsPerStrip", 6)
    refused(path, r"must have 4 strips or tiles, but lists 3 offsets and 3 sizes")


@pytest.mark.parametrize("tag", ["StripOffsets", "StripByteCounts"])
def test_strips_must_lie_in_the_file(path, tag):
    tifffile.imwrite(path, PIXELS, rowsperstrip=8, metadata=None)
    with tifffile.TiffFile(path) as tiff:
        value = list(tiff.pages[0].tags[tag].value)
    for wrong in (0, path.stat().st_size):
        overwrite(path, tag, [value[0], wrong, value[2]])
        refused(path, r"must hold all its strips or tiles, but one of \d+ bytes at \d+ is not within its")
    overwrite(path, tag, value)
    np.testing.assert_array_equal(read_image(path)[..., 0], PIXELS)


@pytest.mark.parametrize("compression", [8, 32946])
def test_explosion_is_found_under_both_numbers_of_deflate(path, compression):
    tifffile.imwrite(path, np.zeros((8192, 16384), np.uint8), compression="zlib", rowsperstrip=8192, metadata=None)
    overwrite(path, "Compression", compression)
    overwrite(path, "RowsPerStrip", 8192)
    assert read_image(path).shape == (8192, 16384, 1)
    overwrite(path, "ImageLength", 16)
    refused(path, r"must have strips or tiles of 262144 bytes, but the one at \d+ inflates to more")


def test_masks_and_overviews_are_passed_over(path):
    with tifffile.TiffWriter(path) as tiff:
        tiff.write(PIXELS > 100, subfiletype=4, metadata=None)
        tiff.write(PIXELS, metadata=None)
        tiff.write(PIXELS[::2, ::2], subfiletype=1, metadata=None)
    np.testing.assert_array_equal(read_image(path)[..., 0], PIXELS)
    with tifffile.TiffWriter(path) as tiff:
        tiff.write(PIXELS[::2, ::2], subfiletype=1, metadata=None)
    refused(path, r"must hold one image, but holds 0 pages")


@pytest.mark.parametrize("tag", [274, 296])
@pytest.mark.parametrize("value", [0, 9])
def test_orientation_or_resolution_unit_without_meaning_is_no_fault(path, value, tag):
    number = struct.pack("<HHII", tag, 3, 1, 1)
    tifffile.imwrite(path, PIXELS, byteorder="<", extratags=[(274, "H", 1, 1, True)], resolutionunit=1, metadata=None)
    assert path.read_bytes().count(number) == 1
    path.write_bytes(path.read_bytes().replace(number, struct.pack("<HHII", tag, 3, 1, value)))
    np.testing.assert_array_equal(read_image(path)[..., 0], PIXELS)


@pytest.mark.parametrize("no_data", ["-9999", "nan", "-3.4028234663852886e+38", " "])
def test_no_data_value_that_the_type_cannot_hold_is_no_fault(path, no_data):
    tifffile.imwrite(path, PIXELS, extratags=[(42113, "s", 0, no_data, True)], metadata=None)
    np.testing.assert_array_equal(read_image(path)[..., 0], PIXELS)


def test_last_of_several_extra_bands_decides_about_alpha(path):
    stored = RNG.integers(0, 256, (5, 6, 5), dtype=np.uint8)
    for extra, channels in ((["unspecified", "unassalpha"], 4), (["unassalpha", "unspecified"], 5)):
        tifffile.imwrite(path, stored, photometric="rgb", extrasamples=extra, metadata=None)
        np.testing.assert_array_equal(read_image(path), stored[..., :channels])


@pytest.mark.parametrize("byteorder", ["<", ">"])
def test_big_tiff_is_read_in_either_byte_order(path, byteorder):
    tifffile.imwrite(path, PIXELS.astype(np.uint16) * 257, bigtiff=True, byteorder=byteorder, metadata=None)
    assert path.read_bytes()[2:4] == struct.pack(f"{byteorder}H", 43)
    np.testing.assert_array_equal(read_image(path)[..., 0], PIXELS.astype(np.uint16) * 257)


def test_pages_are_not_counted_without_end(path):
    with tifffile.TiffWriter(path) as tiff:
        for _ in range(70):
            tiff.write(PIXELS, contiguous=False, metadata=None)
    refused(path, r"must hold one image, but holds 64 pages")
