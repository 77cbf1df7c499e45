import pickle
import random

import numpy as np
import pytest
import torch

from srforge.data.images import ImageReadError, write_image
from srforge.distributed.errors import ConfigurationError
from srforge.sr import PairedImages, bicubic_downscale


def noise(height, width, channels=3, dtype=np.uint8, seed=0):
    generator = np.random.default_rng(seed)
    return generator.integers(0, np.iinfo(dtype).max, (height, width, channels), endpoint=True).astype(dtype)


def make_folder(folder, images):
    folder.mkdir()
    for name, image in images.items():
        write_image(folder / name, image)
    return folder


@pytest.mark.parametrize("scale", [3, 4])
@pytest.mark.parametrize("patch", [None, 20])
def test_sizes_that_are_no_multiple_are_cut_in_both_splits(tmp_path, scale, patch):
    hr = make_folder(tmp_path / "hr", {"a.png": noise(250, 361)})
    sample = PairedImages(hr, scale=scale, patch=patch)[0]
    expected = (patch, patch) if patch else (250 // scale, 361 // scale)
    assert sample["lr"].shape == (3, *expected)
    assert sample["hr"].shape == (3, expected[0] * scale, expected[1] * scale)


def test_lr_is_the_rounded_bicubic_reduction_of_the_cut_hr(tmp_path):
    image = noise(33, 41)
    sample = PairedImages(make_folder(tmp_path / "hr", {"a.png": image}), scale=2)[0]
    hr = torch.from_numpy(image[:32, :40]).permute(2, 0, 1)
    assert torch.equal(sample["hr"], hr)
    assert torch.equal(sample["lr"], bicubic_downscale(hr, 2))
    assert sample["lr"].dtype == torch.uint8


@pytest.mark.parametrize("suffix", ["", "x2"])
def test_lr_files_pair_by_stem_and_crops_stay_aligned(tmp_path, suffix):
    lr = {f"{name}{suffix}.png": noise(12, 14, seed=seed) for seed, name in enumerate("abc")}
    # Each HR pixel repeats its LR pixel, so alignment shows.
    hr = {name[0] + ".tif": image.repeat(2, axis=0).repeat(2, axis=1) for name, image in lr.items()}
    folders = make_folder(tmp_path / "hr", hr), make_folder(tmp_path / "lr", lr)
    (tmp_path / "hr" / "notes.txt").write_text("no image")
    (tmp_path / "hr" / ".hidden.png").write_text("no image")
    dataset = PairedImages(*folders, scale=2, patch=5, augment=True)
    assert len(dataset) == 3
    random.seed(0)
    for index in range(30):
        sample = dataset[index % 3]
        assert torch.equal(sample["hr"][:, ::2, ::2], sample["lr"])
        assert torch.equal(sample["hr"][:, 1::2, 1::2], sample["lr"])


@pytest.mark.parametrize(("channels", "dtype", "name"), [(1, np.uint8, "a.png"), (3, np.uint16, "a.png"),
                                                         (13, np.uint16, "a.tif"), (4, np.uint16, "a.npy")])  # fmt: skip
def test_bands_and_bit_depth_are_kept(tmp_path, channels, dtype, name):
    image = noise(24, 28, channels, dtype)
    sample = PairedImages(make_folder(tmp_path / "hr", {name: image}), scale=2, channels=channels, patch=6)[0]
    assert (sample["lr"].shape, sample["hr"].shape) == ((channels, 6, 6), (channels, 12, 12))
    assert sample["lr"].dtype == sample["hr"].dtype == getattr(torch, np.dtype(dtype).name)


def test_grey_files_give_the_configured_channels(tmp_path):
    folder = make_folder(tmp_path / "hr", {"a.png": noise(16, 16, 1)})
    assert PairedImages(folder, scale=2, channels=1)[0]["hr"].shape == (1, 16, 16)
    tripled = PairedImages(folder, scale=2, channels=3)[0]["hr"]
    assert torch.equal(tripled[0], tripled[2])
    with pytest.raises(ImageReadError, match=r"a\.png"):
        PairedImages(folder, scale=2, channels=13)[0]


def test_crops_follow_the_seed(tmp_path):
    dataset = PairedImages(make_folder(tmp_path / "hr", {"a.png": noise(64, 64)}), scale=2, patch=8, augment=True)
    drawn = []
    for seed in (1, 1, 2):
        random.seed(seed)
        drawn.append(dataset[0]["hr"])
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_it_pickles_as_paths(tmp_path):
    dataset = PairedImages(make_folder(tmp_path / "hr", {"a.png": noise(64, 64)}), scale=2)
    dataset[0]
    packed = pickle.dumps(dataset)
    assert len(packed) < 2000
    assert torch.equal(pickle.loads(packed)[0]["lr"], dataset[0]["lr"])


def test_a_mismatch_names_both_files_and_sizes(tmp_path):
    hr = make_folder(tmp_path / "hr", {"a.png": noise(250, 361)})
    lr = make_folder(tmp_path / "lr", {"a.png": noise(63, 91)})
    with pytest.raises(ConfigurationError, match=r"lr.a.png is 63x91 and .*hr.a.png is 250x361, which needs 62x90"):
        PairedImages(hr, lr, scale=4)[0]


def test_an_unreadable_file_is_an_error_that_names_it(tmp_path):
    folder = make_folder(tmp_path / "hr", {"a.png": noise(16, 16), "b.png": noise(16, 16)})
    (folder / "a.png").write_bytes((folder / "a.png").read_bytes()[:300])
    dataset = PairedImages(folder, scale=2)
    with pytest.raises(ImageReadError, match=r"a\.png"):
        dataset[0]


def test_unreadable_files_are_left_out_and_counted_when_told_so(tmp_path):
    images = {f"{name}.png": noise(16, 16, seed=seed) for seed, name in enumerate("abc")}
    folder = make_folder(tmp_path / "hr", images)
    (folder / "b.png").write_bytes((folder / "b.png").read_bytes()[:300])
    with pytest.warns(UserWarning, match=r"1 of 3 pairs are left out, a file is unreadable, first: .*b.png"):
        dataset = PairedImages(folder, scale=2, on_error="skip")
    assert dataset.skipped == [folder / "b.png"]
    assert [sample["hr"].permute(1, 2, 0).numpy().tolist() for sample in map(dataset.__getitem__, range(2))] == [
        images["a.png"].tolist(), images["c.png"].tolist()]  # fmt: skip
    for name in "ac":
        (folder / f"{name}.png").write_bytes(b"")
    with pytest.raises(ConfigurationError, match=r"`hr_folder` must hold a readable image, but none of 3 pairs is"):
        PairedImages(folder, scale=2, on_error="skip")


def test_folders_and_pairs_that_cannot_work_are_refused(tmp_path):
    hr = make_folder(tmp_path / "hr", {"a.png": noise(16, 16), "b.png": noise(16, 16)})
    empty = make_folder(tmp_path / "empty", {})
    with pytest.raises(ConfigurationError, match=r"`hr_folder` must be a folder of images, but .*absent is none"):
        PairedImages(tmp_path / "absent", scale=2)
    with pytest.raises(ConfigurationError, match=r"`lr_folder` must be a folder of images .* but .*empty holds none"):
        PairedImages(hr, empty, scale=2)
    lacking = make_folder(tmp_path / "lacking", {"a.png": noise(8, 8)})
    with pytest.raises(ConfigurationError, match=r"`lr_folder` must .* but lacks 1, first b or bx2 in .*lacking"):
        PairedImages(hr, lacking, scale=2)
    spare = make_folder(tmp_path / "spare", {f"{name}.png": noise(8, 8) for name in "abc"})
    with pytest.raises(ConfigurationError, match=r"`lr_folder` must .* but holds 3, of which .*c.png does not pair"):
        PairedImages(hr, spare, scale=2)


def test_arguments_that_cannot_work_are_refused(tmp_path):
    hr = make_folder(tmp_path / "hr", {"a.png": noise(16, 16), "b.png": noise(2, 16)})
    with pytest.raises(ConfigurationError, match=r"`scale` must be a whole number of at least 1, but is 0"):
        PairedImages(hr, scale=0)
    with pytest.raises(ConfigurationError, match=r"`patch` must be at least 1 LR pixel, but is 0"):
        PairedImages(hr, scale=2, patch=0)
    with pytest.raises(ConfigurationError, match=r"`on_error` must be 'raise' or 'skip', but is 'ignore'"):
        PairedImages(hr, scale=2, on_error="ignore")
    with pytest.raises(
        ConfigurationError, match=r"`patch` must be in \[1, 8\] for the 8x8 LR image of a.png, but is 9"
    ):
        PairedImages(hr, scale=2, patch=9)[0]
    with pytest.raises(ConfigurationError, match=r"`hr_folder` must hold images of at least scale=4 .*b.png is 2x16"):
        PairedImages(hr, scale=4)[1]


@pytest.mark.parametrize("name", ["b.bmp", "b.WEBP", "b.jp2"])
def test_images_of_other_formats_are_not_left_out_in_silence(tmp_path, name):
    folder = make_folder(tmp_path / "hr", {"a.png": noise(8, 8)})
    for other in ("Thumbs.db", ".DS_Store", "._a.png", "notes.txt"):
        (folder / other).write_bytes(b"x")
    assert len(PairedImages(folder, scale=2)) == 1  # warnings are errors here
    (folder / name).write_bytes(b"x")
    with pytest.warns(
        UserWarning, match=rf"`hr_folder` must hold images in .*, but 1 beside the 1 in .*, first {name}"
    ):
        assert len(PairedImages(folder, scale=2)) == 1


@pytest.mark.parametrize("values", [(0.0, 10_000.0), (-5.0, 1.0), (0.0, np.inf)])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_floating_point_far_from_the_unit_range_is_refused(tmp_path, values, dtype):
    image = np.zeros((8, 8, 3), dtype)
    image[2, 3], image[4, 5] = values
    dataset = PairedImages(make_folder(tmp_path / "hr", {"a.tif": image}), scale=2)
    with pytest.raises(
        ConfigurationError, match=r"a.tif must have floating point values in \[0, 1\], but reaches from"
    ):
        dataset[0]


def test_overshoot_and_missing_values_of_floats_pass(tmp_path):
    image = np.full((8, 8, 1), 0.5, np.float32)
    image[0, 0], image[1, 1], image[7, 7] = -0.1, 1.1, np.nan  # NaN: what a mask leaves out of the loss
    folder = make_folder(tmp_path / "hr", {"a.tif": image})
    sample = PairedImages(folder, scale=2, channels=1)[0]
    assert torch.equal(sample["hr"][0, :7, :7], torch.from_numpy(image[:7, :7, 0]))


@pytest.mark.parametrize("dtype", [np.int16, np.int32, np.uint32, np.int8])
def test_types_without_a_stated_range_are_refused_by_file(tmp_path, dtype):
    dataset = PairedImages(make_folder(tmp_path / "hr", {"a.tif": np.ones((8, 8, 3), dtype)}), scale=2)
    with pytest.raises(ConfigurationError, match=rf"a.tif must be uint8, uint16, .*, but is {np.dtype(dtype).name}"):
        dataset[0]


def test_half_precision_files_are_reduced(tmp_path):
    image = np.random.default_rng(0).random((8, 8, 3)).astype(np.float16)
    sample = PairedImages(make_folder(tmp_path / "hr", {"a.npy": image}), scale=2)[0]
    assert sample["lr"].dtype == sample["hr"].dtype == torch.float16
