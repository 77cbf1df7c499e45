import random

import numpy as np
import pytest
import torch

from srforge.distributed.errors import ConfigurationError
from srforge.sr import BlindDegradation, DegradedImages, bicubic_downscale
from srforge.sr.degradations import gaussian_blur


def picture(channels=3, dtype=torch.uint8, size=(48, 64)):
    rows, columns = torch.meshgrid(torch.arange(size[0]), torch.arange(size[1]), indexing="ij")
    waves = torch.stack([torch.sin(rows / (3 + band)) * torch.cos(columns / (5 + band)) for band in range(channels)])
    peak = {torch.uint8: 255, torch.uint16: 65535}[dtype]
    return ((waves + 1) / 2 * peak).round().to(dtype)


def seeded(seed):
    random.seed(seed)
    torch.manual_seed(seed)


@pytest.mark.parametrize("scale", [2, 3, 4])
@pytest.mark.parametrize(("channels", "dtype", "quality"), [(1, torch.uint8, (30, 95)), (3, torch.uint8, (30, 95)),
                                                            (3, torch.uint16, None), (13, torch.uint16, None)])  # fmt: skip
def test_lr_has_the_size_and_dtype_of_a_stored_lr_image(scale, channels, dtype, quality):
    degradation = BlindDegradation(scale=scale, jpeg_quality=quality)
    for seed in range(5):
        seeded(seed)
        lr = degradation(picture(channels, dtype, size=(48, 60)))
        assert lr.dtype == dtype
        assert lr.shape == (channels, 48 // scale, 60 // scale)


def test_the_image_follows_the_seeds_of_random_and_torch():
    degradation, drawn = BlindDegradation(scale=2), []
    for seed in (0, 0, 1):
        seeded(seed)
        drawn.append(degradation(picture()))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_without_blur_noise_and_jpeg_it_is_the_bicubic_reduction():
    degradation = BlindDegradation(
        scale=2, num_stages=1, blur_sigma=(0.05, 0.05), noise_sigma=(0, 0), jpeg_quality=None
    )
    difference = degradation(picture()).int() - bicubic_downscale(picture(), 2).int()
    assert difference.abs().max() <= 1


def test_channels_keep_their_places_through_jpeg():
    flat = torch.tensor([200, 120, 40], dtype=torch.uint8).view(3, 1, 1).expand(3, 32, 32)
    degradation = BlindDegradation(scale=2, noise_sigma=(0, 0), jpeg_quality=(95, 95))
    assert (degradation(flat).int() - flat[:, :16, :16].int()).abs().max() <= 3


@pytest.mark.parametrize("sigma", [0.1, 0.02])
def test_noise_has_the_asked_strength(sigma):
    seeded(0)
    flat = torch.full((3, 128, 128), 128, dtype=torch.uint8)
    degradation = BlindDegradation(scale=1, num_stages=1, noise_sigma=(sigma, sigma), jpeg_quality=None)
    assert float(degradation(flat).double().std() / 255) == pytest.approx(sigma, rel=0.05)


@pytest.mark.parametrize("probability", [0.0, 1.0])
def test_grey_noise_is_equal_in_all_channels(probability):
    flat = torch.full((3, 16, 16), 128, dtype=torch.uint8)
    degradation = BlindDegradation(scale=1, grey_noise_probability=probability, jpeg_quality=None)
    lr = degradation(flat)
    assert torch.equal(lr[0], lr[2]) == (probability == 1.0)


def test_blur_has_the_asked_standard_deviations_and_keeps_the_mean():
    point = torch.zeros(1, 61, 61, dtype=torch.float64)
    point[0, 30, 30] = 1.0
    seen_angles = set()
    for seed in range(4):
        seeded(seed)
        spread = gaussian_blur(point, 4.0, 2.0)[0].numpy()
        assert spread.sum() == pytest.approx(1.0, abs=1e-12)
        rows, columns = np.mgrid[-30:31, -30:31]
        covariance = [[(spread * a * b).sum() for a in (rows, columns)] for b in (rows, columns)]
        assert np.sqrt(np.linalg.eigvalsh(covariance)) == pytest.approx([2.0, 4.0], rel=0.03)  # cut off at 3 sigma
        seen_angles.add(round(covariance[0][1], 3))
    assert len(seen_angles) == 4
    constant = torch.full((3, 9, 9), 0.3)
    torch.testing.assert_close(gaussian_blur(constant, 1.0, 3.0), constant)


def test_degraded_images_replace_lr_and_keep_the_rest():
    samples = [{"hr": picture(), "lr": None, "name": "a"}]
    dataset = DegradedImages(samples, BlindDegradation(scale=4))
    sample = dataset[0]
    assert len(dataset) == 1
    assert (sample["lr"].shape, sample["name"]) == ((3, 12, 16), "a")
    assert sample["hr"] is samples[0]["hr"]


def test_bad_arguments_are_refused():
    with pytest.raises(ConfigurationError, match=r"`scale` and `num_stages` must be at least 1, but are 2 and 0"):
        BlindDegradation(scale=2, num_stages=0)
    for name, value in {
        "blur_sigma": (3, 1),
        "resize": (0.0, 1),
        "noise_sigma": (0, 2),
        "jpeg_quality": (0, 95),
    }.items():
        with pytest.raises(ConfigurationError, match=rf"`{name}` must be two ascending numbers"):
            BlindDegradation(scale=2, **{name: value})
    with pytest.raises(ConfigurationError, match=r"`jpeg_quality` must be None .* but is \(30, 95\) for 13 channels"):
        BlindDegradation(scale=2)(picture(13, torch.uint16))


@pytest.mark.parametrize(
    "hr",
    [
        torch.rand(3, 16, 16),  # floats would be taken for [0, 1], whatever they are
        torch.zeros(3, 16, 18, dtype=torch.uint8),  # cut by the resizing, LR and HR would lie apart
        torch.zeros(3, 0, 16, dtype=torch.uint8),
        torch.zeros(2, 3, 16, 16, dtype=torch.uint8),
        torch.zeros(3, 16, 16, dtype=torch.int16),
    ],
)
def test_images_of_another_kind_are_refused(hr):
    for quality in (None, (30, 95)):
        with pytest.raises(ConfigurationError, match=r"`hr` must be \(C, H, W\) of uint8 or uint16 .* scale=4, but is"):
            BlindDegradation(scale=4, jpeg_quality=quality)(hr)


def test_bounds_are_numbers_and_qualities_are_whole():
    with pytest.raises(ConfigurationError, match=r"`noise_sigma` must be two ascending numbers"):
        BlindDegradation(scale=4, noise_sigma="01")
    with pytest.raises(ConfigurationError, match=r"`jpeg_quality` must be whole numbers, but is \(30.5, 95\)"):
        BlindDegradation(scale=4, jpeg_quality=(30.5, 95))
    degradation = BlindDegradation(scale=4, jpeg_quality=(30.0, 95.0))  # as YAML may write them
    assert degradation(picture()).shape == (3, 12, 16)
