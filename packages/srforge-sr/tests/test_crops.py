import random

import numpy as np
import pytest
import torch

from srforge.distributed.errors import ConfigurationError
from srforge.sr.datasets.crops import as_tensor, augmented, degrade, degraded_window, random_window


@pytest.mark.parametrize("scale", [2, 3, 4])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_a_degraded_window_is_a_window_of_the_degraded_image(scale, dtype):
    hr = np.random.default_rng(0).integers(0, np.iinfo(dtype).max, (20 * scale, 24 * scale, 3)).astype(dtype)
    whole = degrade(hr, scale).astype(int)
    for top in range(20 - 6 + 1):
        for left in range(24 - 6 + 1):
            window = degraded_window(hr, scale, top, left, 6)
            assert window.dtype == dtype
            # One step where the last bits of float32 fall on both sides of a half.
            assert np.abs(window - whole[top : top + 6, left : left + 6]).max() <= 1


def test_windows_reach_every_place_and_no_other():
    random.seed(0)
    places = {random_window(5, 7, 4, "x.png") for _ in range(300)}
    assert places == {(top, left) for top in range(2) for left in range(4)}


def test_a_window_larger_than_the_image_names_the_file():
    with pytest.raises(
        ConfigurationError, match=r"`patch` must be in \[1, 5\] for the 5x7 LR image of x.png, but is 6"
    ):
        random_window(5, 7, 6, "x.png")


def test_augmentation_draws_all_eight_symmetries_alike_for_both_images():
    random.seed(0)
    lr = np.arange(4).reshape(2, 2, 1)
    hr = lr.repeat(2, axis=0).repeat(2, axis=1)
    seen = set()
    for _ in range(200):
        turned_lr, turned_hr = augmented(lr, hr)
        np.testing.assert_array_equal(turned_hr[::2, ::2], turned_lr)
        seen.add(tuple(turned_lr.flatten().tolist()))
    assert len(seen) == 8


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32])
def test_tensors_keep_the_stored_dtype_and_own_their_memory(dtype):
    image = np.arange(24).reshape(2, 4, 3).astype(dtype)
    tensor = as_tensor(image[:, ::-1])
    assert tensor.shape == (3, 2, 4)
    assert tensor.is_contiguous()
    assert str(tensor.dtype) == f"torch.{np.dtype(dtype)}"
    assert tensor[0, 0].tolist() == [9, 6, 3, 0]
    image[:] = 0
    assert tensor.any()


def test_wide_floats_become_float32():
    assert as_tensor(np.ones((2, 2, 1))).dtype == torch.float32
