"""What one rank of the kill matrix trains: the network, the loops around it, and where they may die.

Dropout, BatchNorm, spectral norm, random augmentation from three generators, accumulation, a short last batch, a schedule
by step, an average, early stopping, a stateful hook and a history; or two networks against each other, with a gradient
penalty every second step.
"""

import os
import random
import time
from typing import Any

import numpy as np
import torch
from torch import nn

import srforge
from kill_points import KillPoints, PassingBy
from kill_program import BEST_EPOCH, GLOBAL_BATCH, MOST_EPOCHS, NUM_EPOCHS, PATIENCE, SEED, Images
from srforge.data import DataLoaderFactory
from srforge.distributed import get_active_strategy, setup_device
from srforge.tracking import LocalTracker
from srforge.training import (
    AdversarialTerm,
    CheckpointStore,
    ExponentialMovingAverage,
    GANModel,
    GANRunner,
    Hinge,
    Hook,
    LossLogger,
    Metrics,
    MetricsLogger,
    Objective,
    R1Penalty,
    RunnerOptions,
    Schedule,
    Trainer,
    TrainerOptions,
    TrainingRunner,
    ValidationRunner,
    hooks_into,
    warmup_cosine,
)

NUM_SAMPLES, NUM_VALIDATION = 29, 6


class Network(nn.Module):
    """A few convolutions with BatchNorm, dropout and spectral norm."""

    def __init__(self, num_inputs: int = 3) -> None:
        super().__init__()
        self.head = nn.Conv2d(num_inputs, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.body = torch.nn.utils.parametrizations.spectral_norm(nn.Conv2d(6, 6, 3, padding=1))
        self.dropout = nn.Dropout2d(0.3)
        self.tail = nn.Conv2d(6, 1, 3, padding=1)

    def forward(self, lr: torch.Tensor) -> torch.Tensor:
        features = torch.relu(self.norm(self.head(lr)))
        return self.tail(self.dropout(torch.relu(self.body(features))))


def squared(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean squared difference, per sample."""
    return (prediction - target).square().mean(dim=(1, 2, 3))


class Worsening(Hook):
    """Makes one epoch the best, and those after it worse and worse."""

    @hooks_into("on_post_forward")
    def worsen(self, context: Any) -> None:
        context.terms["l2"] = context.terms["l2"] * 0.01 + float(abs(context.epoch - BEST_EPOCH))


class Pausing(Hook):
    """Makes a step long enough to be hit."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    @hooks_into("on_pre_step")
    def pause(self, context: Any) -> None:
        time.sleep(self.seconds)


def make_runner(case: dict[str, Any], model: nn.Module, points: KillPoints) -> Any:
    """Return the training loop, its points of death attached."""
    deterministic = get_active_strategy().device.type == "cuda"
    options, objective = RunnerOptions(max_norm=1.0, deterministic=deterministic), Objective({"l2": squared})
    parts = get_active_strategy().trainable_parts(model)
    optimizers = {name: torch.optim.AdamW(part.parameters(), lr=0.01) for name, part in parts.items()}
    schedules = {
        name: Schedule(warmup_cosine(optimizer, total_steps=4 * NUM_EPOCHS), "step")
        for name, optimizer in optimizers.items()
    }
    for schedule in schedules.values():
        schedule.after_epoch = points.before("scheduler", schedule.after_epoch)
    ema = ExponentialMovingAverage(model, 0.9)
    runner: Any
    if case["gan"]:
        term = AdversarialTerm(criterion=Hinge(), weight=0.1)
        runner = GANRunner(
            model, optimizers, objective, adversarial=term, schedules=schedules, ema=ema, options=options
        )
        runner.hooks.attach(R1Penalty(1.0, interval=2))
    else:
        runner = TrainingRunner(model, optimizers[""], objective, schedule=schedules[""], ema=ema, options=options)
    for hook in (PassingBy(points, "training"), Pausing(case["pause"])):
        runner.hooks.attach(hook)
    return runner


def train(case: dict[str, Any], target: dict[str, Any] | None) -> None:
    """Run one rank of one launch; the environment says which.

    Args:
        case: ``folder``, ``notes``, ``workers``, ``persistent``, ``accumulate``, ``gan``, ``pause`` (seconds a step),
            ``device``.
        target: Where to die; see ``KillPoints``.
    """
    points = KillPoints(case["notes"], int(os.environ.get("RANK", "0")), target)
    points.reach("start-up")
    if case["workers"]:
        srforge.init()
    torch.manual_seed(SEED)
    network = GANModel(Network(), Network(1)) if case["gan"] else Network()
    model, _ = setup_device(network, case["device"], options={"backend": "gloo"})
    random.seed(os.getpid())  # every launch goes on from another random state
    np.random.seed(os.getpid())  # noqa: NPY002  # as above
    torch.manual_seed(os.getpid())
    points.install()

    runner = make_runner(case, model, points)
    validator = ValidationRunner(model, Metrics({"l2": squared}), ema=runner.ema)
    for hook in (PassingBy(points, "validation"), Worsening()):
        validator.hooks.attach(hook)
    loading: dict[str, Any] = {"num_workers": case["workers"], "seed": SEED}
    if case["workers"]:
        loading["persistent_workers"] = case["persistent"]
    batch_size = GLOBAL_BATCH // get_active_strategy().world_size // case["accumulate"]
    tracker = LocalTracker(case["folder"], run_id="run")
    trainer = Trainer(
        runner,
        validator,
        seed=SEED,
        checkpoints=CheckpointStore(f"{case['folder']}/checkpoints"),
        tracker=tracker,
        hooks=[LossLogger(show_replicas=True), MetricsLogger(tracker)],
        options=TrainerOptions(monitor="validation/l2", mode="min", patience=PATIENCE),
    )
    trainer.resume("auto")
    train_set, val_set = Images(NUM_SAMPLES, augment=True), Images(NUM_VALIDATION, augment=False)
    result = trainer.train(
        MOST_EPOCHS,
        DataLoaderFactory(
            train_set, batch_size, shuffle=True, accumulate=case["accumulate"], filler=2, **loading
        ).get_loader(),
        DataLoaderFactory(val_set, 1, shuffle=False, **loading).get_loader(),
    )
    assert result.stop_reason == "patience", result
