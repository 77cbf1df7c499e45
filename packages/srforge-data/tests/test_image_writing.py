"""``write_image``: what is read back is what was written, or the call refuses; a file is whole or not there."""

from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from srforge.data.images import read_image, write_image
from srforge.distributed.errors import ConfigurationError

RNG = np.random.default_rng(0)

LOSSLESS = [
    *((".png", dtype, channels) for dtype in ("uint8", "uint16") for channels in (1, 3, 4)),
    *((".tif", dtype, channels) for dtype in ("uint8", "uint16", "float32") for channels in (1, 2, 3, 4, 8, 13)),
    *((".npy", dtype, channels) for dtype in ("int16", "float64") for channels in (1, 3, 5)),
]


@pytest.mark.parametrize(("suffix", "dtype", "channels"), LOSSLESS)
def test_round_trip_is_lossless(tmp_path, suffix, dtype, channels):
    array = (RNG.random((6, 7, channels)) * (255 if dtype == "uint8" else 32000)).astype(dtype)
    write_image(tmp_path / f"image{suffix}", array)
    result = read_image(tmp_path / f"image{suffix}", alpha="keep")
    assert result.dtype == dtype
    np.testing.assert_array_equal(result, array)


def test_other_readers_see_the_same_picture(tmp_path):
    rgb = RNG.integers(0, 256, (6, 7, 3), dtype=np.uint8)
    write_image(tmp_path / "rgb.png", rgb)
    np.testing.assert_array_equal(np.asarray(Image.open(tmp_path / "rgb.png")), rgb)
    bands = RNG.integers(0, 65536, (6, 7, 13), dtype=np.uint16)
    write_image(tmp_path / "bands.tif", bands)
    np.testing.assert_array_equal(tifffile.imread(tmp_path / "bands.tif"), bands)
    with tifffile.TiffFile(tmp_path / "bands.tif") as tiff:
        assert tuple(tiff.pages[0].extrasamples) == (0,) * 12  # unspecified: none of them is alpha


def test_jpeg_is_rgb_and_close(tmp_path):
    ramp = np.linspace(0, 255, 64).astype(np.uint8)
    array = np.stack(np.broadcast_arrays(ramp[:, None], ramp[None, :], np.uint8(30)), -1)
    write_image(tmp_path / "ramp.jpg", array)
    decoded = np.asarray(Image.open(tmp_path / "ramp.jpg")).astype(int)
    assert np.abs(decoded - array).mean() < 3


def test_two_axes_and_strided_views_are_written(tmp_path):
    base = RNG.integers(0, 256, (12, 14, 3), dtype=np.uint8)
    write_image(tmp_path / "grey.png", base[::2, ::-2, 1])
    np.testing.assert_array_equal(read_image(tmp_path / "grey.png")[..., 0], base[::2, ::-2, 1])


@pytest.mark.parametrize("suffix", [".png", ".tif", ".npy"])
@pytest.mark.parametrize("dtype", [">u2", "<u2"])
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_byte_order_of_the_array_changes_nothing(tmp_path, suffix, dtype, channels):
    array = RNG.integers(0, 65536, (6, 7, channels)).astype(dtype)  # NumPy's big-endian files come as >u2
    write_image(tmp_path / f"image{suffix}", array)
    np.testing.assert_array_equal(read_image(tmp_path / f"image{suffix}", alpha="keep"), array)


@pytest.mark.parametrize("suffix", [".PNG", ".TIF", ".Tiff", ".NPY"])
def test_suffix_may_be_in_capitals(tmp_path, suffix):
    array = RNG.integers(0, 256, (6, 7, 3), dtype=np.uint8)
    write_image(tmp_path / f"image{suffix}", array)
    np.testing.assert_array_equal(read_image(tmp_path / f"image{suffix}"), array)


@pytest.mark.parametrize("suffix", [".jpg", ".jpeg", ".JPG"])
def test_quality_is_what_the_encoder_gets(tmp_path, suffix):
    array = RNG.integers(0, 256, (32, 32, 3), dtype=np.uint8)
    sizes = []
    for quality in (1, 50, 95, 100):
        write_image(tmp_path / f"image{suffix}", array, jpeg_quality=quality)
        sizes.append((tmp_path / f"image{suffix}").stat().st_size)
    assert sizes == sorted(set(sizes))
    write_image(tmp_path / f"image{suffix}", array)
    assert (tmp_path / f"image{suffix}").stat().st_size == sizes[2]


