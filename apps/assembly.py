"""The parts of a training run, each built from its section of the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.utils.data import DataLoader

from building import BatchSizes, build
from srforge.data import DataLoaderFactory
from srforge.distributed import ConfigurationError, get_active_strategy, plan_of, refuse_fsdp, seed_epoch
from srforge.training import (
    ExponentialMovingAverage,
    RunnerOptions,
    Schedule,
    TrainerOptions,
    ValidationRunner,
)
from srforge.training.protocols import Runner
from validation import TiledValidationRunner

_RUNNER_KEYS = ("precision", "channels_last", "compile", "deterministic", "max_norm", "non_finite")
_TRAINER_KEYS = (
    "monitor",
    "mode",
    "patience",
    "validate_every",
    "max_steps",
    "max_minutes",
    "main_work_timeout_minutes",
)


def distributed_options(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of ``DistributedOptions``; the strategy may also be named a level or two higher up.

    Raises:
        ConfigurationError: FSDP is asked for.
    """
    refuse_fsdp(settings)
    options, shorthand = settings["system"]["distributed"], settings["system"]["strategy"] or settings["strategy"]
    return {**options, "strategy": shorthand} if shorthand and options["strategy"] == "auto" else options


def seed_first_weights(settings: Mapping[str, Any]) -> None:
    """Seed this process alike on every rank, for the model's first weights; without a seed they are rank 0's own."""
    if settings["run"]["seed"] is not None:
        seed_epoch(settings["run"]["seed"], 0, 0)


def make_model(config: DictConfig, settings: Mapping[str, Any]) -> nn.Module:
    """Return the bare model, in the memory format it keeps: gradient buckets are laid out when it is wrapped."""
    model: nn.Module = build(config.model)
    return model.to(memory_format=torch.channels_last) if settings["training"]["channels_last"] else model  # type: ignore[call-overload]


def make_loader(
    dataset: Any,
    settings: Mapping[str, Any],
    sizes: BatchSizes,
    seed: int,
    device: torch.device,
    *,
    training: bool,
) -> DataLoader[Any] | None:
    """Return this rank's loader of a data set; None without one."""
    if dataset is None:
        return None
    loading = {"num_workers": settings["system"]["num_workers"], "seed": seed, "device": device, "training": training}
    if not training:
        batch_size = settings["training"]["validation_batch_size"]
        return DataLoaderFactory(dataset, batch_size, shuffle=False, **loading).get_loader()
    plan = {name: settings["training"][name] for name in ("tail", "steps_per_epoch")}
    plan["accumulate"] = sizes.accumulate
    return DataLoaderFactory(dataset, sizes.per_rank, shuffle=True, **plan, **loading).get_loader()


def num_steps_of(train_loader: DataLoader[Any] | None, training: Mapping[str, Any]) -> int:
    """Return the optimizer steps of the whole run.

    Raises:
        ConfigurationError: The run is to have no epoch.
    """
    plan, epochs, limit = plan_of(train_loader), int(training["epochs"]), training["max_steps"]
    assert plan is not None  # the data sets of this script have a length
    if epochs < 1:
        raise ConfigurationError(f"`training.epochs` must be at least 1, but is {epochs}.")
    num_steps = int(plan.num_steps * epochs)
    return num_steps if limit is None or limit < 1 else min(int(limit), num_steps)


def make_runners(
    config: DictConfig, settings: Mapping[str, Any], model: nn.Module, train_loader: DataLoader[Any] | None
) -> tuple[Runner, ValidationRunner]:
    """Return the loops of training and validation over a prepared model."""
    training = settings["training"]
    options = RunnerOptions(**{name: training[name] for name in _RUNNER_KEYS})
    optimizers = make_optimizers(config, model)
    num_steps = num_steps_of(train_loader, training)
    schedules = {name: make_schedule(config.scheduler, optimizer, num_steps) for name, optimizer in optimizers.items()}
    ema = None if training["ema_decay"] is None else ExponentialMovingAverage(model, training["ema_decay"])
    make_runner = build(config.runner)
    runner = make_runner(model, optimizers, build(config.objective), schedules=schedules, ema=ema, options=options)
    upscale = build(config.data.baseline)
    baseline = None if upscale is None else lambda batch: upscale(batch["lr"])
    validator = TiledValidationRunner(model, build(config.metrics), ema=ema, baseline=baseline, options=options)
    validator.tile = training["validation_tile"]
    return runner, validator


def make_optimizers(config: DictConfig, model: nn.Module) -> dict[str, torch.optim.Optimizer]:
    """Return an optimizer for each trainable part, ``model`` for a plain one; ``parts.NAME`` has values of its own."""
    optimizers = {}
    for name, part in get_active_strategy().trainable_parts(model).items():
        own = config.parts.get(name) or {}
        optimizers[name or "model"] = build(config.optimizer, **own)([p for p in part.parameters() if p.requires_grad])
    return optimizers


def make_schedule(node: DictConfig, optimizer: torch.optim.Optimizer, num_steps: int) -> Schedule:
    """Return the learning-rate schedule; a factory's ``total_steps`` is filled in."""
    if node.factory is None:
        return Schedule()
    filled = {"total_steps": num_steps} if "total_steps" in node.factory else {}
    return Schedule(build(node.factory, **filled)(optimizer), node.interval, node.monitor)


def trainer_options(config: DictConfig, settings: Mapping[str, Any], folder: Path) -> TrainerOptions:
    """Return when to validate and when to stop; a file named ``stop`` in the run's folder ends it at an epoch's end."""
    limits = {name: settings["training"][name] for name in _TRAINER_KEYS}
    return TrainerOptions(config_text=OmegaConf.to_yaml(config), stop_file=folder / "stop", **limits)
