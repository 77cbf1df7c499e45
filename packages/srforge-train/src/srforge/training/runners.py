"""The two loops over a loader: training, and validation. Everything that happens to a model is a line in here.

Hooks fire between these lines, by name, and nowhere else. What is decided per epoch belongs to ``trainer``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from srforge.distributed import MetricSum, get_active_strategy
from srforge.training.accumulator import MetricAccumulator
from srforge.training.batches import inputs_of, micro_batches, num_samples_of, skipped_samples, to_device
from srforge.training.contexts import EpochContext, StepContext
from srforge.training.ema import ExponentialMovingAverage, bare_view
from srforge.training.gradients import FiniteGuard, clip_gradients, finite_part, parameters_of, refuse_vanished_scale
from srforge.training.hooks import RUNNER_POINTS, VALIDATION_POINTS, HookPoints
from srforge.training.objective import Metrics, Objective, refuse_dead_terms, refuse_taken_names, refuse_unusable
from srforge.training.optimizer_checks import refuse_unfit_optimizers
from srforge.training.options import RunnerOptions
from srforge.training.precision import Precision, accelerate
from srforge.training.progress import Progress
from srforge.training.schedules import Schedule


class TrainingRunner:
    """Trains a model for an epoch at a time.

    Args:
        model: As ``setup_device`` returned it.
        optimizer: Built from the prepared model's parameters.
        objective: What is minimised, and reported under its terms' names.
        metrics: Further terms that are only reported.
        schedule: When learning rates change; None: never.
        ema: Moving average to update after each optimizer step; None: none.
        options: Precision, accumulation, clipping.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        objective: Objective,
        *,
        metrics: Metrics | None = None,
        schedule: Schedule | None = None,
        ema: ExponentialMovingAverage | None = None,
        options: RunnerOptions | None = None,
    ) -> None:
        refuse_taken_names(objective, metrics)
        self.options = options or RunnerOptions()
        self.device = get_active_strategy().device
        refuse_unfit_optimizers(model, {"model": optimizer}, self.options, {"model": schedule})
        self.model = model
        self.network = accelerate(model, self.options)
        self.optimizer = optimizer
        self.objective = objective
        self.metrics = metrics
        self.schedule = schedule or Schedule()
        self.ema = ema
        self.precision = Precision(self.options.precision, self.device)
        # Overflow is part of fp16 training: there the scaler skips such steps by itself, and they are counted only.
        self.guard = FiniteGuard(
            "count" if self.precision.scaler.is_enabled() else self.options.non_finite, self.device
        )
        self.hooks = HookPoints(type(self).__name__, RUNNER_POINTS)
        self.global_step = 0
        self._replicas_checked = False

    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """The optimizer, by the name that it has in checkpoints."""
        return {"model": self.optimizer}

    @property
    def schedules(self) -> dict[str, Schedule]:
        """The schedule, by the optimizer's name."""
        return {"model": self.schedule}

    @property
    def scalers(self) -> dict[str, torch.amp.GradScaler]:
        """The gradient scaler, by the optimizer's name."""
        return {"model": self.precision.scaler}

    def forward_batch(self, network: Callable[..., Any], batch: Mapping[str, Any]) -> Any:
        """Return the network's prediction for a batch. Override it for a model with an unusual forward."""
        return network(*inputs_of(batch, self.options.inputs))

    def run_epoch(self, loader: Any, epoch: int, *, max_steps: int | None = None) -> dict[str, Any]:
        """Train on this rank's share of one epoch.

        Args:
            loader: Yields batches: mappings whose leaves are tensors of shape ``(N, ...)`` or ``{band: tensor}``.
            epoch: 0-based.
            max_steps: Take at most so many optimizer steps; None: the whole epoch.

        Returns:
            This rank's sums and counts, a mapping with ``MetricSum`` leaves.

        Raises:
            NonFiniteGradientError: A gradient held NaN or inf and the policy is ``raise``.

        Collective: every rank must call; each optimizer step is one.
        """
        strategy, scaler = get_active_strategy(), self.precision.scaler
        accumulated, num_samples = MetricAccumulator(self.device), 0
        self.model.train()
        self.hooks.fire("on_epoch_start", EpochContext("training", epoch, self.global_step, self.model))
        with strategy.explained_errors(self.model), Progress.of_loader("training", epoch, loader) as progress:
            for micro in micro_batches(loader, strategy, self.options.accumulate, max_steps):
                batch = to_device(micro.data, self.device, channels_last=self.options.channels_last)
                step = StepContext(
                    "training", epoch, micro.index, self.global_step, micro.ends_window, micro.count, self.model, batch
                )
                self.hooks.fire("on_pre_step", step)

                # -------- forward, loss, backward; ranks exchange gradients on the last micro-batch of a window only
                with nullcontext() if micro.ends_window else strategy.no_sync(self.model):
                    with self.precision.autocast():
                        step.prediction = self.forward_batch(self.network, step.batch)
                        step.terms = self.objective(step.prediction, step.batch, epoch)
                        self.hooks.fire("on_post_forward", step)
                        loss = step.terms.total()
                    scaler.scale(loss * micro.loss_scale).backward()  # type: ignore[no-untyped-call]  # torch's
                self.hooks.fire("on_post_backward", step)

                # -------- one optimizer step on the exact mean gradient over the window's real samples
                if micro.ends_window:
                    scaler.unscale_(self.optimizer)
                    step.grad_norm = clip_gradients(parameters_of(self.optimizer), self.options.max_norm_of("model"))
                    if self.guard.allows_step(step.grad_norm, self.optimizer):
                        scaler.step(self.optimizer)
                    scaler.update()
                    self.optimizer.zero_grad(set_to_none=True)
                    self._after_optimizer_step(strategy)
                    accumulated.update(
                        {"grad_norm": finite_part(step.grad_norm) if self.guard.counts else step.grad_norm}, 1
                    )
                self.hooks.fire("on_post_step", step)

                metrics = self.metrics(step.prediction, step.batch, epoch).values() if self.metrics else {}
                accumulated.update({"loss": loss, **step.terms.values(), **metrics}, micro.count)
                num_samples += micro.count
                progress.advance(loss)
        self.guard.raise_if_broken(f"training epoch {epoch}")
        refuse_vanished_scale(scaler, self.options.non_finite, f"training epoch {epoch}")
        self.hooks.fire("on_epoch_end", EpochContext("training", epoch, self.global_step, self.model))
        return {**accumulated.result(), **self._totals(num_samples), **skipped_samples(loader)}

    def dry_step(self, data: Any) -> None:
        """Run forward and backward on one batch of the loader, without hooks and without a step.

        Raises:
            ConfigurationError: No gradient flows from a weighted term, or a term is of no documented form.

        Collective: every rank must call.
        """
        batch = to_device(data, self.device, channels_last=self.options.channels_last)
        with self.precision.autocast():
            prediction = self.forward_batch(self.network, batch)
            terms = self.objective(prediction, batch)
        for values in (terms, *([] if self.metrics is None else [self.metrics(prediction, batch)])):
            refuse_unusable(values)
        refuse_dead_terms(terms)
        self.precision.scaler.scale(terms.total()).backward()  # type: ignore[no-untyped-call]  # torch's

    def _after_optimizer_step(self, strategy: Any) -> None:
        self.global_step += 1
        self.schedule.after_step()
        if self.ema is not None:
            self.ema.update()
        if not self._replicas_checked:
            # Once a process: whatever set the replicas apart has done so by the first step.
            strategy.check_replicas(self.model, buffers=False)
            self._replicas_checked = True

    def _totals(self, num_samples: int) -> dict[str, MetricSum]:
        totals = {"num_samples": MetricSum(num_samples, 1, "sum")}
        if self.guard.counts:
            totals["skipped_steps"] = MetricSum(self.guard.take_num_skipped(), 1, "max")
        return totals


