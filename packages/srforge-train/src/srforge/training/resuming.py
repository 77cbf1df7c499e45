"""Which checkpoint a launch continues: rank 0 chooses and reads it, every other rank receives it.

And what is said when the launch differs from the one that wrote it. What a checkpoint holds is in ``run_state``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from srforge.distributed import (
    SRForgeError,
    get_active_strategy,
    load_plain_state_dict,
    plain_state_dict,
    plan_of,
)
from srforge.training.checkpoint_files import CheckpointError
from srforge.training.checkpoint_record import read_record
from srforge.training.checkpoint_store import CheckpointStore
from srforge.training.protocols import Runner
from srforge.training.warm_start import WarmStart, warm_start

# What schedulers change in an optimizer's groups, and what they keep of their own course.
_SCHEDULED = {"lr", "momentum", "betas"}
_SCHEDULE_STATE = {"last_epoch", "best", "num_bad_epochs", "cooldown_counter", "T_cur", "T_i", "base_lrs", "lr_lambdas"}
_PLAN_FACTS = ("batch_size", "accumulate", "global_batch_size", "num_samples")


def read_checkpoint(store: CheckpointStore | None, source: str | Path) -> tuple[dict[str, Any] | None, str]:
    """Return the state to continue from, and the file's name; ``(None, "")`` if there is nothing to continue.

    Separate file systems work, and ranks cannot disagree. An error of rank 0 is raised on every rank.

    Args:
        store: Where the run keeps its checkpoints; None: only a path can be resumed.
        source: ``auto``, ``never`` or a path.

    Raises:
        CheckpointError: The checkpoint cannot be read.

    Collective: every rank must call.
    """
    strategy = get_active_strategy()
    answer: tuple[dict[str, Any] | None, str, str] = (None, "", "")
    if strategy.is_main:
        try:
            answer = (*_read(store, source), "")
        except SRForgeError as error:
            answer = (None, "", str(error))
    state, name, failure = strategy.broadcast_object(answer)
    if failure:
        raise CheckpointError(failure)
    return state, name


def settle_branch(store: CheckpointStore | None, source: str | Path, state: Mapping[str, Any] | None) -> list[str]:
    """Make what a launch continues the newest checkpoint of its folder, so that the next launch continues it too.

    ``never`` and a path may leave later epochs behind: another branch, which goes. A file of another folder is copied
    here. Call it once the state is known to fit, and before the history is cut.

    Args:
        store: Where the run keeps its checkpoints.
        source: As given to ``read_checkpoint``.
        state: What that returned.

    Returns:
        Names of the files that were removed.

    Raises:
        CheckpointError: The folder cannot be written; on every rank.

    Collective: every rank must call.
    """
    strategy = get_active_strategy()
    if store is None or str(source) == "auto":
        return []
    outcome: list[str] | str = []
    if strategy.is_main:
        try:
            outcome = _settle(store, source, state)
        except SRForgeError as error:
            outcome = str(error)
    outcome = strategy.broadcast_object(outcome)
    if isinstance(outcome, str):
        raise CheckpointError(outcome)
    return outcome


def launch_facts(loader: Any) -> dict[str, Any]:
    """Return what may differ between the launches of one run, as plain values.

    The number of workers is not among them: it changes nothing.
    """
    strategy, plan = get_active_strategy(), plan_of(loader)
    facts = {"world_size": strategy.world_size, "device": strategy.device.type, "torch": str(torch.__version__)}
    return {**facts, **{name: getattr(plan, name, None) for name in _PLAN_FACTS}}


def explain_changes(saved: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    """Return what is still exact, and what is not, in a launch that differs from the one before; empty if it does not.

    Args:
        saved: ``launch_facts`` of the launch that wrote the checkpoint; what is missing is taken as unchanged.
        current: Those of this launch.
    """
    changed = {name for name, value in current.items() if saved.get(name, value) != value}
    texts = []
    if "num_samples" in changed:
        texts.append(
            f"the data set has {current['num_samples']} samples instead of {saved['num_samples']}: their order is another"
        )
    if "global_batch_size" in changed:
        texts.append(
            f"a step takes {current['global_batch_size']} samples instead of {saved['global_batch_size']}: samples come in "
            "the same order with the same augmentation, but in other steps, and a schedule by step runs apart"
        )
    elif changed & {"world_size", "batch_size", "accumulate"}:
        sizes = ", ".join(f"{name} {saved[name]} -> {current[name]}" for name in current if name in changed)
        texts.append(
            f"{sizes}: every step has the same samples with the same augmentation; sums are rounded in another order, and "
            "dropout and BatchNorm, which work per rank, differ"
        )
    if changed & {"device", "torch"}:
        versions = ", ".join(
            f"{name} {saved[name]} -> {current[name]}" for name in ("device", "torch") if name in changed
        )
        texts.append(f"{versions}: kernels may round differently")
    return "; ".join(texts)


def explain_settings(state: Mapping[str, Any], runner: Runner) -> str:
    """Return which settings of optimizers and schedules a checkpoint brings that differ from the configured ones.

    Their ``load_state_dict`` takes the checkpoint's values, and says nothing. Call this before.

    Args:
        state: As ``read_checkpoint`` returned it.
        runner: As it is configured.
    """
    texts = []
    for name, optimizer in runner.optimizers.items():
        scheduler = runner.schedules[name].scheduler if name in runner.schedules else None
        moving = {"params", *(() if scheduler is None else _SCHEDULED)}
        groups = state.get("optimizers", {}).get(name, {}).get("param_groups", [])
        for index, (saved, now) in enumerate(zip(groups, optimizer.param_groups, strict=False)):
            texts += _differing(saved, now, moving, f"group {index} of {name}")
        if scheduler is not None:
            saved = state.get("schedules", {}).get(name, {})
            texts += _differing(saved, scheduler.state_dict(), _SCHEDULE_STATE, f"schedule of {name}")
    return "; ".join(texts)


def _differing(saved: Mapping[str, Any], now: Mapping[str, Any], moving: set[str], where: str) -> list[str]:
    shared = [key for key in now if key in saved and key not in moving and not str(key).startswith("_")]
    values = {key: (_text(saved[key]), _text(now[key])) for key in shared}
    return [f"{where} has {key} {old} instead of {new}" for key, (old, new) in values.items() if old != new]


def _text(value: Any) -> str:
    plain = value.tolist() if isinstance(value, torch.Tensor) else value
    if isinstance(plain, Mapping):  # a Counter of milestones comes back as a dict
        return str(dict(plain))
    return str(list(plain) if isinstance(plain, (tuple, list)) else plain)


def warm_start_model(model: nn.Module, path: str | Path, **options: Any) -> WarmStart:
    """Load weights that exist into a model, before training; rank 0 reads the file, the others receive.

    Args:
        model: As ``setup_device`` returned it.
        path: See ``warm_start``.
        **options: Those of ``warm_start``: ``prefixes``, ``strict``, ``parts``, ``nest``.

    Returns:
        The report.

    Raises:
        CheckpointError: The file cannot be read or does not fit; on every rank.

    Collective: every rank must call.
    """
    strategy = get_active_strategy()
    outcome: WarmStart | str = ""
    if strategy.is_main:
        try:
            tensors = {n: value for n, value in plain_state_dict(model).items() if isinstance(value, torch.Tensor)}
            outcome = warm_start(tensors, path, **options)
        except SRForgeError as error:
            outcome = str(error)
    outcome = strategy.broadcast_object(outcome)
    if isinstance(outcome, str):
        raise CheckpointError(outcome)
    load_plain_state_dict(model, {**plain_state_dict(model), **outcome.state})  # extra state stays as it is
    return outcome


def _settle(store: CheckpointStore, source: str | Path, state: Mapping[str, Any] | None) -> list[str]:
    store.remove_litter()
    if state is None:
        return store.rewind(0)
    if Path(source).resolve().parent == store.folder.resolve():
        return store.rewind(state["epoch"])
    record = read_record(Path(source).with_suffix(".json"))
    left = store.rewind(0)
    store.save(
        state,
        epoch=record.epoch,
        metrics=record.metrics,
        is_best=record.is_best,
        finished=record.finished,
        world_size=record.world_size,
    )
    return left


def _read(store: CheckpointStore | None, source: str | Path) -> tuple[dict[str, Any] | None, str]:
    if str(source) == "never":
        return None, ""
    if str(source) != "auto":
        if not Path(source).is_file():
            found = "a folder" if Path(source).is_dir() else "no file that exists"
            raise CheckpointError(
                f"What to resume must be `auto`, `never`, or the path of a checkpoint's .pt file, but {source} is {found}. "
                "Correct it, or leave it out."
            )
        folder = store if store is not None else CheckpointStore(Path(source).parent)
        return folder.load(Path(source)), str(source)
    if store is None:
        return None, ""
    store.remove_litter()
    newest = store.newest()
    return (None, "") if newest is None else (store.load(newest), newest.path.name)
