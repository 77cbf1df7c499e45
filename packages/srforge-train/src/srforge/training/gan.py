"""Adversarial training: the loop of a generator and a discriminator, and the model that holds both.

Why the discriminator is called in two ways: see ``GANRunner``. Penalties and turns are hooks, in ``gan_hooks``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from srforge.distributed import MetricSum, get_active_strategy
from srforge.training.accumulator import MetricAccumulator
from srforge.training.adversarial import AdversarialTerm, per_sample
from srforge.training.batches import MicroBatch, inputs_of, micro_batches, num_samples_of, skipped_samples, to_device
from srforge.training.contexts import EpochContext, GANStepContext
from srforge.training.ema import ExponentialMovingAverage, bare_view
from srforge.training.gan_model import JUDGE, discriminator_of, refuse_wrong_shares
from srforge.training.gradients import FiniteGuard, clip_gradients, finite_part, parameters_of, refuse_vanished_scale
from srforge.training.hooks import GAN_POINTS, HookPoints
from srforge.training.objective import (
    Metrics,
    Objective,
    TermValues,
    refuse_dead_terms,
    refuse_taken_names,
    refuse_unusable,
)
from srforge.training.optimizer_checks import refuse_unfit_optimizers
from srforge.training.options import RunnerOptions
from srforge.training.precision import Precision, accelerate
from srforge.training.progress import Progress
from srforge.training.schedules import Schedule


class GANRunner:
    """Trains a generator against a discriminator for an epoch at a time.

    In the generator's step the discriminator is frozen and called past its wrapper. A wrapped call would tell the
    wrapper to expect gradients that never come, and with a static graph the replicas then drift apart without an error.
    In its own step it is called through the wrapper, on real and on generated images, with one backward pass.

    Both steps of a micro-batch see the images that the generator made before it stepped.

    Args:
        model: As ``setup_device`` returned it: a composite whose ``trainable_modules()`` name a ``discriminator``; its
            forward makes images.
        optimizers: ``{"generator": ..., "discriminator": ...}``, built from the prepared parts. Further ones step with the
            generator.
        objective: What the generator minimises besides the adversarial term, on images.
        adversarial: The criterion, its weight, and where real images are.
        metrics: Further terms that are only reported.
        schedules: By optimizer. One by step counts the steps of its own optimizer.
        ema: Moving average of the model, or of its generator alone; None: none.
        options: Precision, accumulation, clipping. ``compile`` is for the model's forward.

    Raises:
        ConfigurationError: The model has no ``discriminator``, or the optimizers do not divide its parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Mapping[str, torch.optim.Optimizer],
        objective: Objective,
        *,
        adversarial: AdversarialTerm,
        metrics: Metrics | None = None,
        schedules: Mapping[str, Schedule] | None = None,
        ema: ExponentialMovingAverage | None = None,
        options: RunnerOptions | None = None,
    ) -> None:
        strategy = get_active_strategy()
        self.options = options or RunnerOptions()
        self.device = strategy.device
        self.model = model
        self.network = accelerate(model, self.options)
        self.bare = bare_view(model)
        self.discriminator = discriminator_of(model)
        self.bare_discriminator = strategy.unwrap(self.discriminator)
        self.optimizers = {name: optimizers[name] for name in sorted(optimizers, key=lambda name: name == JUDGE)}
        refuse_unfit_optimizers(model, self.optimizers, self.options, schedules)
        refuse_wrong_shares({n: parameters_of(o) for n, o in self.optimizers.items()}, self.bare_discriminator)
        refuse_taken_names(objective, metrics)
        self._judging = [p for p in self.bare_discriminator.parameters() if p.requires_grad]
        self.objective = objective
        self.adversarial = adversarial
        self.metrics = metrics
        self.schedules = {name: (schedules or {}).get(name) or Schedule() for name in self.optimizers}
        self.ema = ema
        # A scaler follows one loss: parts that step with the generator share its scaler.
        sides = {name: Precision(self.options.precision, self.device) for name in ("generator", JUDGE)}
        self.precision = sides["generator"]
        self.scalers = {name: side.scaler for name, side in sides.items()}
        policy = "count" if self.precision.scaler.is_enabled() else self.options.non_finite
        self.guards = {name: FiniteGuard(policy, self.device) for name in self.optimizers}
        self.hooks = HookPoints(type(self).__name__, GAN_POINTS)
        self.global_step = 0
        self._replicas_checked = False

    def forward_batch(self, network: Callable[..., Any], batch: Mapping[str, Any]) -> Any:
        """Return the network's prediction for a batch. Override it for a model with an unusual forward."""
        return network(*inputs_of(batch, self.options.inputs))

    def judge_batch(self, discriminator: Callable[..., Any], images: Any, batch: Mapping[str, Any]) -> Tensor:  # noqa: ARG002  # for a conditional one
        """Return the discriminator's logits ``(N, ...)`` of images. Override it for one that sees more than images."""
        logits: Tensor = discriminator(images)
        return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits

    def run_epoch(self, loader: Any, epoch: int, *, max_steps: int | None = None) -> dict[str, Any]:
        """Train on this rank's share of one epoch.

        Args, result and errors are those of ``TrainingRunner.run_epoch``.

        Collective: every rank must call; each optimizer step is one.
        """
        strategy, accumulated, num_samples = get_active_strategy(), MetricAccumulator(self.device), 0
        self.model.train()
        self.hooks.fire("on_epoch_start", EpochContext("training", epoch, self.global_step, self.model))
        with strategy.explained_errors(self.model), Progress.of_loader("training", epoch, loader) as progress:
            for micro in micro_batches(loader, strategy, self.options.accumulate, max_steps):
                step = self._begin(micro, epoch)
                self.hooks.fire("on_pre_step", step)
                generator_loss = discriminator_loss = None
                with nullcontext() if micro.ends_window else strategy.no_sync(self.model):
                    # -------- generator: against the frozen discriminator, past its wrapper
                    with self.precision.autocast():
                        self._generate(step)
                        if step.terms is not None:
                            self.hooks.fire("on_post_forward", step)
                            self._add_adversarial_term(step)
                            self.hooks.fire("on_post_g_forward", step)
                            generator_loss = step.terms.total()
                    if generator_loss is not None:
                        self.scalers["generator"].scale(generator_loss * micro.loss_scale).backward()  # type: ignore[no-untyped-call]  # torch's
                        self.hooks.fire("on_post_g_backward", step)

                    # -------- discriminator: real and generated images through its wrapper, one backward
                    if step.trains_discriminator:
                        with self.precision.autocast():
                            terms = self._judge(step)
                            self.hooks.fire("on_post_d_forward", step)
                            discriminator_loss = terms.total()
                        self.scalers[JUDGE].scale(discriminator_loss * micro.loss_scale).backward()  # type: ignore[no-untyped-call]  # torch's
                        self.hooks.fire("on_post_d_backward", step)
                self.hooks.fire("on_post_backward", step)

                # -------- each part whose turn it is steps on the exact mean gradient over the window's real samples
                if micro.ends_window:
                    for name, scaler in self._due(step).items():
                        optimizer = self.optimizers[name]
                        scaler.unscale_(optimizer)
                        norm = clip_gradients(parameters_of(optimizer), self.options.max_norm_of(name))
                        if self.guards[name].allows_step(norm, optimizer):
                            scaler.step(optimizer)
                        optimizer.zero_grad(set_to_none=True)
                        self.schedules[name].after_step()
                        step.grad_norms[name] = norm
                    self._after_window(strategy, step)
                self.hooks.fire("on_post_step", step)
                self._report(step, generator_loss, discriminator_loss, accumulated)
                num_samples += micro.count
                progress.advance(generator_loss)
        self._refuse_broken_gradients(f"training epoch {epoch}")
        self.hooks.fire("on_epoch_end", EpochContext("training", epoch, self.global_step, self.model))
        totals = {"num_samples": MetricSum(num_samples, 1, "sum"), **self._skipped(), **skipped_samples(loader)}
        return {**accumulated.result(), **totals}

    def dry_step(self, data: Any) -> None:
        """Run the passes of both steps on one batch of the loader, without hooks and without a step.

        Raises:
            ConfigurationError: No gradient flows from a weighted term.

        Collective: every rank must call.
        """
        step = self._begin(MicroBatch(0, data, True, 1.0, num_samples_of(data)), 0)  # a record's field
        with self.precision.autocast():
            self._generate(step)
            self._add_adversarial_term(step)
        assert step.terms is not None
        for values in (step.terms, *([] if self.metrics is None else [self.metrics(step.prediction, step.batch)])):
            refuse_unusable(values)
        refuse_dead_terms(step.terms)
        self.scalers["generator"].scale(step.terms.total()).backward()  # type: ignore[no-untyped-call]  # torch's
        with self.precision.autocast():
            terms = self._judge(step)
        self.scalers[JUDGE].scale(terms.total()).backward()  # type: ignore[no-untyped-call]  # torch's

    def _begin(self, micro: MicroBatch, epoch: int) -> GANStepContext:
        batch = to_device(micro.data, self.device, channels_last=self.options.channels_last)
        step = GANStepContext(
            "training", epoch, micro.index, self.global_step, micro.ends_window, micro.count, self.model, batch
        )
        step.adversarial_weight = self.adversarial.weight_at(epoch)
        return step

    def _generate(self, step: GANStepContext) -> None:
        """Make images and, if it is the generator's turn, the terms that look at them."""
        (step.real,) = inputs_of(step.batch, [self.adversarial.real])  # a hook may have replaced it
        step.judge = partial(self.judge_batch, self.bare_discriminator, batch=step.batch)
        if not step.trains_generator:
            with torch.no_grad():
                step.prediction = self.forward_batch(self.bare, step.batch)
            return
        step.prediction = self.forward_batch(self.network, step.batch)
        step.terms = self.objective(step.prediction, step.batch, step.epoch)

    def _add_adversarial_term(self, step: GANStepContext) -> None:
        """Add what the frozen, unwrapped discriminator says of the images to the generator's terms."""
        if step.terms is None or step.adversarial_weight == 0:
            return
        real = None
        for parameter in self._judging:
            parameter.requires_grad_(False)  # torch's signature
        fake = self.judge_batch(self.bare_discriminator, step.prediction, step.batch)
        if self.adversarial.criterion.compares:
            with torch.no_grad():
                real = self.judge_batch(self.bare_discriminator, step.real, step.batch)
        for parameter in self._judging:  # the graph of this forward has them as constants by now
            parameter.requires_grad_(True)  # torch's signature
        loss = self.adversarial.criterion.generator_loss(real, fake, step.count)
        step.terms.add("adversarial", loss, step.adversarial_weight)

    def _judge(self, step: GANStepContext) -> TermValues:
        """Judge real and generated images through the wrapper, and return what the discriminator minimises."""
        step.real_logits = self.judge_batch(self.discriminator, step.real, step.batch)
        step.fake_logits = self.judge_batch(self.discriminator, step.prediction.detach(), step.batch)
        step.discriminator_terms = TermValues()
        loss = self.adversarial.criterion.discriminator_loss(step.real_logits, step.fake_logits, step.count)
        step.discriminator_terms.add("adversarial", loss)
        return step.discriminator_terms

    def _due(self, step: GANStepContext) -> dict[str, torch.amp.GradScaler]:
        """Return the optimizers that are to step, each with its scaler."""
        turns = {
            name: step.trains_discriminator if name == JUDGE else step.trains_generator for name in self.optimizers
        }
        return {name: self.scalers.get(name, self.scalers["generator"]) for name, is_due in turns.items() if is_due}

    def _after_window(self, strategy: Any, step: GANStepContext) -> None:
        for scaler in {id(scaler): scaler for scaler in self._due(step).values()}.values():
            scaler.update()
        step.grad_norm = step.grad_norms.get("generator")
        self.global_step += 1
        if self.ema is not None and step.trains_generator:
            self.ema.update()
        if not self._replicas_checked:
            # Once a process: whatever set the replicas apart has done so by the first step.
            strategy.check_replicas(self.model, buffers=False)
            self._replicas_checked = True

    def _refuse_broken_gradients(self, where: str) -> None:
        for name, guard in self.guards.items():
            guard.raise_if_broken(f"{where} ({name})")
        for name, scaler in self.scalers.items():
            refuse_vanished_scale(scaler, self.options.non_finite, f"{where} ({name})")

    def _report(
        self,
        step: GANStepContext,
        generator_loss: Tensor | None,
        discriminator_loss: Tensor | None,
        accumulated: MetricAccumulator,
    ) -> None:
        values: dict[str, Any] = {}
        if generator_loss is not None and step.terms is not None:
            values |= {"loss": generator_loss, **step.terms.values()}
        if discriminator_loss is not None and step.discriminator_terms is not None:
            logits = {"real_logit": step.real_logits, "fake_logit": step.fake_logits}
            means = {name: per_sample(value) for name, value in logits.items() if value is not None}
            values[JUDGE] = {"loss": discriminator_loss, **step.discriminator_terms.values(), **means}
        if self.metrics is not None:
            values |= self.metrics(step.prediction, step.batch, step.epoch).values()
        accumulated.update(values, step.count)
        if step.grad_norms:
            norms = {n: finite_part(norm) if self.guards[n].counts else norm for n, norm in step.grad_norms.items()}
            accumulated.update({"grad_norm": norms}, 1)

    def _skipped(self) -> dict[str, Any]:
        counts = {n: MetricSum(guard.take_num_skipped(), 1, "max") for n, guard in self.guards.items() if guard.counts}
        return {"skipped_steps": counts} if counts else {}
