"""The truth table of ``read_image``: which file gives which array. The oracles are Pillow, tifffile and the array itself."""

import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
import tifffile
from PIL import Image, ImageOps

from srforge.data import images
from srforge.data.images import ImageReadError, read_image
from srforge.distributed.errors import ConfigurationError


def picture(*shape, dtype=np.uint8, seed=0):
    """Return noise over the data type's whole range (floats: -1..1)."""
    rng = np.random.default_rng(seed)
    if np.issubdtype(dtype, np.floating):
        return rng.uniform(-1, 1, shape).astype(dtype)
    limits = np.iinfo(dtype)
    return rng.integers(limits.min, limits.max, shape, dtype=dtype, endpoint=True)


def png_bytes(pixels, color_type, bit_depth=8, *extra):
    """Encode a PNG by hand: no library writes 16-bit colour and grey with alpha alike."""

    def chunk(name, content):
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    height, width = pixels.shape[:2]
    rows = pixels.astype(">u2" if bit_depth == 16 else np.uint8).reshape(height, -1)
    raw = b"".join(b"\0" + row.tobytes() for row in rows)
    header = struct.pack(">IIBBBBB", width, height, bit_depth, color_type, 0, 0, 0)
    parts = [chunk(b"IHDR", header), *(chunk(*one) for one in extra), chunk(b"IDAT", zlib.compress(raw))]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts) + chunk(b"IEND", b"")


PNG_KINDS = {"grey": (0, 1), "rgb": (2, 3), "grey-alpha": (4, 2), "rgba": (6, 4)}


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("kind", PNG_KINDS)
def test_png_keeps_type_channels_and_rgb_order(tmp_path, kind, dtype):
    color_type, channels = PNG_KINDS[kind]
    stored = picture(5, 7, channels, dtype=dtype)
    path = tmp_path / "image.png"
    path.write_bytes(png_bytes(stored, color_type, 8 * stored.itemsize))
    result = read_image(path, alpha="keep")
    assert result.dtype == dtype
    np.testing.assert_array_equal(result, stored)


def test_sixteen_bits_survive_to_the_last_step(tmp_path):
    ramp = np.arange(65536, dtype=np.uint16).reshape(256, 256, 1)
    (tmp_path / "ramp.png").write_bytes(png_bytes(ramp, 0, 16))
    np.testing.assert_array_equal(read_image(tmp_path / "ramp.png"), ramp)


def test_palette_is_applied_as_rgb(tmp_path):
    image = Image.fromarray(picture(6, 9, 3)).quantize(16)
    image.save(tmp_path / "palette.png")
    np.testing.assert_array_equal(read_image(tmp_path / "palette.png"), np.asarray(image.convert("RGB")))


def test_palette_with_transparency_has_alpha(tmp_path):
    image = Image.fromarray(picture(6, 9, 3)).quantize(16)
    image.save(tmp_path / "palette.png", transparency=3)
    expected = np.asarray(Image.open(tmp_path / "palette.png").convert("RGBA"))
    assert (expected[..., 3] == 0).any()
    np.testing.assert_array_equal(read_image(tmp_path / "palette.png", alpha="keep"), expected)
    assert read_image(tmp_path / "palette.png").shape == (6, 9, 3)


@pytest.mark.parametrize("bit_depth", [2, 4, 8, 16])
def test_transparent_grey_value_becomes_alpha(tmp_path, bit_depth):
    per_byte = max(8 // bit_depth, 1)
    stored = picture(4, 8 // per_byte * 2, 1, dtype=np.uint16 if bit_depth == 16 else np.uint8)
    key = int(stored[0, 0, 0]) >> (8 - bit_depth if bit_depth < 8 else 0)
    data = bytearray(png_bytes(stored, 0, bit_depth, (b"tRNS", struct.pack(">H", key))))
    width = stored.shape[1] * per_byte
    data[16:20] = struct.pack(">I", width)  # packed pixels: the image is wider than its bytes
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    path = tmp_path / "grey.png"
    path.write_bytes(data)
    result = read_image(path, alpha="keep")
    levels = result[..., 0] if bit_depth >= 8 else result[..., 0] // (255 // (2**bit_depth - 1))
    assert result.shape == (4, width, 2)
    np.testing.assert_array_equal(result[..., 1] == 0, levels == key)
    assert set(np.unique(result[..., 1])) <= {0, np.iinfo(result.dtype).max}


def test_one_bit_png_becomes_black_and_white(tmp_path):
    bits = picture(9, 13) > 127
    Image.fromarray(bits).save(tmp_path / "bits.png")
    np.testing.assert_array_equal(read_image(tmp_path / "bits.png")[..., 0], np.where(bits, 255, 0))


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}, {"restart_marker_blocks": 3}])
@pytest.mark.parametrize("shape", [(37, 53, 3), (37, 53), (8, 8, 3), (1, 1, 3)])
def test_jpeg_equals_pillow(tmp_path, shape, options):
    path = tmp_path / "image.jpg"
    Image.fromarray(picture(*shape)).save(path, **options)
    result = read_image(path)
    np.testing.assert_array_equal(result, np.asarray(Image.open(path)).reshape(result.shape))
    assert result.shape == (*shape[:2], 3 if len(shape) == 3 else 1)