@pytest.mark.parametrize("stem", ["bild-\u00fc\u56fe", "x" * 240, "a b", "%d"])
def test_any_name_that_the_file_system_takes_is_written(tmp_path, stem):
    array = RNG.integers(0, 256, (6, 7, 3), dtype=np.uint8)
    write_image(tmp_path / f"{stem}.png", array)
    np.testing.assert_array_equal(read_image(tmp_path / f"{stem}.png"), array)


def test_tiff_says_how_to_show_it(tmp_path):
    for channels, photometric in ((1, "MINISBLACK"), (3, "RGB"), (4, "MINISBLACK"), (2, "MINISBLACK")):
        write_image(tmp_path / "image.tif", np.zeros((6, 7, channels), np.uint16))
        with tifffile.TiffFile(tmp_path / "image.tif") as tiff:
            assert tiff.pages[0].photometric.name == photometric
            assert tiff.pages[0].shape == ((6, 7) if channels == 1 else (6, 7, channels))
            assert len(tiff.pages) == 1


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "match"),
    [
        ("a.png", (4, 4, 3), "float32", r"`array` must be one of uint8, uint16 for a.png, but is float32"),
        ("a.png", (4, 4, 2), "uint8", r"`array` must have one of \(1, 3, 4\) channels for a.png, but has 2"),
        ("a.jpg", (4, 4, 3), "uint16", r"`array` must be one of uint8 for a.jpg, but is uint16"),
        ("a.jpg", (4, 4, 4), "uint8", r"must have one of \(1, 3\) channels for a.jpg, but has 4"),
        ("a.tif", (4, 4, 3), "complex64", r"`array` must be one of .*, but is complex64"),
        ("a.npy", (4, 4, 3), "bool", r"`array` must be one of .*, but is bool"),
        ("a.bmp", (4, 4, 3), "uint8", r"a.bmp must end in one of .png"),
        ("a.png", (4,), "uint8", r"`array` must have shape \(H, W\) or \(H, W, C\) and a pixel"),
        ("a.png", (0, 4, 3), "uint8", r"`array` must have shape \(H, W\) or \(H, W, C\) and a pixel"),
        ("a.jpg", (1, 70000, 3), "uint8", r"`array` must be an image that .jpg can hold"),
    ],
)
def test_what_a_format_cannot_hold_is_refused(tmp_path, name, shape, dtype, match):
    with pytest.raises(ConfigurationError, match=match):
        write_image(tmp_path / name, np.zeros(shape, dtype))
    assert list(tmp_path.iterdir()) == []


def test_jpeg_quality_has_its_range(tmp_path):
    for quality in (0, 101, 95.5, "95"):
        with pytest.raises(
            ConfigurationError, match=rf"`jpeg_quality` must be an integer in 1..100, but is {quality!r}"
        ):
            write_image(tmp_path / "a.jpg", np.zeros((4, 4), np.uint8), jpeg_quality=quality)


@pytest.mark.parametrize("failing", ["write_bytes", "replace"])
def test_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, failing):
    path = tmp_path / "image.png"
    write_image(path, np.zeros((4, 4), np.uint8))
    before = path.read_bytes()

    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, failing, fail)
    with pytest.raises(OSError, match="No space left"):
        write_image(path, np.ones((4, 4), np.uint8))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_file_is_never_seen_half_written(tmp_path, monkeypatch):
    seen = []
    original = Path.write_bytes

    def watch(self, data):
        seen.append(self.name)
        assert not (tmp_path / "image.tif").exists()
        return original(self, data)

    monkeypatch.setattr(Path, "write_bytes", watch)
    write_image(tmp_path / "image.tif", np.zeros((4, 4, 4), np.float32))
    assert [name[0] for name in seen] == ["."]
    assert [one.name for one in tmp_path.iterdir()] == ["image.tif"]
