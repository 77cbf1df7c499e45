"""Discriminators: which images, or which parts of them, look real. They return logits: no sigmoid at the end.

Their output is always ``(N, 1, ...)``; adversarial criteria average it over all but the first dimension.
"""

from __future__ import annotations

from itertools import pairwise
from typing import cast

from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm

from srforge.distributed.errors import ConfigurationError
from srforge.sr.models.upsampling import require_channels, require_sizes

_SLOPE = 0.2
_NORMS = ("none", "batch", "instance", "spectral")


class UNetDiscriminator(nn.Module):
    """U-Net with spectral norm: one logit a pixel, from context at four resolutions.

    Args:
        in_channels: Channels of the images.
        num_features: Channels at full resolution; 2, 4 and 8 times as many below.

    Raises:
        ConfigurationError: A size is below 1.

    Source: X. Wang et al., "Real-ESRGAN: Training Real-World Blind Super-Resolution with Pure Synthetic Data", 2021.
    """

    def __init__(self, in_channels: int = 3, num_features: int = 64) -> None:
        super().__init__()
        require_sizes(in_channels=in_channels, num_features=num_features)
        self.in_channels = in_channels
        widths = [num_features * factor for factor in (1, 2, 4, 8)]
        self.head = nn.Conv2d(in_channels, num_features, 3, padding=1)
        self.down = nn.ModuleList(
            spectral_norm(nn.Conv2d(wide, wider, 4, stride=2, padding=1, bias=False))
            for wide, wider in pairwise(widths)
        )
        self.up = nn.ModuleList(
            spectral_norm(nn.Conv2d(wider, wide, 3, padding=1, bias=False))
            for wide, wider in reversed(list(pairwise(widths)))
        )
        self.refine = nn.ModuleList(
            spectral_norm(nn.Conv2d(num_features, num_features, 3, padding=1, bias=False)) for _ in range(2)
        )
        self.last = nn.Conv2d(num_features, 1, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        """Judge each pixel.

        Args:
            images: ``(N, in_channels, H, W)`` with H and W of at least 8.

        Returns:
            Logits ``(N, 1, H, W)``.

        Raises:
            ConfigurationError: The batch has another number of channels.
        """
        require_channels(images, self.in_channels, name="images")
        features = functional.leaky_relu(self.head(images), _SLOPE)
        levels = []
        for convolution in self.down:
            levels.append(features)
            features = functional.leaky_relu(convolution(features), _SLOPE)
        for convolution, level in zip(self.up, reversed(levels), strict=True):
            # To the size of the level, not by a factor: sides need not be multiples of 8.
            larger = functional.interpolate(features, size=level.shape[-2:], mode="bilinear", align_corners=False)
            features = functional.leaky_relu(convolution(larger), _SLOPE) + level
        for convolution in self.refine:
            features = functional.leaky_relu(convolution(features), _SLOPE)
        return cast("Tensor", self.last(features))


class VGGDiscriminator(nn.Module):
    """VGG-style discriminator with batch norm: one logit an image, of any size from 32 pixels up.

    The published one flattens its last map and so takes one size of image only; here the map is averaged.

    Args:
        in_channels: Channels of the images.
        num_features: Channels at full resolution; at most 8 times as many below.

    Raises:
        ConfigurationError: A size is below 1.

    Source: C. Ledig et al., "Photo-Realistic Single Image Super-Resolution Using a GAN", 2017.
    """

    def __init__(self, in_channels: int = 3, num_features: int = 64) -> None:
        super().__init__()
        require_sizes(in_channels=in_channels, num_features=num_features)
        self.in_channels = in_channels
        layers: list[nn.Module] = []
        channels = in_channels
        for factor in (1, 2, 4, 8, 8):
            width = num_features * factor
            layers += _convolution(channels, width, 3, 1, "batch" if layers else "none")
            layers += _convolution(width, width, 4, 2, "batch")
            channels = width
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Linear(channels, 100), nn.LeakyReLU(_SLOPE), nn.Linear(100, 1))

    def forward(self, images: Tensor) -> Tensor:
        """Judge each image.

        Args:
            images: ``(N, in_channels, H, W)`` with H and W of at least 32; in training at least 2 images, or 64 pixels.

        Returns:
            Logits ``(N, 1)``.

        Raises:
            ConfigurationError: The batch has another number of channels, or is too small.
        """
        require_channels(images, self.in_channels, name="images")
        if min(images.shape[-2:]) < 32:
            raise ConfigurationError(
                f"`images` must be at least 32x32 for VGGDiscriminator, but is {images.shape[-2]}x{images.shape[-1]}. "
                "Use larger patches or PatchDiscriminator."
            )
        return cast("Tensor", self.classifier(self.features(images).mean(dim=(2, 3))))


