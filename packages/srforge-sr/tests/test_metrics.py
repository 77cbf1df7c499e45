import math

import numpy as np
import pytest
import torch

from srforge.distributed.errors import ConfigurationError
from srforge.sr import gradient_energy_ratio, psnr, psnr_y, ssim, ssim_y


@pytest.fixture
def images():
    """Two 8-bit RGB pairs as floats: smooth pictures and noisy predictions of them."""
    generator = np.random.default_rng(0)
    rows, columns = np.mgrid[:40, :52]
    waves = [np.sin(rows / a + columns / b) for a, b in ((3, 7), (5, 4), (9, 2), (4, 4), (6, 11), (2, 8))]
    target = (np.stack(waves).reshape(2, 3, 40, 52) * 100 + 127).round()
    prediction = (target + generator.normal(0, 6, target.shape)).round().clip(0, 255)
    return prediction, target


def as_images(*arrays):
    return tuple(torch.from_numpy(array / 255).float() for array in arrays)


def written_psnr(prediction, target, border):
    """The formula on 8-bit values, one image: 20 log10(255 / rmse)."""
    height, width = target.shape[-2:]
    inner = np.s_[..., border : height - border, border : width - border]
    return 20 * math.log10(255 / math.sqrt(((prediction - target)[inner] ** 2).mean()))


def written_luma(rgb):
    return 16 + (65.481 * rgb[0] + 128.553 * rgb[1] + 24.966 * rgb[2]) / 255


@pytest.mark.parametrize("border", [0, 4, 10])
def test_psnr_is_the_written_formula(images, border):
    prediction, target = images
    expected = [written_psnr(*pair, border) for pair in zip(prediction, target, strict=True)]
    result = psnr(*as_images(prediction, target), scale=2, border=border)
    assert result.dtype == torch.float64
    assert result.tolist() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("border", [0, 4, 10])
def test_psnr_y_is_the_written_formula_on_luma(images, border):
    prediction, target = images
    expected = [written_psnr(written_luma(p), written_luma(t), border) for p, t in zip(prediction, target, strict=True)]
    assert psnr_y(*as_images(prediction, target), scale=2, border=border).tolist() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("metric", [psnr, psnr_y, ssim, ssim_y])
def test_the_border_is_the_scale_by_default(images, metric):
    prediction, target = as_images(*images)
    assert torch.equal(metric(prediction, target, scale=3), metric(prediction, target, scale=7, border=3))


def test_full_range_luma_would_be_lower_by_a_constant():
    target = torch.full((1, 3, 16, 16), 100 / 255)
    prediction = torch.full((1, 3, 16, 16), 110 / 255)
    difference = psnr_y(prediction, target, scale=2) - psnr(prediction, target, scale=2)
    assert float(difference) == pytest.approx(20 * math.log10(255 / 219), abs=1e-6)


@pytest.mark.parametrize("metric", [psnr, psnr_y])
def test_a_perfect_pair_counts_as_the_cap(images, metric):
    prediction, target = as_images(*images)
    prediction[0] = target[0]
    values = metric(prediction, target, scale=2)
    assert float(values[0]) == 100.0
    assert values.mean() == (100.0 + values[1]) / 2
    assert metric(prediction, target, scale=2, cap=48.13).tolist() == [48.13, float(values[1])]


def test_predictions_are_rounded_to_eight_bits_unless_told_otherwise():
    target = torch.full((1, 3, 16, 16), 100 / 255)
    prediction = torch.full((1, 3, 16, 16), 100.4 / 255)
    assert float(psnr(prediction, target, scale=2)) == 100.0  # rounds back to the truth
    exact = psnr(prediction, target, scale=2, levels=None)
    assert float(exact) == pytest.approx(20 * math.log10(255 / 0.4), abs=1e-4)
    fine = psnr(prediction, target, scale=2, levels=65535)
    assert float(fine) == pytest.approx(20 * math.log10(65535 / 103), abs=1e-4)  # 100.4 * 257 = 25802.8 -> 25803
    cut_off = torch.floor(torch.full((1, 3, 16, 16), 99.6)) / 255
    assert float(psnr(cut_off, target, scale=2)) == pytest.approx(20 * math.log10(255), abs=1e-6)


def test_values_outside_the_range_are_clamped():
    target = torch.ones(1, 3, 16, 16)
    assert float(psnr(target * 1.5, target, scale=2)) == 100.0


@pytest.mark.parametrize("metric", [psnr, psnr_y, ssim, ssim_y])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_pixel_that_is_no_number_is_not_hidden(images, metric, value):
    prediction, target = as_images(*images)
    prediction[1, 0, 20, 20] = value
    values = metric(prediction, target, scale=2)
    assert torch.isfinite(values[0])
    assert torch.isnan(values[1])