class ValidationRunner:
    """Measures a model on whole, unpadded shards: each sample counts once over the fleet.

    The bare model runs, not its wrapper: ranks may hold different numbers of batches.

    Args:
        model: As ``setup_device`` returned it.
        metrics: What is measured.
        ema: Measure this average instead of the model itself; None: the model.
        baseline: Returns the prediction to compare with (for example bicubic enlargement), given the batch.
        options: Precision and inputs; those of training.
    """

    def __init__(
        self,
        model: nn.Module,
        metrics: Metrics,
        *,
        ema: ExponentialMovingAverage | None = None,
        baseline: Callable[[Mapping[str, Any]], Any] | None = None,
        options: RunnerOptions | None = None,
    ) -> None:
        self.options = options or RunnerOptions()
        self.device = get_active_strategy().device
        self.model = model
        self.metrics = metrics
        self.ema = ema
        self.baseline = baseline
        self.precision = Precision(self.options.precision, self.device)
        self.hooks = HookPoints(type(self).__name__, VALIDATION_POINTS)

    def forward_batch(self, network: Callable[..., Any], batch: Mapping[str, Any]) -> Any:
        """Return the network's prediction for a batch. Override it for a model with an unusual forward."""
        return network(*inputs_of(batch, self.options.inputs))

    @torch.no_grad()
    def run_epoch(self, loader: Any, epoch: int, global_step: int = 0) -> dict[str, Any]:
        """Measure this rank's shard of the validation data.

        Args:
            loader: Yields batches as in training.
            epoch: 0-based.
            global_step: Optimizer steps taken so far, for hooks.

        Returns:
            This rank's sums and counts, a mapping with ``MetricSum`` leaves; empty if the shard is.
        """
        model = self.ema.model if self.ema is not None else bare_view(self.model)
        model.eval()
        accumulated = MetricAccumulator(self.device)
        self.hooks.fire("on_epoch_start", EpochContext("validation", epoch, global_step, model))
        with Progress.of_loader("validation", epoch, loader) as progress:
            for index, data in enumerate(loader):
                batch, count = to_device(data, self.device), num_samples_of(data)
                step = StepContext(
                    "validation", epoch, index, global_step, True, count, model, batch
                )  # a record's field
                self.hooks.fire("on_pre_step", step)
                with self.precision.autocast():
                    step.prediction = self.forward_batch(model, step.batch)
                step.terms = self.metrics(step.prediction, step.batch, epoch)
                self.hooks.fire("on_post_forward", step)
                accumulated.update(step.terms.values(), count)
                self.hooks.fire("on_post_step", step)
                progress.advance()
        self.hooks.fire("on_epoch_end", EpochContext("validation", epoch, global_step, model))
        return {**accumulated.result(), **skipped_samples(loader)}

    @torch.no_grad()
    def run_baseline(self, loader: Any) -> dict[str, Any]:
        """Measure the baseline's prediction instead of the model's, without hooks; empty if there is no baseline."""
        accumulated = MetricAccumulator(self.device)
        for data in loader if self.baseline is not None else ():
            batch = to_device(data, self.device)
            assert self.baseline is not None
            accumulated.update(self.metrics(self.baseline(batch), batch).values(), num_samples_of(data))
        return accumulated.result()
