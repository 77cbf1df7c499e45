"""The dry steps at every launch: they settle the gradient buckets and check that the parts fit, and leave no trace."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from srforge.distributed import ConfigurationError, preserved_rng, rehearse
from srforge.training.batches import first_batch, to_device
from srforge.training.ema import bare_view
from srforge.training.objective import refuse_unusable
from srforge.training.protocols import Runner
from srforge.training.runners import ValidationRunner


def rehearse_training(runner: Runner, loader: Any) -> None:
    """Run two forward and backward passes on the first batch, without a step and without hooks.

    Raises:
        ConfigurationError: There is no batch, or no gradient flows from a weighted term.

    Collective: every rank must call.
    """
    with preserved_rng():
        data = first_batch(loader)
    if data is None:
        raise ConfigurationError("The training loader must yield at least one batch, but is empty.")

    runner.model.train()
    rehearse(runner.model, partial(runner.dry_step, data))


def rehearse_validation(runner: ValidationRunner, loader: Any) -> None:
    """Run one validation batch, so that a broken metric shows now and not after the first epoch."""
    with preserved_rng(), torch.no_grad():
        data = first_batch(loader)
        if data is None:  # this rank's shard is empty
            return
        model = bare_view(runner.model)
        was_training = model.training
        model.eval()
        batch = to_device(data, runner.device)
        with runner.precision.autocast():
            prediction = runner.forward_batch(model, batch)
        refuse_unusable(runner.metrics(prediction, batch))
        model.train(was_training)
