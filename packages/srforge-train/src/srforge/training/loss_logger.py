"""The epoch summary on the terminal: reduced values, once per fleet."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from srforge.distributed import ReductionReport, get_active_strategy, main_process_only
from srforge.training.contexts import RunContext
from srforge.training.hooks import Hook, hooks_into
from srforge.training.progress import print_line
from srforge.training.protocols import Tracker

# Counted for speed and for checks, not to be read as a metric.
_NOT_SHOWN = ("num_samples",)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return a nested mapping of numbers as ``{"validation/psnr_y": 31.2}``."""
    flat: dict[str, float] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{name}/"))
        else:
            flat[f"{prefix}{name}"] = float(value)
    return flat


class LossLogger(Hook):
    """Prints one summary an epoch: each reduced metric, its change, speed and the time left.

    Attach it to the trainer. Every rank also prints the digest of its replica, if asked: equal digests are the proof
    that the replicas are.

    Args:
        show_replicas: Print the digest of parameters and buffers on every rank.
    """

    def __init__(self, *, show_replicas: bool = False) -> None:
        self.show_replicas = show_replicas
        self._previous: dict[str, float] = {}
        self._best: dict[str, float] = {}
        self._started = time.monotonic()
        self._first_epoch = 0

    @hooks_into("on_training_began")
    def start_clock(self, context: RunContext) -> None:
        """Remember where this launch began, for the time left, and show what is to be surpassed."""
        self._started, self._first_epoch = time.monotonic(), context.epoch
        if context.baseline:
            values = ", ".join(f"{name} {value:.5g}" for name, value in flatten(context.baseline).items())
            _print([f"baseline {values}"])

    @hooks_into("on_epoch_finished")
    def show_replica(self, context: RunContext) -> None:
        """Print this rank's digest of parameters and buffers."""
        if self.show_replicas:
            strategy = get_active_strategy()
            digest = strategy.fingerprint(context.model)
            print_line(f"[r{strategy.rank}] epoch {context.epoch} replica {digest}")

    @hooks_into("on_epoch_finished")
    @main_process_only
    def show_summary(self, context: RunContext) -> None:
        """Print the reduced metrics of the epoch."""
        _print(self._summary(context))
        self._previous = flatten(context.metrics)
        self._best = self._previous if context.is_best else self._best

    def state_dict(self) -> dict[str, Any]:
        """Return the metrics that the next epoch is compared with."""
        return {"previous": self._previous, "best": self._best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take them back."""
        self._previous, self._best = dict(state.get("previous", {})), dict(state.get("best", {}))

    def _summary(self, context: RunContext) -> list[str]:
        done = context.epoch - self._first_epoch + 1
        left = (time.monotonic() - self._started) / done * (context.epochs - context.epoch - 1)
        seconds = context.training_seconds  # validation is not what makes training slow
        speed = f", {context.num_samples / seconds:.0f} samples/s" if seconds > 0 else ""
        rates = ", ".join(f"{rate:.2e}" for rate in dict.fromkeys(context.learning_rates))
        headline = (
            f"epoch {context.epoch + 1}/{context.epochs}  step {context.global_step}  {context.seconds:.1f} s{speed}  "
            f"next learning rate {rates}  {format_duration(left)} left"
        )
        lines = [headline + ("  best so far" if context.is_best else "")]
        columns = "".join(f" {title:>10}" for title in ("value", "vs last", "vs best", "baseline"))
        lines.append(f"  {'metric':<28}{columns}")
        baseline = {f"validation/{name}": value for name, value in flatten(context.baseline).items()}
        for name, value in flatten(context.metrics).items():
            if name.rsplit("/", 1)[-1] in _NOT_SHOWN:
                continue
            last, best = (
                f"{value - known[name]:+.3g}" if name in known else "" for known in (self._previous, self._best)
            )
            compared = f"{baseline[name]:.5g}" if name in baseline else ""
            lines.append(f"  {name:<28} {value:>10.5g} {last:>10} {best:>10} {compared:>10}".rstrip())
        return lines + list(_notes(get_active_strategy().last_reduction))


@main_process_only
def _print(lines: list[str]) -> None:
    print("\n".join(lines), flush=True)  # not `sys.stdout.write`: a process without a console has no stdout


def _notes(report: ReductionReport | None) -> Iterator[str]:
    """Yield what the numbers hide: metrics that some ranks lacked, and ranks whose values were not finite."""
    if report is None:
        return
    for key, ranks in report.missing.items():
        yield f"  note: {key} was not reported on ranks {sorted(ranks)}; its mean is over the others"
    for key, ranks in report.non_finite.items():
        yield f"  note: {key} was NaN or infinite on ranks {sorted(ranks)}"


class MetricsLogger(Hook):
    """Hands the configuration and the reduced metrics of each epoch to a tracker. Attach it to the trainer.

    Nothing is logged before training begins: a run that fails its rehearsal opens no run of a tracker.

    Args:
        tracker: Where they are kept.
        config: Configuration of the run, plain and nested; None: it is not logged.
    """

    def __init__(self, tracker: Tracker, config: Mapping[str, Any] | None = None) -> None:
        self._tracker = tracker
        self._config = config

    @hooks_into("on_training_began")
    def log_config(self, context: RunContext) -> None:  # noqa: ARG002  # a handler takes its context
        """Log the configuration."""
        if self._config is not None:
            self._tracker.log_config(self._config)

    @hooks_into("on_epoch_finished")
    def log_epoch(self, context: RunContext) -> None:
        """Log the metrics, the learning rates and the time of the epoch."""
        rates = {f"learning_rate/{i}": rate for i, rate in enumerate(context.learning_rates)}
        self._tracker.log_metrics({**flatten(context.metrics), **rates}, epoch=context.epoch)

    @hooks_into("on_training_finished")
    def log_summary(self, context: RunContext) -> None:
        """Log what describes the whole run."""
        summary = {
            "best_value": context.best_value,
            "best_epoch": context.best_epoch,
            "stop_reason": context.stop_reason,
        }
        self._tracker.set_summary({name: value for name, value in summary.items() if value is not None})


def format_duration(seconds: float) -> str:
    """Return a duration for people: ``42 s``, ``3 min``, ``2 h 05 min``."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"
