"""The run: epochs in order, each with the same few lines, and what is decided between them.

Read ``train`` first. What happens within an epoch is in ``runners``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from srforge.distributed import SRForgeError, begin_epoch, get_active_strategy, main_process_only, main_work, plan_of
from srforge.training.batches import FirstBatchKept, refuse_unsharded
from srforge.training.checkpoint_files import CheckpointError
from srforge.training.checkpoint_store import CheckpointStore
from srforge.training.contexts import RunContext
from srforge.training.hooks import TRAINER_POINTS, Hook, HookPoints
from srforge.training.loss_logger import flatten
from srforge.training.options import TrainerOptions, require_count
from srforge.training.protocols import Runner, Tracker
from srforge.training.rehearsal import rehearse_training, rehearse_validation
from srforge.training.resuming import explain_changes, explain_settings, launch_facts, read_checkpoint, settle_branch
from srforge.training.run_state import collect_state, restore_state
from srforge.training.runners import ValidationRunner
from srforge.training.stopping import (
    Standing,
    TrainingResult,
    describe_cut,
    is_over,
    refuse_unmeasured,
    remove_stop_file,
    stop_reason,
)


class UnpreparedModelError(SRForgeError):
    """The model did not pass through ``setup_device``: its replicas would train apart."""


class Trainer:
    """Runs epochs of training and validation, and keeps checkpoints from which a killed run ends on the same bits.

    Args:
        training_runner: Trains an epoch.
        validation_runner: Measures after it; None: no validation.
        seed: Of the whole run; order, augmentation and dropout are functions of it. The same on every rank.
        checkpoints: Where checkpoints are kept; None: none are written.
        tracker: Its history is cut back when a run resumes; None: there is none.
        hooks: Attached in this order.
        options: When to validate and to stop.
    """

    def __init__(
        self,
        training_runner: Runner,
        validation_runner: ValidationRunner | None = None,
        *,
        seed: int,
        checkpoints: CheckpointStore | None = None,
        tracker: Tracker | None = None,
        hooks: Iterable[Hook] = (),
        options: TrainerOptions | None = None,
    ) -> None:
        self.training_runner = training_runner
        self.validation_runner = validation_runner
        self.seed = seed
        self.checkpoints = checkpoints
        self.tracker = tracker
        self.options = options or TrainerOptions()
        self.hooks = HookPoints(type(self).__name__, TRAINER_POINTS)
        for hook in hooks:
            self.hooks.attach(hook)
        self.epoch, self.standing = 0, Standing()  # the next epoch to run, the best one so far
        self.stop_reason: str | None = None
        self.cut = ""  # what the last epoch left out, if max_steps ended it inside
        self.metrics: Mapping[str, Any] = {}
        self.baseline: Mapping[str, Any] = {}
        self.resumed_from: int | None = None
        self._launch: Mapping[str, Any] = {}
        self._epoch_started = self._epoch_trained = self._launch_started = time.monotonic()

    def train(self, epochs: int, train_loader: Any, val_loader: Any = None) -> TrainingResult:
        """Train until so many epochs are finished, counted from the very first launch.

        Args:
            epochs: Of the whole run, > 0.
            train_loader: Yields this rank's training batches.
            val_loader: Yields this rank's validation batches; None: no validation.

        Raises:
            UnpreparedModelError: A distributed strategy is active and did not prepare the model.
            ConfigurationError: ``epochs`` is no whole number above 0, or what is to be validated or followed is not there.

        Collective: every rank must call.
        """
        strategy, runner = get_active_strategy(), self.training_runner
        self._refuse_what_cannot_work(epochs, val_loader)
        if is_over(self.options, self.standing, epochs - self.epoch, runner.global_step) and self.epoch > 0:
            self._say(f"This run is finished after {self.epoch} epochs ({self._why()}); nothing is left to do.")
            # Again, perhaps: the launch that wrote the last checkpoint may have been killed right after it.
            self._fire("on_training_finished", self._context(epochs, self.epoch - 1), "after training")
            return self._result()
        refuse_unsharded(train_loader, strategy)
        self._say_what_differs(launch_facts(train_loader))
        train_loader = train_loader if plan_of(train_loader) is not None else FirstBatchKept(train_loader)
        begin_epoch(self.epoch, self.seed, train_loader, val_loader)
        self.rehearse(train_loader, val_loader)
        self._measure_baseline(val_loader)
        self._launch_started = time.monotonic()
        self._fire("on_training_began", self._context(epochs), "before training")
        try:
            for epoch in range(self.epoch, epochs):
                self._epoch_started = time.monotonic()
                begin_epoch(epoch, self.seed, train_loader, val_loader)
                step, limit = runner.global_step, self._steps_left()
                training = runner.run_epoch(train_loader, epoch, max_steps=limit)
                self._epoch_trained = time.monotonic()
                self.cut = describe_cut(epoch, runner.global_step - step, limit, plan_of(train_loader))
                strategy.sync_buffers(runner.model)
                if runner.ema is not None:
                    strategy.sync_buffers(runner.ema.model)
                validation = self._validate(val_loader, epoch, epochs)
                self.metrics = strategy.reduce_metrics({"training": training, "validation": validation})
                for schedule in runner.schedules.values():
                    schedule.after_epoch(flatten(self.metrics))
                is_best, self.stop_reason = self._judge(epoch, epochs)
                self.epoch = epoch + 1
                context = self._context(epochs, epoch, is_best=is_best)
                self._fire("on_epoch_finished", context, f"after epoch {epoch}")
                strategy.check_replicas(runner.model)
                self._save(context)
                if self.stop_reason is not None:
                    break
        except KeyboardInterrupt:
            self._say(f"Stopped in epoch {epoch}; the same command replays that epoch from its beginning.")
            raise
        remove_stop_file(self.options)
        if self._why() != "epochs":
            self._say(f"Training ends after {self.epoch} of {epochs} epochs: {self._why()}.")
        self._fire("on_training_finished", self._context(epochs, self.epoch - 1), "after training")
        return self._result()

    def resume(self, source: str | Path = "auto") -> int | None:
        """Continue an earlier run of the same configuration; call it before ``train``.

        Args:
            source: ``auto`` (the newest complete checkpoint, if there is one), ``never``, or a checkpoint's path.

        Returns:
            The next epoch to run; None if there was nothing to continue.

        Raises:
            CheckpointError: The checkpoint cannot be read or belongs to something else; on every rank.

        Collective: every rank must call. Rank 0 chooses and reads; the others receive.
        """
        state, name = read_checkpoint(self.checkpoints, source)
        if state is not None:
            if state["seed"] != self.seed:
                raise CheckpointError(
                    f"{name} was written with seed {state['seed']}, but this run has {self.seed}: its data would come in "
                    "another order. Use the same seed, or start over from the weights."
                )
            kept = explain_settings(state, self.training_runner)
            self.standing = restore_state(state, self.training_runner, self._all_hooks(), name)
            self.epoch, self.stop_reason = state["epoch"], state["stop_reason"]
            self.metrics, self.baseline, self.cut = state["metrics"], state["baseline"], state.get("cut", "")
            self.resumed_from, self._launch = self.epoch - 1, state.get("launch", {})
            self._say(f"Resuming from {name}: {self.epoch} epochs are finished.")
            if kept:
                self._say(f"{name} brings settings of its own, which are kept: {kept}.")
            if (before := state.get("monitored", self._monitored())) != self._monitored():
                self._say(f"The best epoch by {before[0]} ({before[1]}) is forgotten: another metric is followed.")
                self.standing = Standing()
        if left := settle_branch(self.checkpoints, source, state):
            self._say(f"Removed {', '.join(left)}: training goes back to the beginning of epoch {self.epoch}.")
        if self.tracker is not None:
            self.tracker.rewind(self.epoch)
        return None if state is None else self.epoch

    def rehearse(self, train_loader: Any, val_loader: Any = None) -> None:
        """Run the dry steps of a launch: two training passes without a step, one validation batch. They leave no trace.

        Collective: every rank must call.
        """
        rehearse_training(self.training_runner, train_loader)
        if self.validation_runner is not None and val_loader is not None:
            rehearse_validation(self.validation_runner, val_loader)

    def _refuse_what_cannot_work(self, epochs: int, val_loader: Any) -> None:
        require_count("epochs", epochs)
        validator = None if val_loader is None else self.validation_runner
        refuse_unmeasured(self.options.monitor, self.training_runner, validator, val_loader)
        strategy = get_active_strategy()
        if strategy.world_size > 1 and not strategy.is_prepared(self.training_runner.model):
            raise UnpreparedModelError(
                "The model must come from setup_device, but the active strategy did not prepare it: its replicas would "
                "train apart. Call `model, device = setup_device(model, device)` before making the runner."
            )

    def _say_what_differs(self, facts: Mapping[str, Any]) -> None:
        if changes := explain_changes(self._launch, facts):
            self._say(f"Continuing after epoch {self.resumed_from}, but {changes}.")
        if self.cut:
            self._say(f"Going on with epoch {self.epoch}: {self.cut}, and the samples of the rest are left out.")
        self._launch = facts

    def _why(self) -> str:
        return "; ".join(filter(None, (self.stop_reason or "epochs", self.cut)))

    def _measure_baseline(self, val_loader: Any) -> None:
        runner = self.validation_runner
        if runner is not None and val_loader is not None and runner.baseline is not None:
            sums = {"baseline": runner.run_baseline(val_loader)}
            self.baseline = get_active_strategy().reduce_metrics(sums)["baseline"]

    def _validate(self, val_loader: Any, epoch: int, epochs: int) -> dict[str, Any]:
        is_due = (epoch + 1) % self.options.validate_every == 0 or epoch == epochs - 1 or self._steps_left() == 0
        if self.validation_runner is None or val_loader is None or not is_due:
            return {}
        return self.validation_runner.run_epoch(val_loader, epoch, self.training_runner.global_step)

    def _judge(self, epoch: int, epochs: int) -> tuple[bool, str | None]:
        """Return whether the epoch is the best and why training ends; rank 0 decides for all (clocks and files differ)."""
        is_best = self.standing.take(epoch, flatten(self.metrics), self.options)
        reason = stop_reason(
            self.options,
            self.standing,
            epochs_left=epochs - epoch - 1,
            global_step=self.training_runner.global_step,
            minutes=(time.monotonic() - self._launch_started) / 60,
        )
        decided: str | None = get_active_strategy().broadcast_object(reason)
        return is_best, decided

    def _fire(self, point: str, context: RunContext, when: str) -> None:
        """Run the handlers of a point; what rank 0 does in them may last longer than the group's timeout."""
        with main_work(get_active_strategy(), f"hooks {when}", self.options.main_work_timeout_minutes):
            self.hooks.fire(point, context)

    def _save(self, context: RunContext) -> None:
        if self.checkpoints is not None:
            minutes = self.options.main_work_timeout_minutes
            with main_work(get_active_strategy(), f"saving epoch {context.epoch}", minutes):
                self._write_checkpoint(self.checkpoints, context)

    @main_process_only  # so that a collective in a hook's state_dict is refused by name
    def _write_checkpoint(self, checkpoints: CheckpointStore, context: RunContext) -> None:
        facts = {name: getattr(self, name) for name in ("epoch", "seed", "stop_reason", "metrics", "baseline", "cut")}
        facts |= {"config": self.options.config_text, "launch": self._launch, "monitored": self._monitored()}
        checkpoints.save(
            collect_state(self.training_runner, self._all_hooks(), self.standing, facts),
            epoch=context.epoch,
            metrics=flatten(self.metrics),
            is_best=context.is_best,
            finished=self.stop_reason is not None,
            world_size=get_active_strategy().world_size,
        )

    def _context(self, epochs: int, epoch: int | None = None, *, is_best: bool = False) -> RunContext:
        training = self.metrics.get("training", {})
        groups = [group for optimizer in self.training_runner.optimizers.values() for group in optimizer.param_groups]
        return RunContext(
            epoch=self.epoch if epoch is None else epoch,
            epochs=epochs,
            global_step=self.training_runner.global_step,
            model=self.training_runner.model,
            metrics=self.metrics,
            baseline=self.baseline,
            is_best=is_best,
            best_value=self.standing.best_value,
            best_epoch=self.standing.best_epoch,
            stop_reason=self.stop_reason,
            learning_rates=tuple(float(group["lr"]) for group in groups),
            seconds=time.monotonic() - self._epoch_started,
            training_seconds=self._epoch_trained - self._epoch_started,
            num_samples=float(training.get("num_samples", 0.0)),
            resumed_from=self.resumed_from,
        )

    def _monitored(self) -> list[str | None]:
        return [self.options.monitor, self.options.mode]

    def _steps_left(self) -> int | None:
        limit = self.options.max_steps
        return None if limit is None else max(0, limit - self.training_runner.global_step)

    def _all_hooks(self) -> dict[str, HookPoints]:
        owners = (self, self.training_runner, self.validation_runner)
        return {type(owner).__name__: owner.hooks for owner in owners if owner is not None}

    def _result(self) -> TrainingResult:
        step, best = self.training_runner.global_step, (self.standing.best_value, self.standing.best_epoch)
        return TrainingResult(self.epoch, step, self.metrics, self.baseline, *best, self.stop_reason)

    def _say(self, message: str) -> None:
        if get_active_strategy().is_main:
            print(message, file=sys.stderr, flush=True)