def test_grey_jpeg_whose_last_block_is_mid_grey_is_whole(tmp_path):
    Image.new("L", (40, 40), 128).save(tmp_path / "grey.jpg")
    assert (read_image(tmp_path / "grey.jpg") == 128).all()


@pytest.mark.parametrize("bands", [1, 3, 4, 8, 13])
@pytest.mark.parametrize("planar", ["contig", "separate"])
@pytest.mark.parametrize("layout", [{}, {"tile": (16, 16)}, {"rowsperstrip": 5}, {"compression": "zlib"}])
@pytest.mark.parametrize("byteorder", ["<", ">"])
def test_tiff_bands_come_last_in_either_planar_layout(tmp_path, bands, planar, layout, byteorder):
    stored = picture(21, 35, bands, dtype=np.uint16)
    as_written = stored[..., 0] if bands == 1 else stored if planar == "contig" else stored.transpose(2, 0, 1)
    tifffile.imwrite(
        tmp_path / "bands.tif",
        as_written,
        photometric="minisblack",
        planarconfig=planar if bands > 1 else None,
        byteorder=byteorder,
        metadata=None,
        **layout,
    )
    result = read_image(tmp_path / "bands.tif")
    assert result.dtype == np.uint16
    assert result.dtype.isnative
    np.testing.assert_array_equal(result, stored)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.float16, np.float32, np.float64])
def test_tiff_keeps_its_type(tmp_path, dtype):
    stored = picture(5, 6, dtype=dtype)
    tifffile.imwrite(tmp_path / "image.tif", stored)
    result = read_image(tmp_path / "image.tif")
    assert result.dtype == dtype
    np.testing.assert_array_equal(result[..., 0], stored)


def test_one_bit_tiff_becomes_black_and_white(tmp_path):
    bits = picture(9, 13) > 127
    Image.fromarray(bits).save(tmp_path / "bits.tif")
    np.testing.assert_array_equal(read_image(tmp_path / "bits.tif")[..., 0], np.where(bits, 255, 0))


def test_tiff_alpha_is_what_its_tag_says(tmp_path):
    stored = picture(5, 6, 4, dtype=np.uint16)
    tifffile.imwrite(tmp_path / "alpha.tif", stored, photometric="rgb", extrasamples=["unassalpha"])
    tifffile.imwrite(tmp_path / "bands.tif", stored, photometric="rgb", extrasamples=["unspecified"])
    np.testing.assert_array_equal(read_image(tmp_path / "alpha.tif"), stored[..., :3])
    np.testing.assert_array_equal(read_image(tmp_path / "alpha.tif", channels=4), stored)
    np.testing.assert_array_equal(read_image(tmp_path / "bands.tif"), stored)


def test_tiff_overviews_are_no_images_of_their_own(tmp_path):
    stored = picture(16, 16)
    with tifffile.TiffWriter(tmp_path / "overview.tif") as tiff:
        tiff.write(stored, metadata=None)
        tiff.write(stored[::2, ::2], subfiletype=1, metadata=None)
    np.testing.assert_array_equal(read_image(tmp_path / "overview.tif")[..., 0], stored)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["uint8", ">u2", "float32"])
def test_npy_is_read_as_saved(tmp_path, dtype, order):
    stored = np.asarray(picture(5, 6, 7, dtype=np.uint8).astype(dtype), order=order)
    np.save(tmp_path / "image.npy", stored)
    result = read_image(tmp_path / "image.npy")
    assert result.dtype.isnative
    assert result.flags.c_contiguous
    np.testing.assert_array_equal(result, stored)
    result[0, 0, 0] = 1  # writable: torch.from_numpy asks for that


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", [".jpg", ".png", ".tif"])
def test_orientation_is_applied_as_pillow_does(tmp_path, orientation, suffix):
    path = tmp_path / f"turned{suffix}"
    pixels = picture(24, 40, 3)
    if suffix == ".tif":
        tifffile.imwrite(path, pixels, extratags=[(274, "H", 1, orientation, True)], photometric="rgb")
    else:
        exif = Image.Exif()
        exif[274] = orientation
        Image.fromarray(pixels).save(path, exif=exif)
    with Image.open(path) as image:
        expected = np.asarray(ImageOps.exif_transpose(image))
    result = read_image(path)
    assert result.shape == ((24, 40, 3) if orientation < 5 else (40, 24, 3))
    assert result.flags.c_contiguous
    np.testing.assert_array_equal(result, expected)


