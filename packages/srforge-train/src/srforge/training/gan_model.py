"""The model of adversarial training: a composite of which one part judges what the others make."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from srforge.distributed import ConfigurationError, get_active_strategy

JUDGE = "discriminator"


class GANModel(nn.Module):
    """A generator and a discriminator that are trained in turn; its forward is the generator's.

    Any module with a ``trainable_modules()`` that names a ``discriminator`` serves as well.

    Args:
        generator: Makes images.
        discriminator: Returns logits ``(N, ...)`` of images.
    """

    def __init__(self, generator: nn.Module, discriminator: nn.Module) -> None:
        super().__init__()
        self.generator = generator
        self.discriminator = discriminator

    def trainable_modules(self) -> dict[str, nn.Module]:
        """Return the parts that are wrapped, each on its own."""
        return {"generator": self.generator, JUDGE: self.discriminator}

    def forward(self, *inputs: Any) -> Any:
        """Run the generator."""
        return self.generator(*inputs)


def discriminator_of(model: nn.Module) -> nn.Module:
    """Return the (wrapped) discriminator of a prepared composite.

    Raises:
        ConfigurationError: It has none, or nothing beside it.
    """
    parts = get_active_strategy().trainable_parts(model)
    if JUDGE not in parts or len(parts) < 2:
        raise ConfigurationError(
            f"`{type(model).__name__}.trainable_modules()` must name a {JUDGE} and what it judges, but names "
            f"{sorted(filter(None, parts)) or 'nothing'}. Use GANModel(generator, discriminator)."
        )
    return parts[JUDGE]


def refuse_wrong_shares(parameters: Mapping[str, list[nn.Parameter]], discriminator: nn.Module) -> None:
    """Refuse optimizers of which one would step parameters of the other side.

    Args:
        parameters: Of each optimizer, by its name.
        discriminator: The bare one.

    Raises:
        ConfigurationError: A name is missing, or an optimizer has parameters of both sides.
    """
    if JUDGE not in parameters or "generator" not in parameters:
        raise ConfigurationError(
            f"`optimizers` must be named generator, discriminator and so on, but are {sorted(parameters)}."
        )
    judging = {id(parameter) for parameter in discriminator.parameters()}
    for name, own in parameters.items():
        if any((id(parameter) in judging) != (name == JUDGE) for parameter in own):
            whose = "the discriminator's parameters only" if name == JUDGE else "no parameter of the discriminator"
            raise ConfigurationError(
                f"`optimizers[{name!r}]` must have {whose}, but has others. Build it from the prepared part."
            )
