import math

import pytest
import torch

from srforge.distributed.errors import ConfigurationError
from srforge.sr import charbonnier, l1


def pair(num_images=3, channels=3, *, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (num_images, channels, 6, 5)
    return torch.rand(shape, generator=generator).double(), torch.rand(shape, generator=generator).double()


def reference_l1(a, b):
    return [sum(abs(x - y) for x, y in zip(i.flatten().tolist(), j.flatten().tolist(), strict=True)) / i.numel()
            for i, j in zip(a, b, strict=True)]  # fmt: skip


@pytest.mark.parametrize("channels", [1, 3, 13])
def test_l1_is_one_mean_a_sample(channels):
    prediction, target = pair(channels=channels)
    assert l1(prediction, target).tolist() == pytest.approx(reference_l1(prediction, target), rel=1e-12)


def test_charbonnier_is_the_rounded_l1_of_its_formula():
    prediction = torch.full((1, 1, 2, 2), 0.3, dtype=torch.float64)
    target = torch.zeros(1, 1, 2, 2, dtype=torch.float64)
    assert float(charbonnier(prediction, target, epsilon=0.4)) == pytest.approx(0.5, rel=1e-12)
    assert float(charbonnier(target, target)) == pytest.approx(1e-3, rel=1e-12)


def test_charbonnier_has_a_gradient_at_equality():
    prediction = torch.zeros(1, 1, 2, 2, requires_grad=True)
    charbonnier(prediction, torch.zeros(1, 1, 2, 2)).sum().backward()
    assert torch.equal(prediction.grad, torch.zeros(1, 1, 2, 2))


@pytest.mark.parametrize("loss", [l1, charbonnier])
@pytest.mark.parametrize("mask_channels", [1, 3])
def test_a_mask_gives_the_sum_and_count_of_what_it_keeps(loss, mask_channels):
    prediction, target = pair(2)
    mask = torch.rand(2, mask_channels, 6, 5, generator=torch.Generator().manual_seed(1)) > 0.5
    total, count = loss(prediction, target, mask)
    kept = mask.expand(2, 3, 6, 5)
    epsilon = 0.0 if loss is l1 else 1e-3
    differences = [math.hypot(value, epsilon) for value in (prediction - target)[kept].tolist()]
    assert count == len(differences)
    assert float(total) == pytest.approx(sum(differences), rel=1e-12)


@pytest.mark.parametrize("loss", [l1, charbonnier])
def test_a_full_mask_averages_to_the_unmasked_loss(loss):
    prediction, target = pair(4)
    total, count = loss(prediction, target, torch.ones(4, 1, 6, 5))
    assert float(total / count) == pytest.approx(float(loss(prediction, target).mean()), rel=1e-12)


@pytest.mark.parametrize("loss", [l1, charbonnier])
def test_pixels_without_data_touch_neither_value_nor_gradient(loss):
    prediction, target = pair(1)
    target[0, :, 2, 3] = float("nan")
    mask = ~target.isnan()
    prediction.requires_grad_()
    total, count = loss(prediction, target, mask)
    total.backward()
    assert count == 3 * 29
    assert torch.isfinite(total)
    assert torch.isfinite(prediction.grad).all()
    assert torch.equal(prediction.grad[0, :, 2, 3], torch.zeros(3, dtype=torch.float64))
    assert (prediction.grad[mask] != 0).all()


def test_an_empty_mask_counts_nothing():
    prediction, target = pair(2)
    total, count = l1(prediction, target, torch.zeros(2, 1, 6, 5, dtype=torch.bool))
    assert (float(total), float(count)) == (0.0, 0.0)


def test_bad_arguments_are_refused():
    prediction, target = pair(2)
    with pytest.raises(ConfigurationError, match=r"`prediction` must be .* \(2, 3, 6, 5\), but is \(2, 3, 5, 5\)"):
        l1(prediction[:, :, :5], target)
    with pytest.raises(ConfigurationError, match=r"`mask` must be .* but is \(2, 6, 5\)"):
        l1(prediction, target, torch.ones(2, 6, 5))
    with pytest.raises(ConfigurationError, match=r"`mask` must be .* but is \(1, 1, 6, 5\)"):
        l1(prediction, target, torch.ones(1, 1, 6, 5))
    with pytest.raises(ConfigurationError, match=r"`epsilon` must be positive, but is 0"):
        charbonnier(prediction, target, epsilon=0)


@pytest.mark.parametrize("loss", [l1, charbonnier])
@pytest.mark.parametrize("mask", [None, torch.ones(1, 1, 4, 4)])
def test_stored_integers_are_refused(loss, mask):
    """Promoted, a uint8 target would be 255 times too far away, and uint8 against uint8 would wrap around."""
    image = torch.rand(1, 3, 4, 4)
    for prediction, target in ((image, image.byte()), (image.byte(), image.byte())):
        with pytest.raises(ConfigurationError, match=r"must be floating point in \[0, 1\], but are torch"):
            loss(prediction, target, mask)
