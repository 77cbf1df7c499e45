"""Hooks of adversarial training: whose turn it is, and what the discriminator is penalised for.

The ramp of the adversarial weight is no hook: give ``AdversarialTerm`` a ``LinearRamp`` as its weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from srforge.training.adversarial import per_sample
from srforge.training.contexts import GANStepContext
from srforge.training.hooks import Hook, hooks_into
from srforge.training.options import require_positive


class StepRatio(Hook):
    """Each part trains in every n-th step only; the global step counts all of them.

    Args:
        generator_every: The generator trains in the last of so many steps, >= 1.
        discriminator_every: The discriminator likewise.

    Raises:
        ConfigurationError: A number is below 1.
    """

    def __init__(self, generator_every: int = 1, discriminator_every: int = 1) -> None:
        require_positive("generator_every", generator_every)
        require_positive("discriminator_every", discriminator_every)
        self.generator_every = generator_every
        self.discriminator_every = discriminator_every

    @hooks_into("on_pre_step")
    def take_turns(self, context: GANStepContext) -> None:
        """Say whose turn it is."""
        number = context.global_step + 1
        context.trains_generator &= number % self.generator_every == 0
        context.trains_discriminator &= number % self.discriminator_every == 0


class DiscriminatorWarmup(Hook):
    """The generator begins alone, without the adversarial term; the discriminator joins later.

    Args:
        num_steps: Steps before it joins, > 0.

    Raises:
        ConfigurationError: ``num_steps`` is not above 0.
    """

    def __init__(self, num_steps: int) -> None:
        require_positive("num_steps", num_steps)
        self.num_steps = num_steps

    @hooks_into("on_pre_step")
    def hold_back(self, context: GANStepContext) -> None:
        """Leave the discriminator out until it joins."""
        if context.global_step < self.num_steps:
            context.trains_discriminator = False
            context.adversarial_weight = 0.0


class R1Penalty(Hook):
    """Half the squared gradient of the discriminator at real images, joined to its loss.

    It goes past the discriminator's wrapper and into its one backward pass: a third call through the wrapper would set
    the replicas apart. The slope is taken of each image's mean logit, in full precision.

    Args:
        weight: Factor of the penalty (gamma), > 0.
        interval: Add it in every so many steps only, multiplied by as much, >= 1.

    Raises:
        ConfigurationError: A number is outside its range.

    Source: L. Mescheder et al., "Which Training Methods for GANs do actually Converge?", 2018; the interval: T. Karras
    et al., "Analyzing and Improving the Image Quality of StyleGAN", 2020.
    """

    name = "r1"

    def __init__(self, weight: float = 10.0, interval: int = 1) -> None:
        require_positive("weight", weight)
        require_positive("interval", interval)
        self.weight = weight
        self.interval = interval

    @hooks_into("on_post_d_forward")
    def add_penalty(self, context: GANStepContext) -> None:
        """Add the penalty to what the discriminator minimises."""
        if context.global_step % self.interval != 0:
            return
        assert context.judge is not None
        assert context.discriminator_terms is not None
        images = self.images(context).detach()
        images = images.float() if images.dtype in (torch.float16, torch.bfloat16) else images.clone()
        with torch.autocast(images.device.type, enabled=False):
            logits = per_sample(context.judge(images.requires_grad_()))
            (slope,) = torch.autograd.grad(logits.sum(), images, create_graph=True)
        context.discriminator_terms.add(self.name, self.penalty(slope), self.weight * self.interval)

    def images(self, context: GANStepContext) -> Tensor:
        """Return the images at which the slope is taken, ``(N, ...)``."""
        real: Tensor = context.real
        return real

    def penalty(self, slope: Tensor) -> Tensor:
        """Return the penalty of each sample's slope, ``(N,)``."""
        return 0.5 * slope.flatten(1).square().sum(dim=1)


class R2Penalty(R1Penalty):
    """The same at generated images.

    Source: L. Mescheder et al., "Which Training Methods for GANs do actually Converge?", 2018.
    """

    name = "r2"

    def images(self, context: GANStepContext) -> Tensor:
        """Return the generated images."""
        prediction: Tensor = context.prediction
        return prediction


class GradientPenalty(R1Penalty):
    """Squared distance of the slope's norm from 1, at random points between a real and a generated image.

    Source: I. Gulrajani et al., "Improved Training of Wasserstein GANs", 2017.
    """

    name = "gradient_penalty"

    def images(self, context: GANStepContext) -> Tensor:
        """Return a point between each pair of images; the random numbers are seeded by epoch and rank."""
        real: Tensor = context.real
        share = torch.rand(real.shape[0], *(1,) * (real.ndim - 1), device=real.device, dtype=real.dtype)
        return torch.lerp(real, context.prediction.detach().to(real.dtype), share)

    def penalty(self, slope: Tensor) -> Tensor:
        """Return ``(|slope| - 1)^2``."""
        norms: Tensor = torch.linalg.vector_norm(slope.flatten(1), dim=1)
        return (norms - 1).square()
