import numpy as np
import pytest
import torch
from torch.nn import functional

from srforge.distributed.errors import ConfigurationError
from srforge.sr import bicubic_downscale, bicubic_upscale, mod_crop, resize_bicubic


def keys_kernel(x):
    """Keys' cubic with a = -0.5, as printed in the paper."""
    x = np.abs(x)
    inner = 1.5 * x**3 - 2.5 * x**2 + 1
    outer = -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2
    return np.where(x <= 1, inner, np.where(x < 2, outer, 0.0))


def resize_axis(image, axis, scale):
    """Reference in float64: each output pixel sums all input pixels under a kernel widened when reducing."""
    length = image.shape[axis]
    width = max(1.0, 1.0 / scale)
    centres = (np.arange(round(length * scale)) + 0.5) / scale - 0.5
    weights = keys_kernel((np.arange(length)[None, :] - centres[:, None]) / width)
    weights /= weights.sum(axis=1, keepdims=True)
    return np.moveaxis(np.tensordot(weights, image, axes=(1, axis)), 0, axis)


def reference_resize(image, scale):
    return resize_axis(resize_axis(image.astype(np.float64), -2, scale), -1, scale)


@pytest.mark.parametrize("scale", [1 / 2, 1 / 3, 1 / 4, 2, 3, 4])
def test_resize_is_keys_kernel_widened_against_aliasing(scale):
    image = np.random.default_rng(0).random((3, 24, 36))
    result = resize_bicubic(torch.from_numpy(image).float(), scale)
    np.testing.assert_allclose(result.numpy(), reference_resize(image, scale), atol=1e-5)


def test_reducing_without_antialias_would_be_another_image():
    image = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    plain = functional.interpolate(image, size=(16, 16), mode="bicubic")
    error = (bicubic_downscale(image, 4) - plain).square().mean()
    assert error > 1e-3  # below 30 dB: the two are not the same degradation


@pytest.mark.parametrize(("dtype", "peak"), [(torch.uint8, 255), (torch.uint16, 65535)])
@pytest.mark.parametrize("scale", [2, 3])
def test_degradation_returns_the_stored_dtype_rounded_to_nearest(dtype, peak, scale):
    image = np.random.default_rng(1).integers(0, peak + 1, (3, 24, 24))
    result = bicubic_downscale(torch.from_numpy(image).to(dtype), scale)
    expected = reference_resize(image, 1 / scale).clip(0, peak)
    assert result.dtype == dtype
    # float32 carries 16-bit values to about 1 / 100 of a step.
    assert np.abs(result.to(torch.float64).numpy() - expected).max() <= 0.51


@pytest.mark.parametrize(("dtype", "peak"), [(torch.uint8, 255), (torch.uint16, 65535)])
def test_overshoot_is_clamped_in_integers_and_kept_in_floats(dtype, peak):
    step = torch.zeros(1, 8, 8)
    step[..., 4:] = 1.0
    enlarged = bicubic_upscale(step, 2)
    assert enlarged.min() < -0.01
    assert enlarged.max() > 1.01
    stored = bicubic_upscale((step * peak).to(dtype), 2).to(torch.float64)
    # Without the clamp, values below 0 would come back as values near the peak.
    assert (stored - enlarged.double().clamp(0, 1) * peak).abs().max() <= 0.51


def test_a_constant_image_stays_constant():
    assert torch.equal(bicubic_upscale(torch.full((13, 5, 7), 200, dtype=torch.uint8), 3).unique(), torch.tensor([200]))


def test_batch_and_single_image_agree():
    image = torch.rand(3, 12, 12)
    assert torch.equal(bicubic_downscale(image.unsqueeze(0), 2)[0], bicubic_downscale(image, 2))


@pytest.mark.parametrize(("scale", "size"), [(4, (248, 360)), (3, (249, 360)), (1, (250, 361))])
def test_mod_crop_cuts_bottom_and_right(scale, size):
    image = torch.arange(250 * 361).view(1, 250, 361)
    assert torch.equal(mod_crop(image, scale), image[:, : size[0], : size[1]])


def test_bad_arguments_are_refused():
    with pytest.raises(ConfigurationError, match=r"`hr` must have sides that are multiples of scale=4, but is 250x361"):
        bicubic_downscale(torch.rand(3, 250, 361), 4)
    with pytest.raises(ConfigurationError, match=r"`image` must have sides of at least scale=4, but is 3x9"):
        mod_crop(torch.rand(3, 3, 9), 4)
    with pytest.raises(ConfigurationError, match=r"`scale` must be positive .* but is -1"):
        resize_bicubic(torch.rand(3, 8, 8), -1)
    with pytest.raises(ConfigurationError, match=r"`scale` must be positive and leave at least one pixel of 8x8"):
        resize_bicubic(torch.rand(3, 8, 8), 0.01)
    with pytest.raises(ConfigurationError, match=r"`image` must be .* but is \(3, 8, 8\) of torch.int32"):
        resize_bicubic(torch.zeros(3, 8, 8, dtype=torch.int32), 2)
    with pytest.raises(ConfigurationError, match=r"but is \(8, 8\)"):
        resize_bicubic(torch.rand(8, 8), 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale", [2, 0.5])
def test_narrow_floats_are_resized_in_float32(dtype, scale):
    """The processor has no kernel for them, and half-precision weights would be a coarser picture on any device."""
    image = torch.rand(2, 3, 8, 12, generator=torch.Generator().manual_seed(0)).to(dtype)
    resized = resize_bicubic(image, scale)
    assert resized.dtype == dtype
    assert torch.equal(resized, resize_bicubic(image.float(), scale).to(dtype))


@pytest.mark.parametrize("scale", [0, -2, 2.5])
def test_factors_that_are_not_whole_are_refused(scale):
    for function in (mod_crop, bicubic_downscale):
        with pytest.raises(ConfigurationError, match=rf"`scale` must be a whole number of at least 1, but is {scale}"):
            function(torch.zeros(3, 8, 8), scale)
