"""Which epoch is best, and when training ends: one pure decision an epoch, taken from reduced values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from srforge.distributed import ConfigurationError
from srforge.training.options import TrainerOptions
from srforge.training.protocols import Runner
from srforge.training.runners import ValidationRunner
from srforge.training.schedules import monitored_value


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an epoch's end decided.

    Attributes:
        is_best: The monitored value is the best so far.
        stop_reason: ``epochs``, ``max_steps``, ``patience``, ``max_minutes`` or ``stop_file``; None: go on.
    """

    is_best: bool
    stop_reason: str | None


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


def refuse_unmeasured(monitor: str | None, runner: Runner, validator: ValidationRunner | None) -> None:
    """Refuse to follow a metric of validation that is not measured: there would be no best epoch, and no patience.

    Args:
        monitor: What decides which epoch is best.
        runner: Its schedules may follow a metric as well.
        validator: What validates; None: nothing does.

    Raises:
        ConfigurationError: A metric of validation is followed without validation, or it has no such metric.
    """
    followed = [monitor, *(schedule.monitor for schedule in runner.schedules.values())]
    names = [name for name in followed if name is not None and name.startswith("validation/")]
    if names and validator is None:
        raise ConfigurationError(
            f"`monitor` must be measured, but is {names[0]!r} and there is no validation. Give validation data, or follow "
            "a metric of training, or none."
        )
    if validator is None or validator.hooks.has_handlers("on_post_forward"):  # a hook may add metrics
        return
    if type(validator).run_epoch is not ValidationRunner.run_epoch:  # so may a loop of the user's own
        return
    for name in names:
        if name.split("/")[1] not in {*validator.metrics.terms, "skipped_samples"}:
            known = ", ".join(f"validation/{term}" for term in validator.metrics.terms)
            raise ConfigurationError(f"`monitor` must be a metric of validation, but is {name!r}. There are {known}.")