def exif_block(orientation):
    return b"Exif\0\0MM\0*\0\0\0\x08\0\1" + struct.pack(">HHIHHI", 274, 3, 1, orientation, 0, 0)


def test_orientation_is_found_wherever_programs_leave_it(tmp_path):
    """In PNG behind JPEG's prefix, before or after the pixels; in JPEG in the first of several EXIF blocks."""
    pixels = picture(4, 6, 3)
    png = png_bytes(pixels, 2)
    content = b"eXIf" + exif_block(6)
    chunk = struct.pack(">I", len(content) - 4) + content + struct.pack(">I", zlib.crc32(content))
    for position in (33, len(png) - 12):
        (tmp_path / "image.png").write_bytes(png[:position] + chunk + png[position:])
        np.testing.assert_array_equal(read_image(tmp_path / "image.png"), np.rot90(pixels, -1))
    Image.fromarray(pixels).save(tmp_path / "plain.jpg")
    data = (tmp_path / "plain.jpg").read_bytes()
    for first, second in ((1, 6), (6, 1), (6, 3)):
        segments = [
            b"\xff\xe1" + struct.pack(">H", len(exif_block(one)) + 2) + exif_block(one) for one in (first, second)
        ]
        (tmp_path / "turned.jpg").write_bytes(data[:2] + b"".join(segments) + data[2:])
        with Image.open(tmp_path / "turned.jpg") as image:
            np.testing.assert_array_equal(
                read_image(tmp_path / "turned.jpg"), np.asarray(ImageOps.exif_transpose(image))
            )


def test_transparent_value_is_masked_to_the_bit_depth(tmp_path):
    """The PNG specification, section 11.3.2.1: of the 16 bits only as many count as a sample has."""
    stored = picture(4, 5, 1)
    key = int(stored[1, 1, 0])
    (tmp_path / "grey.png").write_bytes(png_bytes(stored, 0, 8, (b"tRNS", struct.pack(">H", 0x0300 | key))))
    result = read_image(tmp_path / "grey.png", alpha="keep")
    np.testing.assert_array_equal(result[..., 1] == 0, stored[..., 0] == key)
    for color_type, channels, size in ((0, 1, 1), (0, 1, 3), (2, 3, 2)):
        (tmp_path / "bad.png").write_bytes(png_bytes(picture(4, 5, channels), color_type, 8, (b"tRNS", bytes(size))))
        with pytest.raises(ImageReadError, match=rf"must have a transparent value of \d bytes, but has one of {size}"):
            read_image(tmp_path / "bad.png")


@pytest.mark.parametrize("exif", [b"", b"II*\0", b"II*\0\x08\0\0\0\x09\0", b"II*\0\xff\xff\xff\xff", b"nonsense"])
def test_damaged_exif_means_as_stored(tmp_path, exif):
    pixels = picture(4, 6, 3)
    (tmp_path / "image.png").write_bytes(png_bytes(pixels, 2, 8, (b"eXIf", exif)))
    np.testing.assert_array_equal(read_image(tmp_path / "image.png"), pixels)


def test_configured_channels_win(tmp_path):
    grey, rgb, rgba = picture(4, 5, 1), picture(4, 5, 3), picture(4, 5, 4)
    for name, pixels, color_type in (("grey", grey, 0), ("rgb", rgb, 2), ("rgba", rgba, 6)):
        (tmp_path / f"{name}.png").write_bytes(png_bytes(pixels, color_type))
    (tmp_path / "grey-as-rgb.png").write_bytes(png_bytes(np.repeat(grey, 3, 2), 2))
    assert read_image(tmp_path / "grey.png").shape == (4, 5, 1)  # never tripled unasked
    np.testing.assert_array_equal(read_image(tmp_path / "grey.png", channels=1), grey)
    np.testing.assert_array_equal(read_image(tmp_path / "grey.png", channels=3), np.repeat(grey, 3, 2))
    np.testing.assert_array_equal(read_image(tmp_path / "grey-as-rgb.png", channels=1), grey)
    np.testing.assert_array_equal(read_image(tmp_path / "rgba.png", channels=3, alpha="keep"), rgba[..., :3])
    np.testing.assert_array_equal(read_image(tmp_path / "rgba.png", channels=4), rgba)
    for name, channels in (("rgb", 1), ("rgb", 4), ("grey", 4), ("rgba", 1)):
        with pytest.raises(
            ImageReadError, match=rf"{name}.png must have the configured `channels`={channels}, but has"
        ):
            read_image(tmp_path / f"{name}.png", channels=channels)


