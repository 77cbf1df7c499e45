import pytest
import torch

from srforge.distributed.errors import ConfigurationError
from srforge.sr import rgb_to_luma, to_float, to_stored


@pytest.mark.parametrize(
    ("rgb", "luma"),
    [((0, 0, 0), 16.0), ((1, 1, 1), 235.0), ((1, 0, 0), 81.481), ((0, 1, 0), 144.553), ((0, 0, 1), 40.966)],
)
def test_luma_has_the_levels_of_bt601_studio_range(rgb, luma):
    image = torch.tensor(rgb, dtype=torch.float64).view(3, 1, 1)
    assert float(rgb_to_luma(image) * 255) == pytest.approx(luma, abs=1e-9)


def test_luma_keeps_batch_and_size():
    assert rgb_to_luma(torch.rand(2, 3, 5, 7)).shape == (2, 1, 5, 7)


@pytest.mark.parametrize(("dtype", "peak"), [(torch.uint8, 255), (torch.uint16, 65535)])
def test_stored_values_survive_the_round_trip(dtype, peak):
    stored = torch.arange(peak + 1).to(dtype)
    values = to_float(stored)
    assert values.dtype == torch.float32
    assert (float(values[0]), float(values[-1])) == (0.0, 1.0)
    assert torch.equal(to_stored(values, dtype), stored)


def test_storing_rounds_to_nearest_and_clamps():
    values = torch.tensor([-0.5, 0.6 / 255, 1.4 / 255, 254.6 / 255, 2.0])
    assert to_stored(values).tolist() == [0, 1, 1, 255, 255]


def test_floats_pass_unchanged():
    image = torch.rand(3, 4, 4, dtype=torch.bfloat16)
    assert to_float(image) is image


def test_unknown_ranges_are_refused():
    with pytest.raises(
        ConfigurationError, match=r"`image` must be uint8, uint16 or floating point, but is torch.int16"
    ):
        to_float(torch.zeros(3, dtype=torch.int16))
    with pytest.raises(ConfigurationError, match=r"`dtype` must be torch.uint8 or torch.uint16, but is torch.int32"):
        to_stored(torch.zeros(3), torch.int32)
    with pytest.raises(ConfigurationError, match=r"`image` must have 3 channels .* but has 13"):
        rgb_to_luma(torch.rand(13, 4, 4))


@pytest.mark.parametrize("function", [to_stored, rgb_to_luma])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int64, torch.bool])
def test_stored_values_are_not_taken_for_images_in_the_unit_range(function, dtype):
    """Clamped to [0, 1] a stored image would be white, and its luma another number."""
    with pytest.raises(ConfigurationError, match=rf"`image` must be floating point in \[0, 1\].*, but is {dtype}"):
        function(torch.ones(3, 4, 4).to(dtype))
