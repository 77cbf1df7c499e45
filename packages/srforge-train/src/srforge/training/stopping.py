"""Which epoch is best, when training ends and how: one pure decision an epoch, taken from reduced values."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from srforge.distributed import ConfigurationError, get_active_strategy
from srforge.training.objective import OWN_NAMES
from srforge.training.options import TrainerOptions
from srforge.training.protocols import Runner
from srforge.training.runners import TrainingRunner, ValidationRunner
from srforge.training.schedules import monitored_value


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """How a run ended.

    Attributes:
        epochs: Epochs that are finished.
        global_step: Optimizer steps taken.
        metrics: Reduced metrics of the last epoch by section.
        baseline: Reduced metrics of the baseline prediction; empty without one.
        best_value: Best monitored value; None without a monitor.
        best_epoch: Its epoch, 0-based.
        stop_reason: Why training ended.
    """

    epochs: int
    global_step: int
    metrics: Mapping[str, Any] = field(default_factory=dict)
    baseline: Mapping[str, Any] = field(default_factory=dict)
    best_value: float | None = None
    best_epoch: int | None = None
    stop_reason: str | None = None


@dataclass(slots=True)
class Standing:
    """The best value so far, and for how many validated epochs it has stood.

    Attributes:
        best_value: None before the first validated epoch.
        best_epoch: Its epoch.
        num_without_improvement: Validated epochs since then.
    """

    best_value: float | None = None
    best_epoch: int | None = None
    num_without_improvement: int = 0

    def take(self, epoch: int, metrics: Mapping[str, float], options: TrainerOptions) -> bool:
        """Take in one epoch's metrics, and return whether it is the best one. NaN is never the best.

        Raises:
            ConfigurationError: The monitored metric was not reported though the epoch was validated.
        """
        value = monitored_value(options.monitor, metrics)
        if value is None:
            return False
        if not math.isnan(value) and (
            self.best_value is None or (value > self.best_value if options.mode == "max" else value < self.best_value)
        ):
            self.best_value, self.best_epoch, self.num_without_improvement = value, epoch, 0
            return True
        self.num_without_improvement += 1
        return False


def stop_reason(
    options: TrainerOptions, standing: Standing, *, epochs_left: int, global_step: int, minutes: float
) -> str | None:
    """Return why training ends at this epoch end, or None.

    Args:
        options: The limits.
        standing: After this epoch was taken in.
        epochs_left: Epochs still to run.
        global_step: Optimizer steps taken.
        minutes: Since this launch began to train, on the rank that decides.
    """
    if epochs_left <= 0:
        return "epochs"
    if options.max_steps is not None and global_step >= options.max_steps:
        return "max_steps"
    if options.patience is not None and standing.num_without_improvement >= options.patience:
        return "patience"
    if options.max_minutes is not None and minutes >= options.max_minutes:
        return "max_minutes"
    if options.stop_file is not None and options.stop_file.exists():
        return "stop_file"
    return None


def is_over(options: TrainerOptions, standing: Standing, epochs_left: int, global_step: int) -> bool:
    """Whether a run that is found at an epoch end has reached a limit of its own.

    The limits of one launch, its minutes and the stop file, say nothing about the next.
    """
    whole = replace(options, max_minutes=None, stop_file=None)
    return stop_reason(whole, standing, epochs_left=epochs_left, global_step=global_step, minutes=0.0) is not None


def describe_cut(epoch: int, num_steps: int, limit: int | None, plan: Any) -> str:
    """Return what an epoch left out because ``max_steps`` ended it inside; empty if it was whole.

    Args:
        epoch: 0-based.
        num_steps: Optimizer steps it took.
        limit: Steps that were left of ``max_steps``; None: no limit.
        plan: Of the training loader; None for a stream, which does not know its length.
    """
    total = getattr(plan, "num_steps", None)
    if limit is None or num_steps < limit or num_steps == total:
        return ""
    whole = "steps, and may have had more" if total is None else f"of its {total} steps"
    return f"epoch {epoch} took {num_steps} {whole}"


def remove_stop_file(options: TrainerOptions) -> None:
    """Remove the file that ends a launch at the end of one, so that the next goes on; rank 0 does it."""
    if options.stop_file is None or not get_active_strategy().is_main:
        return
    try:
        options.stop_file.unlink(missing_ok=True)
    except OSError as error:
        warnings.warn(f"{options.stop_file} could not be removed and will end the next launch: {error}.", stacklevel=2)


def refuse_unmeasured(
    monitor: str | None, runner: Runner, validator: ValidationRunner | None, val_loader: Any = None
) -> None:
    """Refuse to follow a metric that is not measured: there would be no best epoch, and no patience.

    Args:
        monitor: What decides which epoch is best.
        runner: Its schedules may follow a metric as well.
        validator: What validates; None: nothing does.
        val_loader: What it validates on.

    Raises:
        ConfigurationError: A metric is followed that nothing reports, or validation has no sample.
    """
    if validator is not None and _is_empty(val_loader):
        raise ConfigurationError(
            "The validation data must have at least one sample, but is empty. Look at its folder, or leave validation out."
        )
    followed = [monitor, *(schedule.monitor for schedule in runner.schedules.values())]
    for name in filter(None, followed):
        section, _, term = name.partition("/")
        if section not in ("training", "validation") or not term:
            raise ConfigurationError(
                f"`monitor` must be training/<name> or validation/<name>, but is {name!r}. Write validation/"
                f"{term or name}, perhaps."
            )
        if section == "validation" and validator is None:
            raise ConfigurationError(
                f"`monitor` must be measured, but is {name!r} and there is no validation. Give validation data, or follow "
                "a metric of training, or none."
            )
        known = _known_names(runner if section == "training" else validator)
        if known and term.split("/")[0] not in known:
            terms = ", ".join(f"{section}/{term}" for term in known if term != "skipped_samples")
            raise ConfigurationError(f"`monitor` must be a metric of {section}, but is {name!r}. There are {terms}.")


def _known_names(runner: Any) -> list[str]:
    """Return what a loop reports; nothing where that is not known before: a hook or a loop of the user's own may add."""
    own_loop = type(runner).run_epoch not in (ValidationRunner.run_epoch, TrainingRunner.run_epoch)
    if own_loop or runner.hooks.has_handlers("on_post_forward"):
        return []
    if type(runner).run_epoch is ValidationRunner.run_epoch:
        return [*runner.metrics.terms, "skipped_samples"]
    return [*runner.objective.terms, *(runner.metrics.terms if runner.metrics else ()), *sorted(OWN_NAMES)]


def _is_empty(loader: Any) -> bool:
    try:
        return len(loader.dataset) == 0
    except (AttributeError, TypeError):  # an order of the user's own needs no length, nor does a stream
        return False