class PatchDiscriminator(nn.Module):
    """PatchGAN: one logit for each overlapping patch, of 70 pixels with 3 layers.

    Args:
        in_channels: Channels of the images.
        num_features: Channels after the first layer; doubled by each further one, at most 8 times as many.
        num_layers: Layers that halve the resolution, >= 1.
        norm: ``"batch"``, ``"instance"``, ``"spectral"`` or ``"none"``.

    Raises:
        ConfigurationError: A size is below 1, or the norm is unknown.

    Source: P. Isola et al., "Image-to-Image Translation with Conditional Adversarial Networks", 2017.
    """

    def __init__(
        self, in_channels: int = 3, num_features: int = 64, num_layers: int = 3, norm: str = "instance"
    ) -> None:
        super().__init__()
        require_sizes(in_channels=in_channels, num_features=num_features, num_layers=num_layers)
        if norm not in _NORMS:
            raise ConfigurationError(f"`norm` must be one of {', '.join(_NORMS)}, but is {norm!r}. Choose one of them.")
        self.in_channels = in_channels
        self.smallest_side = 3 * 2**num_layers  # 3 pixels after the halvings: the last two layers take one each
        layers = _convolution(in_channels, num_features, 4, 2, "spectral" if norm == "spectral" else "none")
        channels = num_features
        for layer in range(1, num_layers + 1):
            width = num_features * min(2**layer, 8)
            layers += _convolution(channels, width, 4, 1 if layer == num_layers else 2, norm)
            channels = width
        last = nn.Conv2d(channels, 1, 4, padding=1)
        self.layers = nn.Sequential(*layers, spectral_norm(last) if norm == "spectral" else last)

    def forward(self, images: Tensor) -> Tensor:
        """Judge each patch.

        Args:
            images: ``(N, in_channels, H, W)``, with 3 layers at least 24 pixels a side.

        Returns:
            Logits ``(N, 1, h, w)``.

        Raises:
            ConfigurationError: The batch has another number of channels, or is too small.
        """
        require_channels(images, self.in_channels, name="images")
        if min(images.shape[-2:]) < self.smallest_side:
            raise ConfigurationError(
                f"`images` must be at least {self.smallest_side}x{self.smallest_side} for PatchDiscriminator of these "
                f"layers, but is {images.shape[-2]}x{images.shape[-1]}. Use larger patches or a smaller `num_layers`."
            )
        return cast("Tensor", self.layers(images))


def _convolution(in_channels: int, out_channels: int, kernel_size: int, stride: int, norm: str) -> list[nn.Module]:
    """Convolution, norm and activation as a list of layers."""
    has_bias = norm in ("none", "spectral")  # a norm that subtracts the mean would undo a bias
    convolution = nn.Conv2d(in_channels, out_channels, kernel_size, stride, padding=1, bias=has_bias)
    layers: list[nn.Module] = [spectral_norm(convolution) if norm == "spectral" else convolution]
    if norm == "batch":
        layers.append(nn.BatchNorm2d(out_channels))
    elif norm == "instance":
        layers.append(nn.InstanceNorm2d(out_channels))
    return [*layers, nn.LeakyReLU(_SLOPE)]
