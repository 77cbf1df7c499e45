"""RRDBNet: residual-in-residual dense blocks, the generator of ESRGAN."""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from srforge.sr.models.upsampling import (
    prime_factors,
    require_channels,
    require_sizes,
    require_skip_channels,
    zero_convolution,
)
from srforge.sr.resize import bicubic_upscale

_BRANCH_SCALE = 0.2  # of the paper: keeps the sum of very many branches at the size of one
_SLOPE = 0.2


class DenseBlock(nn.Module):
    """Five 3 x 3 convolutions, each of which sees the outputs of all before it, added to the input.

    Args:
        num_features: Channels in and out.
        growth: Channels that each inner convolution adds.
    """

    def __init__(self, num_features: int, growth: int) -> None:
        super().__init__()
        widths = [growth, growth, growth, growth, num_features]
        self.convolutions = nn.ModuleList(
            nn.Conv2d(num_features + index * growth, width, 3, padding=1) for index, width in enumerate(widths)
        )
        for convolution in self.convolutions:
            # A tenth of the usual start: dense sums of full-size branches would grow from block to block.
            nn.init.kaiming_normal_(cast("nn.Conv2d", convolution).weight, a=_SLOPE)
            with torch.no_grad():
                cast("nn.Conv2d", convolution).weight.mul_(0.1)
            nn.init.zeros_(cast("Tensor", convolution.bias))

    def forward(self, features: Tensor) -> Tensor:
        """Return the block's output, same shape ``(N, F, h, w)``."""
        seen = [features]
        for convolution in self.convolutions[:-1]:
            seen.append(functional.leaky_relu(convolution(torch.cat(seen, dim=1)), _SLOPE))
        return features + _BRANCH_SCALE * cast("Tensor", self.convolutions[-1](torch.cat(seen, dim=1)))


class ResidualInResidualBlock(nn.Module):
    """Three dense blocks in a row, added to their input.

    Args:
        num_features: Channels in and out.
        growth: Channels that each inner convolution adds.
    """

    def __init__(self, num_features: int, growth: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(DenseBlock(num_features, growth) for _ in range(3)))

    def forward(self, features: Tensor) -> Tensor:
        """Return the block's output, same shape ``(N, F, h, w)``."""
        return features + _BRANCH_SCALE * cast("Tensor", self.blocks(features))


class RRDBNet(nn.Module):
    """Generator of ESRGAN; with the global skip it starts as bicubic enlargement, exactly.

    The published model is 64 features, 23 blocks, growth 32, scale 4, without a skip. Inputs are in [0, 1]; the
    output is not clamped.

    Args:
        scale: SR factor, a whole number >= 1.
        in_channels: Channels of the LR image.
        out_channels: Channels of the SR image.
        num_features: Channels inside.
        num_blocks: Residual-in-residual blocks.
        growth: Channels that each dense convolution adds.
        global_skip: Add the bicubically enlarged input; the last convolution then starts at 0.

    Raises:
        ConfigurationError: A size is below 1, or the skip joins different channel counts.

    Source: X. Wang et al., "ESRGAN: Enhanced Super-Resolution Generative Adversarial Networks", 2018.
    """

    def __init__(
        self,
        scale: int,
        in_channels: int = 3,
        out_channels: int = 3,
        num_features: int = 64,
        num_blocks: int = 23,
        growth: int = 32,
        global_skip: bool = True,  # noqa: FBT001, FBT002 - one switch of a model that is built by keywords
    ) -> None:
        super().__init__()
        require_sizes(
            in_channels=in_channels,
            out_channels=out_channels,
            num_features=num_features,
            num_blocks=num_blocks,
            growth=growth,
        )
        require_skip_channels(global_skip, in_channels, out_channels)
        self.factors = prime_factors(scale)
        self.scale, self.in_channels, self.global_skip = int(scale), in_channels, global_skip
        self.head = nn.Conv2d(in_channels, num_features, 3, padding=1)
        blocks = [ResidualInResidualBlock(num_features, growth) for _ in range(num_blocks)]
        self.body = nn.Sequential(*blocks, nn.Conv2d(num_features, num_features, 3, padding=1))
        self.upsampling = nn.ModuleList(nn.Conv2d(num_features, num_features, 3, padding=1) for _ in self.factors)
        self.refine = nn.Conv2d(num_features, num_features, 3, padding=1)
        self.last = nn.Conv2d(num_features, out_channels, 3, padding=1)
        if global_skip:
            zero_convolution(self.last)

    def forward(self, lr: Tensor) -> Tensor:
        """Enlarge a batch.

        Args:
            lr: ``(N, in_channels, h, w)``, floating point in [0, 1].

        Returns:
            ``(N, out_channels, h * scale, w * scale)``, not clamped.

        Raises:
            ConfigurationError: The batch has another number of channels.
        """
        require_channels(lr, self.in_channels)
        features = self.head(lr)
        features = features + self.body(features)
        for factor, convolution in zip(self.factors, self.upsampling, strict=True):
            larger = functional.interpolate(features, scale_factor=factor, mode="nearest")
            features = functional.leaky_relu(convolution(larger), _SLOPE)
        residual = cast("Tensor", self.last(functional.leaky_relu(self.refine(features), _SLOPE)))
        return residual + bicubic_upscale(lr, self.scale) if self.global_skip else residual
