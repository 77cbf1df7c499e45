"""What the generators share: factors of a scale, the channel check, and the zero start of the last convolution."""

from torch import Tensor, nn

from srforge.distributed.errors import ConfigurationError


def prime_factors(scale: int) -> list[int]:
    """Prime factors of an SR factor, smallest first: 4 gives [2, 2], 6 gives [2, 3], 1 gives [].

    Args:
        scale: SR factor, >= 1.

    Returns:
        Factors whose product is ``scale``.

    Raises:
        ConfigurationError: ``scale`` is no whole number >= 1.
    """
    if int(scale) != scale or scale < 1:
        raise ConfigurationError(f"`scale` must be a whole number of at least 1, but is {scale}. Use 2, 3 or 4.")
    factors, rest, candidate = [], int(scale), 2
    while rest > 1:
        while rest % candidate == 0:
            factors.append(candidate)
            rest //= candidate
        candidate += 1
    return factors


def require_sizes(**sizes: int) -> None:
    """Refuse sizes of a model that are below 1, by name.

    Args:
        sizes: Argument names and their values.

    Raises:
        ConfigurationError: One is below 1.
    """
    for name, size in sizes.items():
        if size < 1:
            raise ConfigurationError(f"`{name}` must be at least 1, but is {size}. Give the model a size.")


def require_skip_channels(global_skip: bool, in_channels: int, out_channels: int) -> None:  # noqa: FBT001 - one caller's value
    """Refuse a bicubic global skip between different numbers of channels.

    Args:
        global_skip: Whether the model adds the enlarged input to its output.
        in_channels: Channels of the LR image.
        out_channels: Channels of the SR image.

    Raises:
        ConfigurationError: The skip is on and the channels differ.
    """
    if global_skip and in_channels != out_channels:
        raise ConfigurationError(
            f"`global_skip` must be False where in_channels={in_channels} and out_channels={out_channels} differ, "
            "but is True. The input can only be added to an output of as many channels."
        )


def require_channels(images: Tensor, in_channels: int, *, name: str = "lr") -> None:
    """Refuse a batch with another number of channels than the model was built for.

    Args:
        images: ``(N, C, h, w)``.
        in_channels: Channels that the model takes.
        name: The argument's name, for the message.

    Raises:
        ConfigurationError: The batch is of another shape.
    """
    if images.ndim != 4 or images.shape[1] != in_channels:
        raise ConfigurationError(
            f"`{name}` must be (N, {in_channels}, h, w) for in_channels={in_channels}, but is {tuple(images.shape)}. "
            "Set `channels` of the data and `in_channels` of the model to the same number."
        )


def zero_convolution(convolution: nn.Conv2d) -> nn.Conv2d:
    """Set a convolution to 0, so that a residual branch that ends in it starts as nothing.

    Args:
        convolution: Changed in place.

    Returns:
        The same convolution.
    """
    nn.init.zeros_(convolution.weight)
    if convolution.bias is not None:
        nn.init.zeros_(convolution.bias)
    return convolution
