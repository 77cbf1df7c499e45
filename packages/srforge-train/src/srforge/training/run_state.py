"""Everything that shapes the future of a run, as one plain mapping: what a checkpoint holds."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from srforge.distributed import get_active_strategy, load_plain_state_dict, plain_state_dict
from srforge.training.checkpoint_files import CheckpointError
from srforge.training.hooks import HookPoints
from srforge.training.runners import TrainingRunner
from srforge.training.stopping import Standing

FORMAT = 1


def collect_state(
    runner: TrainingRunner, hooks: Mapping[str, HookPoints], standing: Standing, facts: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the state of a run at an epoch end.

    Weights and buffers are under the plain names of the bare model. No RNG state is in it: every epoch and every sample
    is seeded from (seed, epoch, rank or index).

    Args:
        runner: Its model, optimizer, schedule, scaler, average and step count are taken.
        hooks: Hook points by owner.
        standing: Best value so far.
        facts: Further plain values, such as ``epoch``, ``seed`` and ``stop_reason``.
    """
    return {
        "format": FORMAT,
        "model": plain_state_dict(runner.model),
        "optimizer": runner.optimizer.state_dict(),
        "parameter_groups": [len(group["params"]) for group in runner.optimizer.param_groups],
        "schedule": runner.schedule.state_dict(),
        "scaler": runner.precision.scaler.state_dict(),
        "ema": None if runner.ema is None else runner.ema.state_dict(),
        "hooks": {owner: points.state_dict() for owner, points in hooks.items()},
        "standing": asdict(standing),
        "global_step": runner.global_step,
        "world_size": get_active_strategy().world_size,
        "versions": {"torch": str(torch.__version__), "python": platform.python_version()},
        **facts,
    }


def restore_state(
    state: Mapping[str, Any], runner: TrainingRunner, hooks: Mapping[str, HookPoints], source: str
) -> Standing:
    """Give a run its state back, and return its standing.

    Raises:
        CheckpointError: The state has another format, or belongs to another model, optimizer or average.
    """
    if state.get("format") != FORMAT:
        raise CheckpointError(
            f"{source} must have checkpoint format {FORMAT}, but has {state.get('format')!r}. Resume it with the version "
            "that wrote it, or start over from its weights."
        )
    _refuse_other_model(state["model"], plain_state_dict(runner.model), source)
    groups = [len(group["params"]) for group in runner.optimizer.param_groups]
    if state["parameter_groups"] != groups:
        raise CheckpointError(
            f"{source} must hold an optimizer with parameter groups of sizes {groups}, but holds {state['parameter_groups']}. "
            "Resume with the optimizer that wrote it, or start over from its weights."
        )
    if (state["ema"] is None) != (runner.ema is None):
        raise CheckpointError(
            f"{source} was written {'without' if state['ema'] is None else 'with'} a moving average, and this run is "
            "the other way round. Configure `ema` as it was, or start over from its weights."
        )
    load_plain_state_dict(runner.model, state["model"])
    runner.optimizer.load_state_dict(state["optimizer"])
    runner.schedule.load_state_dict(state["schedule"])
    if state["scaler"]:
        runner.precision.scaler.load_state_dict(state["scaler"])
    if runner.ema is not None:
        runner.ema.load_state_dict(state["ema"])
    for owner, points in hooks.items():
        points.load_state_dict(state["hooks"].get(owner, {}))
    runner.global_step = state["global_step"]
    return Standing(**state["standing"])


def _refuse_other_model(saved: Mapping[str, Any], current: Mapping[str, Any], source: str) -> None:
    shapes = {name: tuple(value.shape) for name, value in current.items()}
    found = {name: tuple(value.shape) for name, value in saved.items()}
    if found == shapes:
        return
    missing = sorted(shapes.keys() - found.keys())
    unexpected = sorted(found.keys() - shapes.keys())
    reshaped = sorted(name for name in shapes.keys() & found.keys() if shapes[name] != found[name])
    raise CheckpointError(
        f"{source} must hold this run's model, but it lacks {missing}, has besides {unexpected}, and has other shapes for "
        f"{reshaped}. Resume with the model that wrote it, or load what fits by a warm start."
    )
