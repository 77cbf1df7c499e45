"""EDSR: residual blocks without normalisation, and a sub-pixel convolution at the end."""

from typing import cast

from torch import Tensor, nn

from srforge.distributed.errors import ConfigurationError
from srforge.sr.models.upsampling import (
    prime_factors,
    require_channels,
    require_sizes,
    require_skip_channels,
    zero_convolution,
)
from srforge.sr.resize import bicubic_upscale


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions with a ReLU between them, added to their input.

    Args:
        num_features: Channels in and out.
        residual_scale: Factor of the branch before it is added.
    """

    def __init__(self, num_features: int, residual_scale: float) -> None:
        super().__init__()
        self.residual_scale = residual_scale
        self.branch = nn.Sequential(
            nn.Conv2d(num_features, num_features, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(num_features, num_features, 3, padding=1),
        )

    def forward(self, features: Tensor) -> Tensor:
        """Return ``features`` plus the scaled branch, same shape ``(N, F, h, w)``."""
        branch = cast("Tensor", self.branch(features))
        return features + (branch if self.residual_scale == 1.0 else branch * self.residual_scale)


class EDSR(nn.Module):
    """Enhanced deep residual network; with the global skip it starts as bicubic enlargement, exactly.

    With 16 features, 3 blocks and scale 2 it has 18,428 parameters (the demo's model); the published baseline is 64
    features, 16 blocks and ``upsampler="staged"``, the large one 256 features, 32 blocks and ``residual_scale=0.1``.
    Inputs are in [0, 1]; the output is not clamped.

    Args:
        scale: SR factor, a whole number >= 1.
        in_channels: Channels of the LR image.
        out_channels: Channels of the SR image.
        num_features: Channels inside.
        num_blocks: Residual blocks.
        residual_scale: Factor of each residual branch; 0.1 keeps wide models stable.
        upsampler: ``"direct"``: one sub-pixel convolution straight to the output (light); ``"staged"``: one
            sub-pixel convolution for each prime factor of the scale, then the output convolution (as published).
        global_skip: Add the bicubically enlarged input; the last convolution then starts at 0.

    Raises:
        ConfigurationError: A size is below 1, ``upsampler`` is unknown, or the skip joins different channel counts.

    Source: B. Lim et al., "Enhanced Deep Residual Networks for Single Image Super-Resolution", 2017.
    """

    def __init__(
        self,
        scale: int,
        in_channels: int = 3,
        out_channels: int = 3,
        num_features: int = 64,
        num_blocks: int = 16,
        residual_scale: float = 1.0,
        upsampler: str = "direct",
        global_skip: bool = True,  # noqa: FBT001, FBT002 - one switch of a model that is built by keywords
    ) -> None:
        super().__init__()
        require_sizes(
            in_channels=in_channels, out_channels=out_channels, num_features=num_features, num_blocks=num_blocks
        )
        require_skip_channels(global_skip, in_channels, out_channels)
        if upsampler not in ("direct", "staged"):
            raise ConfigurationError(
                f"`upsampler` must be 'direct' or 'staged', but is {upsampler!r}. "
                "Use 'staged' for the published models."
            )
        factors = prime_factors(scale)
        self.scale, self.in_channels, self.global_skip = int(scale), in_channels, global_skip
        self.head = nn.Conv2d(in_channels, num_features, 3, padding=1)
        blocks = [ResidualBlock(num_features, residual_scale) for _ in range(num_blocks)]
        self.body = nn.Sequential(*blocks, nn.Conv2d(num_features, num_features, 3, padding=1))
        if upsampler == "direct":
            last = nn.Conv2d(num_features, out_channels * self.scale**2, 3, padding=1)
            self.tail = nn.Sequential(last, nn.PixelShuffle(self.scale))
        else:
            last = nn.Conv2d(num_features, out_channels, 3, padding=1)
            stages: list[nn.Module] = []
            for factor in factors:
                stages += [nn.Conv2d(num_features, num_features * factor**2, 3, padding=1), nn.PixelShuffle(factor)]
            self.tail = nn.Sequential(*stages, last)
        if global_skip:
            zero_convolution(last)

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
        residual = cast("Tensor", self.tail(features + self.body(features)))
        return residual + bicubic_upscale(lr, self.scale) if self.global_skip else residual