@pytest.mark.parametrize("border", [0, 2, 10])
def test_ssim_equals_scikit_image(images, border):
    structural_similarity = pytest.importorskip("skimage.metrics").structural_similarity
    prediction, target = images
    inner = np.s_[:, :, border : 40 - border, border : 52 - border]
    settings = {"gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False, "data_range": 1.0}
    expected = [
        structural_similarity(p / 255, t / 255, channel_axis=0, **settings)
        for p, t in zip(prediction[inner], target[inner], strict=True)
    ]
    assert ssim(*as_images(prediction, target), scale=2, border=border).tolist() == pytest.approx(expected, abs=1e-7)
    luma = [
        structural_similarity(written_luma(p) / 255, written_luma(t) / 255, **settings)
        for p, t in zip(prediction[inner], target[inner], strict=True)
    ]
    assert ssim_y(*as_images(prediction, target), scale=2, border=border).tolist() == pytest.approx(luma, abs=1e-7)


def test_ssim_of_constant_images_is_its_luminance_term():
    prediction, target = torch.full((1, 1, 16, 16), 51 / 255), torch.full((1, 1, 16, 16), 153 / 255)
    expected = (2 * 0.2 * 0.6 + 1e-4) / (0.2**2 + 0.6**2 + 1e-4)
    assert float(ssim(prediction, target, scale=2)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("metric", [psnr, ssim])
@pytest.mark.parametrize("channels", [1, 3, 13])
def test_any_number_of_channels_and_any_grouping(metric, channels):
    prediction, target = torch.rand(3, channels, 20, 24), torch.rand(3, channels, 20, 24)
    together = metric(prediction, target, scale=2)
    apart = [float(metric(p[None], t[None], scale=2)) for p, t in zip(prediction, target, strict=True)]
    assert together.tolist() == pytest.approx(apart, rel=1e-12)


def test_gradient_energy_ratio_is_that_of_squared_differences(images):
    prediction, target = images
    inner = np.s_[:, :, 2:-2, 2:-2]

    def energy(image):
        return (np.diff(image[inner], axis=2) ** 2).sum((1, 2, 3)) + (np.diff(image[inner], axis=3) ** 2).sum((1, 2, 3))

    result = gradient_energy_ratio(*as_images(prediction, target), scale=2)
    assert result.tolist() == pytest.approx((energy(prediction) / energy(target)).tolist(), rel=1e-4)


def test_gradient_energy_ratio_is_one_at_equality_and_finite_on_flat_targets(images):
    _, target = as_images(*images)
    assert gradient_energy_ratio(target, target, scale=2).tolist() == [1.0, 1.0]
    flat = torch.zeros_like(target)
    assert torch.isfinite(gradient_energy_ratio(target, flat, scale=2)).all()
    assert (gradient_energy_ratio(flat, target, scale=2) < 1e-4).all()


def test_bad_arguments_are_refused(images):
    prediction, target = as_images(*images)
    with pytest.raises(ConfigurationError, match=r"`border` must be .* 40x52 image, but is 20"):
        psnr(prediction, target, scale=2, border=20)
    with pytest.raises(ConfigurationError, match=r"`border` must be .* but is -1"):
        psnr(prediction, target, scale=2, border=-1)
    with pytest.raises(ConfigurationError, match=r"at least 11x11 pixels inside the border for SSIM, but has 10x22"):
        ssim(prediction, target, scale=2, border=15)
    with pytest.raises(ConfigurationError, match=r"`prediction` must be .* \(2, 3, 40, 52\), but is \(2, 3, 40, 50\)"):
        psnr(prediction[..., :50], target, scale=2)
    with pytest.raises(ConfigurationError, match=r"`image` must have 3 channels .* but has 1"):
        psnr_y(prediction[:, :1], target[:, :1], scale=2)


@pytest.mark.parametrize("metric", [psnr, psnr_y, ssim, ssim_y, gradient_energy_ratio])
@pytest.mark.parametrize(
    "dtypes", [("uint8", "uint8"), ("float32", "uint8"), ("uint16", "float32"), ("int64", "float32")]
)
def test_stored_integers_are_refused(metric, dtypes):
    """Clamped to [0, 1] they would give decibels, and wrong ones."""
    images = [torch.ones(1, 3, 32, 32).to(getattr(torch, name)) for name in dtypes]
    with pytest.raises(ConfigurationError, match=r"must be floating point in \[0, 1\], but are torch.*with to_float"):
        metric(*images, scale=2)


@pytest.mark.parametrize("metric", [psnr, psnr_y, ssim, ssim_y, gradient_energy_ratio])
def test_metrics_of_no_image_are_no_values(metric):
    assert metric(torch.rand(0, 3, 32, 32), torch.rand(0, 3, 32, 32), scale=2).shape == (0,)


@pytest.mark.parametrize(("metric", "value"), [(psnr, 100.0), (psnr_y, 100.0), (ssim, 1.0), (ssim_y, 1.0),
                                               (gradient_energy_ratio, 1.0)])  # fmt: skip
@pytest.mark.parametrize("level", [0.0, 0.3, 1.0])
def test_equal_flat_images_are_perfect(metric, value, level):
    flat = torch.full((2, 3, 32, 32), level)
    assert metric(flat, flat, scale=2).tolist() == [value, value]
