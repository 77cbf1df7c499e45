"""Adversarial criteria: what generator and discriminator learn from the discriminator's logits.

``real`` and ``fake`` are logits of shape ``(N, ...)`` without a sigmoid; each criterion returns one value a sample, shape
``(N,)``: the mean over all other dimensions. Which images are judged when, and through which module, is in ``gan``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from srforge.distributed import ConfigurationError, get_active_strategy
from srforge.training.objective import Weight


class AdversarialCriterion(ABC):
    """A pair of losses over logits.

    Attributes:
        compares: The generator's loss looks at real images too.
    """

    compares: bool = False

    @abstractmethod
    def generator_loss(self, real: Tensor | None, fake: Tensor, count: int) -> Tensor:
        """Return what the generator minimises, shape ``(N,)``.

        Args:
            real: Logits of real images, without gradient; None unless the criterion ``compares``.
            fake: Logits of generated images.
            count: Real samples of this rank in the batch; 0 if it only repeats samples of another rank.
        """

    @abstractmethod
    def discriminator_loss(self, real: Tensor, fake: Tensor, count: int) -> Tensor:
        """Return what the discriminator minimises, shape ``(N,)``; arguments as for ``generator_loss``."""


class Vanilla(AdversarialCriterion):
    """Cross entropy, with the generator's loss that does not saturate.

    Args:
        smoothing: One-sided label smoothing: the label of real images is ``1 - smoothing``, in [0, 1).

    Raises:
        ConfigurationError: ``smoothing`` is outside its range.

    Source: I. Goodfellow et al., "Generative Adversarial Nets", 2014; smoothing: T. Salimans et al., "Improved
    Techniques for Training GANs", 2016.
    """

    def __init__(self, smoothing: float = 0.0) -> None:
        self.label = _label(smoothing)

    def generator_loss(self, real: Tensor | None, fake: Tensor, count: int) -> Tensor:  # noqa: ARG002  # the interface
        """Return ``-log sigmoid(fake)``."""
        return per_sample(functional.softplus(-fake))

    def discriminator_loss(self, real: Tensor, fake: Tensor, count: int) -> Tensor:  # noqa: ARG002  # the interface
        """Return ``-log sigmoid(real) - log(1 - sigmoid(fake))``."""
        return per_sample(_cross_entropy(real, self.label)) + per_sample(functional.softplus(fake))


class LeastSquares(AdversarialCriterion):
    """Half the squared distances to the labels 1 and 0.

    Args:
        smoothing: The label of real images is ``1 - smoothing`` for the discriminator, in [0, 1).

    Raises:
        ConfigurationError: ``smoothing`` is outside its range.

    Source: X. Mao et al., "Least Squares Generative Adversarial Networks", 2017.
    """

    def __init__(self, smoothing: float = 0.0) -> None:
        self.label = _label(smoothing)

    def generator_loss(self, real: Tensor | None, fake: Tensor, count: int) -> Tensor:  # noqa: ARG002  # the interface
        """Return ``(fake - 1)^2 / 2``."""
        return 0.5 * per_sample((fake - 1).square())

    def discriminator_loss(self, real: Tensor, fake: Tensor, count: int) -> Tensor:  # noqa: ARG002  # the interface
        """Return ``(real - 1)^2 / 2 + fake^2 / 2``."""
        return 0.5 * (per_sample((real - self.label).square()) + per_sample(fake.square()))


class Hinge(AdversarialCriterion):
    """Margins of 1 for the discriminator, the bare logit for the generator.

    Source: J. H. Lim, J. C. Ye, "Geometric GAN", 2017.
    """

    def generator_loss(self, real: Tensor | None, fake: Tensor, count: int) -> Tensor:  # noqa: ARG002  # the interface
        """Return ``-fake``."""
        return -per_sample(fake)

    def discriminator_loss(self, real: Tensor, fake: Tensor, count: int) -> Tensor:  # noqa: ARG002  # the interface
        """Return ``max(0, 1 - real) + max(0, 1 + fake)``."""
        return per_sample(functional.relu(1 - real)) + per_sample(functional.relu(1 + fake))


class Wasserstein(AdversarialCriterion):
    """Difference of the logits; it needs a critic that is held 1-Lipschitz, as by ``GradientPenalty``.

    Source: M. Arjovsky et al., "Wasserstein GAN", 2017.
    """

    def generator_loss(self, real: Tensor | None, fake: Tensor, count: int) -> Tensor:  # noqa: ARG002  # the interface
        """Return ``-fake``."""
        return -per_sample(fake)

    def discriminator_loss(self, real: Tensor, fake: Tensor, count: int) -> Tensor:  # noqa: ARG002  # the interface
        """Return ``fake - real``."""
        return per_sample(fake) - per_sample(real)


class Relativistic(AdversarialCriterion):
    """Cross entropy of the difference of a real and a generated image, pair by pair.

    Source: A. Jolicoeur-Martineau, "The Relativistic Discriminator: a Key Element Missing from Standard GAN", 2018.
    """

    compares = True

    def generator_loss(self, real: Tensor | None, fake: Tensor, count: int) -> Tensor:  # noqa: ARG002  # the interface
        """Return ``-log sigmoid(fake - real)``."""
        assert real is not None
        return per_sample(functional.softplus(real - fake))

    def discriminator_loss(self, real: Tensor, fake: Tensor, count: int) -> Tensor:  # noqa: ARG002  # the interface
        """Return ``-log sigmoid(real - fake)``."""
        return per_sample(functional.softplus(fake - real))


class RelativisticAverage(AdversarialCriterion):
    """Cross entropy of each logit minus the mean of the other kind, the mean being that of the whole fleet.

    Args:
        smoothing: One-sided label smoothing of the discriminator's real images, in [0, 1).

    Raises:
        ConfigurationError: ``smoothing`` is outside its range.

    Collective: every rank must compute the losses, and their backward passes, in the same order.

    Source: A. Jolicoeur-Martineau, "The Relativistic Discriminator: a Key Element Missing from Standard GAN", 2018.
    """

    compares = True

    def __init__(self, smoothing: float = 0.0) -> None:
        self.label = _label(smoothing)

    def generator_loss(self, real: Tensor | None, fake: Tensor, count: int) -> Tensor:
        """Return ``-log(1 - sigmoid(real - mean(fake))) - log sigmoid(fake - mean(real))``."""
        assert real is not None
        mean_real, mean_fake = fleet_means([real, fake], count)
        return per_sample(functional.softplus(real - mean_fake)) + per_sample(functional.softplus(mean_real - fake))

    def discriminator_loss(self, real: Tensor, fake: Tensor, count: int) -> Tensor:
        """Return ``-log sigmoid(real - mean(fake)) - log(1 - sigmoid(fake - mean(real)))``."""
        mean_real, mean_fake = fleet_means([real, fake], count)
        return per_sample(_cross_entropy(real - mean_fake, self.label)) + per_sample(
            functional.softplus(fake - mean_real)
        )


@dataclass(frozen=True, kw_only=True)
class AdversarialTerm:
    """The adversarial part of a training.

    Args:
        criterion: The pair of losses.
        weight: Factor of the generator's adversarial loss: a number, or a function of the epoch (``LinearRamp``). With 0
            the generator's step leaves the discriminator out.
        real: Entry of the batch that holds real images.
    """

    criterion: AdversarialCriterion
    weight: Weight = 1.0
    real: str = "hr"

    def weight_at(self, epoch: int) -> float:
        """Return the weight in the given epoch (0-based)."""
        return float(self.weight(epoch)) if callable(self.weight) else float(self.weight)


def per_sample(values: Tensor) -> Tensor:
    """Return the mean over all but the first dimension, shape ``(N,)``."""
    return values if values.ndim == 1 else values.flatten(1).mean(dim=1)


def fleet_means(logits: list[Tensor], count: int) -> list[Tensor]:
    """Return the mean of each tensor over the samples of all ranks; gradients flow to every rank's samples.

    Args:
        logits: Shapes ``(N, ...)``, the same on every rank but for N.
        count: Real samples of this rank in the batch: with 0 its rows only repeat those of another rank.

    Returns:
        A mean of shape ``()`` for each, the same on every rank.

    Collective: every rank must call, and so must its backward pass: a sum each.
    """
    means = torch.stack([per_sample(tensor).mean() for tensor in logits])
    if get_active_strategy().world_size == 1:
        return list(means.unbind())
    # Filled on the device: a tensor made from a number on the host would wait for the device.
    totals: Tensor = _FleetSum.apply(torch.cat([means * count, torch.full_like(means[:1], count)]))  # type: ignore[no-untyped-call]
    return list((totals[:-1] / totals[-1]).unbind())


class _FleetSum(torch.autograd.Function):
    """Sum over ranks, in rank order: the same bits everywhere. What every rank's loss says of the sum is summed too."""

    @staticmethod
    def forward(context: Any, local: Tensor) -> Tensor:  # noqa: ARG004  # torch's signature
        """Return the sum of all ranks' vectors."""
        return get_active_strategy().all_gather(local).sum(dim=0)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:  # noqa: ARG004  # torch's signature
        """Return the sum of all ranks' gradients."""
        return get_active_strategy().all_gather(gradients[0]).sum(dim=0)


def _label(smoothing: float) -> float:
    if not 0 <= smoothing < 1:
        raise ConfigurationError(f"`smoothing` must be in [0, 1), but is {smoothing}. Use for example 0.1.")
    return 1.0 - smoothing


def _cross_entropy(logits: Tensor, label: float) -> Tensor:
    """Return ``-label * log sigmoid(x) - (1 - label) * log(1 - sigmoid(x))`` for each logit x."""
    return functional.softplus(logits) - label * logits
