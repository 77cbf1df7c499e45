"""Degradations beyond bicubic reduction: blur, resizing, noise and JPEG of random strength, for models that meet real images.

Randomness comes from Python's ``random`` and torch's default generator, which the data loader seeds for each sample.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset

from srforge.distributed.errors import ConfigurationError
from srforge.sr.colour import to_float, to_stored
from srforge.sr.resize import resize_bicubic

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(frozen=True, kw_only=True)
class BlindDegradation:
    """Stages of blur, random resizing, noise and JPEG compression, then the reduction to the LR size.

    A simplified form of the paper's model: Gaussian blur only (isotropic or not), Gaussian noise only, bicubic resizing
    only, no sinc filter.

    Args:
        scale: SR factor.
        num_stages: How often the stage is repeated; 2 is the paper's "high-order" degradation.
        blur_sigma: Range of the blur's standard deviations along its two axes, in pixels of the stage.
        resize: Range of the factor by which each stage resizes.
        noise_sigma: Range of the noise's standard deviation, in units of [0, 1].
        grey_noise_probability: How often the noise is the same in all channels.
        jpeg_quality: Range of the quality, 1 to 100. None: no JPEG, which 16-bit and multi-band images need.

    Raises:
        ConfigurationError: A range is not two ascending numbers within its bounds.

    Source: X. Wang et al., "Real-ESRGAN: Training Real-World Blind Super-Resolution with Pure Synthetic Data", 2021.
    """

    scale: int
    num_stages: int = 2
    blur_sigma: Sequence[float] = (0.2, 3.0)
    resize: Sequence[float] = (0.3, 1.2)
    noise_sigma: Sequence[float] = (1 / 255, 25 / 255)
    grey_noise_probability: float = 0.4
    jpeg_quality: Sequence[int] | None = (30, 95)

    def __post_init__(self) -> None:
        if self.scale < 1 or self.num_stages < 1:
            raise ConfigurationError(
                f"`scale` and `num_stages` must be at least 1, but are {self.scale} and {self.num_stages}. Correct them."
            )
        _require_range("blur_sigma", self.blur_sigma, 0.05, 20.0)
        _require_range("resize", self.resize, 0.05, 4.0)
        _require_range("noise_sigma", self.noise_sigma, 0.0, 1.0)
        if self.jpeg_quality is not None:
            _require_range("jpeg_quality", self.jpeg_quality, 1, 100)
            if any(int(quality) != quality for quality in self.jpeg_quality):
                raise ConfigurationError(
                    f"`jpeg_quality` must be whole numbers, but is {tuple(self.jpeg_quality)}. Correct them."
                )

    def __call__(self, hr: Tensor) -> Tensor:
        """Degrade one image.

        Args:
            hr: ``(C, H, W)``, uint8 or uint16, on the CPU, sides multiples of ``scale`` (see ``mod_crop``).

        Returns:
            ``(C, H // scale, W // scale)`` in the dtype of ``hr``.

        Raises:
            ConfigurationError: The image is of another kind, or JPEG is on and it is not 8-bit with 1 or 3 channels.
        """
        is_stored = hr.ndim == 3 and hr.dtype in (torch.uint8, torch.uint16)
        if not is_stored or any(side < self.scale or side % self.scale for side in hr.shape[1:]):
            raise ConfigurationError(
                f"`hr` must be (C, H, W) of uint8 or uint16 with sides that are multiples of scale={self.scale}, "
                f"but is {tuple(hr.shape)} of {hr.dtype}. Apply mod_crop, or to_stored, first."
            )
        if self.jpeg_quality is not None and (hr.dtype != torch.uint8 or hr.shape[0] not in (1, 3)):
            raise ConfigurationError(
                f"`jpeg_quality` must be None for images that JPEG cannot hold, but is {tuple(self.jpeg_quality)} for "
                f"{hr.shape[0]} channels of {hr.dtype}. Set it to null."
            )
        height, width = hr.shape[-2] // self.scale, hr.shape[-1] // self.scale
        image = to_float(hr)
        for stage in range(self.num_stages):
            image = gaussian_blur(image, random.uniform(*self.blur_sigma), random.uniform(*self.blur_sigma))
            if stage == self.num_stages - 1:
                image = functional.interpolate(image[None], size=(height, width), mode="bicubic", antialias=True)[0]
            else:
                # Never below the LR size: what is lost here cannot be asked of a model.
                smallest = min(1.0, max(height / image.shape[-2], width / image.shape[-1]))
                image = resize_bicubic(image, max(random.uniform(*self.resize), smallest))
            image = self._with_noise(image)
            if self.jpeg_quality is not None:
                image = _through_jpeg(image, random.randint(*map(int, self.jpeg_quality)))
        return to_stored(image, hr.dtype)

    def _with_noise(self, image: Tensor) -> Tensor:
        is_grey = random.random() < self.grey_noise_probability
        noise = torch.randn(1 if is_grey else image.shape[0], *image.shape[-2:])
        return image + random.uniform(*self.noise_sigma) * noise


class DegradedImages(Dataset["dict[str, Any]"]):
    """A data set of pairs whose LR images are made anew by a degradation.

    Args:
        dataset: Map-style, with samples ``{"hr": (C, H, W), ...}``.
        degradation: Maps an HR image to an LR image, for example ``BlindDegradation``.
    """

    def __init__(self, dataset: Any, degradation: Callable[[Tensor], Tensor]) -> None:
        self.dataset, self.degradation = dataset, degradation

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return the sample of the inner data set with another ``"lr"``."""
        sample = self.dataset[index]
        return {**sample, "lr": self.degradation(sample["hr"])}


def gaussian_blur(image: Tensor, sigma_along: float, sigma_across: float) -> Tensor:
    """Blur by a Gaussian that is turned at random where its two standard deviations differ.

    Args:
        image: ``(C, H, W)``, floating point.
        sigma_along: Standard deviation along the drawn direction, in pixels, > 0.
        sigma_across: Standard deviation across it, > 0.

    Returns:
        The same shape; beyond the border the edge pixels are repeated.
    """
    angle = random.uniform(0.0, math.pi)
    radius = math.ceil(3.0 * max(sigma_along, sigma_across))
    offsets = torch.arange(-radius, radius + 1, dtype=image.dtype)
    rows, columns = torch.meshgrid(offsets, offsets, indexing="ij")
    along = columns * math.cos(angle) + rows * math.sin(angle)
    across = rows * math.cos(angle) - columns * math.sin(angle)
    kernel = (-0.5 * ((along / sigma_along).square() + (across / sigma_across).square())).exp()
    padded = functional.pad(image.unsqueeze(1), (radius, radius, radius, radius), mode="replicate")
    return functional.conv2d(padded, (kernel / kernel.sum())[None, None]).squeeze(1)


def _through_jpeg(image: Tensor, quality: int) -> Tensor:
    from srforge.data.opencv import import_cv2

    cv2 = import_cv2()
    # OpenCV's order is BGR; JPEG's luma must be taken of the right channels.
    pixels = to_stored(image).flip(0).permute(1, 2, 0).contiguous().numpy()
    is_written, data = cv2.imencode(".jpg", pixels, [cv2.IMWRITE_JPEG_QUALITY, quality])
    assert is_written
    decoded = cv2.imdecode(data, cv2.IMREAD_GRAYSCALE if image.shape[0] == 1 else cv2.IMREAD_COLOR)
    planes = torch.from_numpy(decoded.reshape(pixels.shape)).permute(2, 0, 1).flip(0)
    return to_float(planes)


def _require_range(name: str, bounds: Sequence[float], lowest: float, highest: float) -> None:
    are_numbers = all(isinstance(bound, int | float) for bound in bounds)
    if len(bounds) != 2 or not are_numbers or not lowest <= bounds[0] <= bounds[1] <= highest:
        raise ConfigurationError(
            f"`{name}` must be two ascending numbers in [{lowest}, {highest}], but is {tuple(bounds)}. Correct them."
        )
