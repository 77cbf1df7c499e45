"""Everything that shapes the future of a run, as one plain mapping: what a checkpoint holds."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from srforge.distributed import load_plain_state_dict, plain_state_dict
from srforge.training.checkpoint_files import CheckpointError
from srforge.training.ema import bare_view
from srforge.training.hooks import HookPoints
from srforge.training.protocols import Runner
from srforge.training.stopping import Standing

FORMAT = 2


def collect_state(
    runner: Runner, hooks: Mapping[str, HookPoints], standing: Standing, facts: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the state of a run at an epoch end.

    Weights and buffers are under the plain names of the bare model. No RNG state is in it: every epoch and every sample
    is seeded from (seed, epoch, rank or index).

    Args:
        runner: Its model, optimizers, schedules, scalers, average and step count are taken.
        hooks: Hook points by owner.
        standing: Best value so far.
        facts: Further plain values, such as ``epoch``, ``seed`` and ``stop_reason``.
    """
    return {
        "format": FORMAT,
        "model": plain_state_dict(runner.model),
        "optimizers": {name: optimizer.state_dict() for name, optimizer in runner.optimizers.items()},
        "parameter_groups": _parameter_groups(runner),
        "classes": _classes(runner),
        "schedules": {name: schedule.state_dict() for name, schedule in runner.schedules.items()},
        "scalers": {name: scaler.state_dict() for name, scaler in runner.scalers.items()},
        "ema": None if runner.ema is None else runner.ema.state_dict(),
        "hooks": {owner: points.state_dict() for owner, points in hooks.items()},
        "standing": asdict(standing),
        "global_step": runner.global_step,
        "versions": {"torch": str(torch.__version__), "python": platform.python_version()},
        **facts,
    }


def restore_state(state: Mapping[str, Any], runner: Runner, hooks: Mapping[str, HookPoints], source: str) -> Standing:
    """Give a run its state back, and return its standing. Nothing is changed before everything was found to fit.

    Args:
        state: As ``collect_state`` returned it, here or in an earlier version.
        runner: Takes model, optimizer, schedule, scaler, average and step count.
        hooks: Hook points by owner.
        source: Name of the checkpoint, for messages.

    Raises:
        CheckpointError: The state has a format that cannot be read, or belongs to another model, optimizer, schedule or
            average.
    """
    state = _migrate(state, source)
    _refuse_other_model(state["model"], plain_state_dict(runner.model), source)
    _refuse_other_optimizers(state, runner, source)
    if (state["ema"] is None) != (runner.ema is None):
        raise CheckpointError(
            f"{source} was written {'without' if state['ema'] is None else 'with'} a moving average, and this run is "
            "the other way round. Configure `ema` as it was, or start over from its weights."
        )
    load_plain_state_dict(runner.model, state["model"])
    for name, optimizer in runner.optimizers.items():
        optimizer.load_state_dict(state["optimizers"][name])
    for name, schedule in runner.schedules.items():
        schedule.load_state_dict(state["schedules"][name])
    for name, scaler in runner.scalers.items():
        if state["scalers"].get(name):
            scaler.load_state_dict(state["scalers"][name])
    if runner.ema is not None:
        runner.ema.load_state_dict(state["ema"])
    for owner, points in hooks.items():
        points.load_state_dict(state["hooks"].get(owner, {}))
    runner.global_step = state["global_step"]
    return Standing(**state["standing"])


def _migrate(state: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """Return the state in today's format."""
    found = state.get("format")
    if found == FORMAT:
        return state
    if found == 1:  # had one optimizer, knew the sizes of its parameter groups only, and kept no classes
        launch = {"world_size": state["world_size"], "torch": state["versions"]["torch"]}
        only = {f"{kind}s": {"model": state[kind]} for kind in ("optimizer", "schedule", "scaler")}
        groups = {"model": state["parameter_groups"]}
        return {**state, **only, "parameter_groups": groups, "classes": None, "launch": launch, "format": FORMAT}
    raise CheckpointError(
        f"{source} must have a checkpoint format of 1 to {FORMAT}, but has {found!r}. Resume it with the version that wrote "
        "it, or start over from its weights."
    )


def _refuse_other_model(saved: Mapping[str, Any], current: Mapping[str, Any], source: str) -> None:
    kinds = {name: _kind(name, value) for name, value in current.items()}
    found = {name: _kind(name, value) for name, value in saved.items()}
    if found == kinds:
        return
    missing = sorted(kinds.keys() - found.keys())
    unexpected = sorted(found.keys() - kinds.keys())
    reshaped = sorted(name for name in kinds.keys() & found.keys() if kinds[name] != found[name])
    raise CheckpointError(
        f"{source} must hold this run's model, but it lacks {missing}, has besides {unexpected}, and has other shapes or "
        f"dtypes for {reshaped}. Resume with the model that wrote it, or load what fits by a warm start."
    )


def _kind(name: str, value: Any) -> Any:
    """Return what must agree of an entry of the model's state; a module's extra state is its own business."""
    return "extra state" if name.endswith("_extra_state") else (tuple(value.shape), value.dtype)


def _refuse_other_optimizers(state: Mapping[str, Any], runner: Runner, source: str) -> None:
    """An optimizer's state knows parameters by position only: names and classes are compared before it is taken."""
    cure = "Resume with what wrote it, or start over from its weights."
    classes = _classes(runner)
    if state["classes"] not in (None, classes):
        raise CheckpointError(f"{source} must hold states of {classes}, but holds those of {state['classes']}. {cure}")
    found: Mapping[str, list[Any]] = state["parameter_groups"]
    groups: dict[str, list[Any]] = {**_parameter_groups(runner)}
    if state["classes"] is None:
        groups = {name: [len(group) for group in parts] for name, parts in groups.items()}
    if found != groups:
        raise CheckpointError(
            f"{source} must hold optimizers of this run's parameter groups, but: {_differing(found, groups)}. {cure}"
        )


def _differing(found: Mapping[str, list[Any]], expected: Mapping[str, list[Any]]) -> str:
    if found.keys() != expected.keys():
        return f"there are optimizers for {sorted(found)} instead of {sorted(expected)}"
    texts = []
    for name, groups in expected.items():
        if len(found[name]) != len(groups):
            texts.append(f"{name} has {len(found[name])} groups instead of {len(groups)}")
        for index, (saved, current) in enumerate(zip(found[name], groups, strict=False)):
            if saved != current:
                texts.append(f"group {index} of {name} has {saved} instead of {current}")
    return "; ".join(texts)


def _parameter_groups(runner: Runner) -> dict[str, list[list[str]]]:
    """Return the names of the parameters in each group of each optimizer, in its order."""
    names = {id(parameter): name for name, parameter in bare_view(runner.model).named_parameters()}
    return {
        name: [[names.get(id(p), "outside the model") for p in group["params"]] for group in optimizer.param_groups]
        for name, optimizer in runner.optimizers.items()
    }


def _classes(runner: Runner) -> dict[str, str | None]:
    """Return the class of each optimizer and of its scheduler."""
    parts: dict[str, Any] = {f"optimizer of {name}": part for name, part in runner.optimizers.items()}
    parts |= {f"schedule of {name}": part.scheduler for name, part in runner.schedules.items()}
    return {
        name: None if part is None else f"{type(part).__module__}.{type(part).__qualname__}"
        for name, part in parts.items()
    }
