"""The training loops that a configuration can choose: entries of the group ``runner`` name these functions.

Each takes what the script has built, with optimizers and schedules by trainable part; a plain model is one part, ``model``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from srforge.training import (
    AdversarialTerm,
    ExponentialMovingAverage,
    GANRunner,
    Hook,
    Objective,
    RunnerOptions,
    Schedule,
    TrainingRunner,
)


def supervised(
    model: nn.Module,
    optimizers: Mapping[str, torch.optim.Optimizer],
    objective: Objective,
    *,
    schedules: Mapping[str, Schedule],
    ema: ExponentialMovingAverage | None,
    options: RunnerOptions,
) -> TrainingRunner:
    """Return the loop of a model that learns from its objective alone."""
    return TrainingRunner(model, optimizers["model"], objective, schedule=schedules["model"], ema=ema, options=options)


def adversarial(
    model: nn.Module,
    optimizers: Mapping[str, torch.optim.Optimizer],
    objective: Objective,
    *,
    schedules: Mapping[str, Schedule],
    ema: ExponentialMovingAverage | None,
    options: RunnerOptions,
    term: AdversarialTerm,
    hooks: Sequence[Hook] = (),
) -> GANRunner:
    """Return the loop of a generator and its discriminator; ``hooks`` are turns and penalties."""
    runner = GANRunner(model, optimizers, objective, adversarial=term, schedules=schedules, ema=ema, options=options)
    for hook in hooks:
        runner.hooks.attach(hook)
    return runner
