"""Pairs of arrays to samples: aligned random crops, flips and quarter turns, tensors in the stored dtype.

Randomness comes from Python's ``random``, which the data loader seeds for each sample.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import torch

from srforge.distributed.errors import ConfigurationError
from srforge.sr.resize import bicubic_downscale

if TYPE_CHECKING:
    from torch import Tensor

# The widened kernel reaches 1.5 LR pixels beyond the pixel it makes.
_MARGIN = 2


def random_window(height: int, width: int, patch: int, name: str) -> tuple[int, int]:
    """Draw the top left corner of a square window.

    Args:
        height: Of the LR image, in pixels.
        width: Of the LR image, in pixels.
        patch: Side of the window, in LR pixels, >= 1.
        name: File or photograph, for the message.

    Returns:
        (top, left) in LR pixels, uniform over all places where the window fits.

    Raises:
        ConfigurationError: The window does not fit into the image.
    """
    if not 1 <= patch <= min(height, width):
        raise ConfigurationError(
            f"`patch` must be in [1, {min(height, width)}] for the {height}x{width} LR image of {name}, "
            f"but is {patch}. Use a smaller patch or leave the image out."
        )
    return random.randint(0, height - patch), random.randint(0, width - patch)


def degraded_window(hr: np.ndarray, scale: int, top: int, left: int, patch: int) -> np.ndarray:
    """Make one window of the LR image without making all of it.

    Args:
        hr: ``(H, W, C)`` with sides that are multiples of ``scale``.
        scale: SR factor.
        top: First LR row of the window.
        left: First LR column of the window.
        patch: Side of the window, in LR pixels.

    Returns:
        ``(patch, patch, C)`` in the dtype of ``hr``: what cutting the bicubically reduced whole image gives.
    """
    height, width = hr.shape[0] // scale, hr.shape[1] // scale
    first_row, first_column = max(top - _MARGIN, 0), max(left - _MARGIN, 0)
    last_row, last_column = min(top + patch + _MARGIN, height), min(left + patch + _MARGIN, width)
    region = hr[first_row * scale : last_row * scale, first_column * scale : last_column * scale]
    reduced = degrade(region, scale)
    row, column = top - first_row, left - first_column
    return reduced[row : row + patch, column : column + patch]


def degrade(hr: np.ndarray, scale: int) -> np.ndarray:
    """Reduce an array bicubically.

    Args:
        hr: ``(H, W, C)``, uint8, uint16 or floating point, sides multiples of ``scale``.
        scale: SR factor.

    Returns:
        ``(H // scale, W // scale, C)`` in the dtype of ``hr``.
    """
    return bicubic_downscale(as_tensor(hr), scale).permute(1, 2, 0).numpy()


def augmented(*images: np.ndarray) -> tuple[np.ndarray, ...]:
    """Apply one random choice of the eight flips and quarter turns to all images alike.

    Args:
        images: Square windows ``(h, w, C)``.

    Returns:
        Views of the images.
    """
    is_mirrored, quarter_turns = random.random() < 0.5, random.randrange(4)
    turned = (np.rot90(image, quarter_turns) for image in images)
    return tuple(image[:, ::-1] if is_mirrored else image for image in turned)


def as_tensor(image: np.ndarray) -> Tensor:
    """Copy an array to a tensor with channels first.

    Args:
        image: ``(H, W, C)``, any strides. Floating point wider than 32 bits becomes float32.

    Returns:
        ``(C, H, W)``, contiguous, owning its memory, in the dtype of the array.
    """
    planes = np.array(image.transpose(2, 0, 1), order="C")
    return torch.from_numpy(planes.astype(np.float32) if planes.dtype == np.float64 else planes)
