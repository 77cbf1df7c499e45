"""Learning-rate schedules: torch's schedulers, told when to step."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from srforge.distributed import ConfigurationError
from srforge.training.options import require_choice


class Schedule:
    """A torch scheduler and the interval at which it steps: exactly once a step or once an epoch, on every rank.

    Args:
        scheduler: Any torch scheduler; None: learning rates stay as they are.
        interval: ``step`` (after each optimizer step) or ``epoch`` (at each epoch end, before the checkpoint).
        monitor: For ``ReduceLROnPlateau``: the reduced metric to follow, for example ``validation/psnr_y``.

    Raises:
        ConfigurationError: The interval is unknown, or a plateau scheduler has no metric or steps per step.
    """

    def __init__(
        self, scheduler: LRScheduler | None = None, interval: str = "epoch", monitor: str | None = None
    ) -> None:
        require_choice("interval", interval, ("step", "epoch"))
        self._follows_metric = isinstance(scheduler, ReduceLROnPlateau)
        if self._follows_metric and (monitor is None or interval != "epoch"):
            raise ConfigurationError(
                f"`monitor` must name a metric and `interval` be 'epoch' for ReduceLROnPlateau, but are {monitor!r} and "
                f"{interval!r}."
            )
        self.scheduler = scheduler
        self.interval = interval
        self.monitor = monitor
        self._has_stepped = False

    def after_step(self) -> None:
        """Step the scheduler if it counts optimizer steps."""
        if self.scheduler is None or self.interval != "step":
            return
        if self._has_stepped:
            self.scheduler.step()
            return
        self._has_stepped = True
        with warnings.catch_warnings():
            # A gradient scaler or `non_finite` may have left the first step out: it counts all the same.
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            self.scheduler.step()

    def after_epoch(self, metrics: Mapping[str, float]) -> None:
        """Step the scheduler if it counts epochs.

        Args:
            metrics: Reduced metrics by flat name.

        Raises:
            ConfigurationError: The monitored metric is not among them.
        """
        if self.scheduler is None or self.interval != "epoch":
            return
        if not self._follows_metric:
            self.scheduler.step()
        elif (value := monitored_value(self.monitor, metrics)) is not None:
            self.scheduler.step(value)  # type: ignore[arg-type]  # a plateau scheduler takes the metric

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's state; empty without one."""
        return {} if self.scheduler is None else self.scheduler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the scheduler's state back."""
        if self.scheduler is not None and state:
            self.scheduler.load_state_dict(dict(state))


def monitored_value(monitor: str | None, metrics: Mapping[str, float]) -> float | None:
    """Return the value of the monitored metric; None without a monitor, or if the epoch was not validated.

    Args:
        monitor: Flat name, for example ``validation/psnr_y``.
        metrics: Reduced metrics by flat name.

    Raises:
        ConfigurationError: The metric was not reported though its section was.
    """
    if monitor is None or monitor in metrics:
        return None if monitor is None else metrics[monitor]
    if monitor.startswith("validation/") and not any(name.startswith("validation/") for name in metrics):
        return None
    raise ConfigurationError(f"`monitor` must be a reported metric, but is {monitor!r}. There are {sorted(metrics)}.")


def warmup_cosine(
    optimizer: torch.optim.Optimizer, *, total_steps: int, warmup: float = 0.05, floor: float = 0.0
) -> LRScheduler:
    """Return a schedule by optimizer step: linear warm-up, then half a cosine down.

    Args:
        optimizer: Its learning rates are the peaks.
        total_steps: Optimizer steps of the whole run, > 0.
        warmup: Share of the steps that warms up, in [0, 1).
        floor: Final learning rate as a share of the peak, in [0, 1].

    Raises:
        ConfigurationError: An argument is outside its range.

    Source: Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", 2017 (one period).
    """
    if total_steps < 1 or not 0 <= warmup < 1 or not 0 <= floor <= 1:
        raise ConfigurationError(
            f"`total_steps` must be >= 1, `warmup` in [0, 1) and `floor` in [0, 1], but are {total_steps}, {warmup}, {floor}."
        )
    factor = partial(_warmup_cosine_factor, total_steps, round(total_steps * warmup), floor)
    return LambdaLR(optimizer, factor)


def _warmup_cosine_factor(total_steps: int, warmup_steps: int, floor: float, step: int) -> float:
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))