def test_configured_channels_decide_about_the_alpha_of_grey(tmp_path):
    stored = picture(4, 5, 2)
    (tmp_path / "grey-alpha.png").write_bytes(png_bytes(stored, 4))
    for alpha in ("drop", "keep"):
        np.testing.assert_array_equal(read_image(tmp_path / "grey-alpha.png", channels=2, alpha=alpha), stored)
        np.testing.assert_array_equal(read_image(tmp_path / "grey-alpha.png", channels=1, alpha=alpha), stored[..., :1])
        np.testing.assert_array_equal(
            read_image(tmp_path / "grey-alpha.png", channels=3, alpha=alpha), np.repeat(stored[..., :1], 3, 2)
        )
    with pytest.raises(ImageReadError, match=r"`channels`=4, but has 1 and an alpha channel. Convert"):
        read_image(tmp_path / "grey-alpha.png", channels=4)
    with pytest.raises(ImageReadError, match=r"must have no alpha channel, but has one"):
        read_image(tmp_path / "grey-alpha.png", channels=2, alpha="error")


def test_one_channel_of_rgb_needs_all_three_to_be_equal_everywhere(tmp_path):
    for channel in range(3):
        stored = np.repeat(picture(4, 5, 1), 3, 2)
        stored[3, 4, channel] ^= 1
        (tmp_path / "almost.png").write_bytes(png_bytes(stored, 2))
        with pytest.raises(ImageReadError, match=r"`channels`=1, but has 3. Convert"):
            read_image(tmp_path / "almost.png", channels=1)


@pytest.mark.parametrize("name", ["image.PNG", "b\u00edld \u56fe.png", "%s.png", "a.b.Png", "x" * 250 + ".png"])
def test_any_path_that_the_file_system_takes_is_read(tmp_path, name):
    stored = picture(4, 5, 3)
    (tmp_path / name).write_bytes(png_bytes(stored, 2))
    (tmp_path / "link.png").symlink_to(tmp_path / name)
    for path in (tmp_path / name, str(tmp_path / name), tmp_path / "link.png"):
        np.testing.assert_array_equal(read_image(path), stored)
    (tmp_path / name).unlink()
    with pytest.raises(ImageReadError, match=r"link.png must be a readable image file, but: No such file or directory"):
        read_image(tmp_path / "link.png")


@pytest.mark.parametrize(
    ("error", "match"),
    [
        (MemoryError(), r"x.png must fit into memory, but does not. Cut it into smaller images"),
        (PermissionError(13, "Permission denied"), r"x.png must be a readable image file, but: Permission denied"),
        (OSError(), r"x.png must be a readable image file, but: OSError. Check the path"),
    ],
)
def test_what_the_machine_refuses_is_named_with_the_file(tmp_path, error, match, monkeypatch):
    def fail(data):
        raise error

    (tmp_path / "x.png").write_bytes(png_bytes(picture(4, 5, 3), 2))
    monkeypatch.setattr(images.image_png, "read_png", fail)
    with pytest.raises(ImageReadError, match=match) as caught:
        read_image(tmp_path / "x.png")
    assert caught.value.__cause__ is error


def test_alpha_can_be_refused(tmp_path):
    (tmp_path / "rgba.png").write_bytes(png_bytes(picture(4, 5, 4), 6))
    with pytest.raises(ImageReadError, match=r"rgba.png must have no alpha channel, but has one"):
        read_image(tmp_path / "rgba.png", alpha="error")


def test_arguments_without_meaning_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"`alpha` must be drop, keep or error, but is 'discard'"):
        read_image(tmp_path / "x.png", alpha="discard")
    with pytest.raises(ConfigurationError, match=r"`channels` must be a positive integer or None, but is 0"):
        read_image(tmp_path / "x.png", channels=0)
    with pytest.raises(ConfigurationError, match=r"`channels` must be a positive integer or None, but is True"):
        read_image(tmp_path / "x.png", channels=True)


def test_importing_the_package_imports_no_decoder():
    code = "import sys, srforge.data; print([name for name in ('cv2', 'tifffile', 'PIL') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout.strip() == "[]"
