import pytest
import torch
from torch import nn

from srforge.distributed import ConfigurationError
from srforge.sr import forward_in_tiles


class Enlarging(nn.Module):
    """A 3x3 and a 5x5 convolution: each pixel sees 3 pixels around it, and pixels are enlarged by repeating."""

    def __init__(self, scale):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 5, padding=2)).double()
        self.scale = scale
        self.sizes = []

    def forward(self, image):
        self.sizes.append(tuple(image.shape[-2:]))
        return self.body(image).repeat_interleave(self.scale, -1).repeat_interleave(self.scale, -2)


@pytest.mark.parametrize("scale", [1, 2, 3])
@pytest.mark.parametrize("size", [(13, 29), (8, 8), (5, 40), (1, 17)])
def test_tiles_that_see_the_receptive_field_equal_the_whole_image(scale, size):
    network, image = Enlarging(scale), torch.rand(2, 2, *size, dtype=torch.float64)
    torch.testing.assert_close(forward_in_tiles(network, image, tile=8, overlap=3), network(image), rtol=0, atol=1e-12)


def test_no_tile_is_larger_than_it_was_asked_to_be():
    network = Enlarging(2)
    forward_in_tiles(network, torch.rand(1, 2, 50, 70, dtype=torch.float64), tile=16, overlap=4)
    assert max(max(size) for size in network.sizes) == 24
    assert len(network.sizes) == 4 * 5


def test_a_small_image_is_one_pass():
    network = Enlarging(2)
    forward_in_tiles(network, torch.rand(1, 2, 8, 5, dtype=torch.float64), tile=8)
    assert network.sizes == [(8, 5)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: forward_in_tiles(nn.Identity(), torch.rand(1, 1, 9, 9), tile=0), "`tile` must be at least 1"),
        (lambda: forward_in_tiles(nn.AvgPool2d(3), torch.rand(1, 1, 9, 9), tile=4), "whole factor"),
    ],
)
def test_what_cannot_work_is_refused(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()
