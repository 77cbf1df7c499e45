import numpy as np
import pytest
import torch

from srforge.distributed.errors import ConfigurationError
from srforge.sr import bicubic_upscale, panel


def pictures(channels=3, scale=2, dtype=torch.uint8):
    generator = torch.Generator().manual_seed(0)
    peak = {torch.uint8: 256, torch.uint16: 65536}[dtype]
    shapes = ((channels, 10, 12), (channels, 10 * scale, 12 * scale), (channels, 10 * scale, 12 * scale))
    return [torch.randint(0, peak, shape, generator=generator).to(dtype) for shape in shapes]


def column(picture, index, width=24):
    left = index * (width + 4)
    return picture[18:, left : left + width]


def test_panel_shows_lr_bicubic_sr_and_hr_in_order():
    lr, sr, hr = pictures()
    picture = panel(lr, sr, hr, 2)
    assert picture.shape == (20 + 18, 4 * 24 + 3 * 4, 3)
    assert picture.dtype == np.uint8
    np.testing.assert_array_equal(column(picture, 0)[::2, 1::2], lr.permute(1, 2, 0))
    bicubic = column(picture, 1).astype(int) - bicubic_upscale(lr, 2).permute(1, 2, 0).numpy()
    assert np.abs(bicubic).max() <= 1
    np.testing.assert_array_equal(column(picture, 2), sr.permute(1, 2, 0))
    np.testing.assert_array_equal(column(picture, 3), hr.permute(1, 2, 0))
    assert all((column(picture[:18].repeat(2, axis=0), i) < 128).any() for i in range(4))  # a title above each


def test_sixteen_bits_and_floats_are_shown_in_their_range():
    lr, _, hr = pictures(dtype=torch.uint16)
    sr = torch.full((3, 20, 24), 1.5)
    picture = panel(lr, sr, hr, 2)
    assert (column(picture, 2) == 255).all()
    expected = np.rint(hr.to(torch.float64).permute(1, 2, 0).numpy() / 257)
    np.testing.assert_array_equal(column(picture, 3), expected)


def test_grey_is_repeated_and_bands_are_chosen():
    lr, sr, hr = pictures(channels=1)
    np.testing.assert_array_equal(column(panel(lr, sr, hr, 2), 3), hr.permute(1, 2, 0).repeat(1, 1, 3))
    lr, sr, hr = pictures(channels=13)
    picture = panel(lr, sr, hr, 2, bands=(3, 2, 1))
    np.testing.assert_array_equal(column(picture, 3), hr[[3, 2, 1]].permute(1, 2, 0))


def test_bad_arguments_are_refused():
    lr, sr, hr = pictures()
    with pytest.raises(ConfigurationError, match=r"`sr` must be \(C, 20, 24\) .* but is \(3, 20, 22\)"):
        panel(lr, sr[..., :22], hr, 2)
    with pytest.raises(ConfigurationError, match=r"`hr` must be \(C, 30, 36\)"):
        panel(lr, torch.rand(3, 30, 36), hr, 3)
    with pytest.raises(ConfigurationError, match=r"`bands` must be three channels in \[0, 3\), but is \(3, 2, 1\)"):
        panel(lr, sr, hr, 2, bands=(3, 2, 1))
