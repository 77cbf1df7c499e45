"""What hooks are given: one small record a point. Fields may be read; those said to be replaceable may be set."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from srforge.training.objective import TermValues


@dataclass(slots=True)
class EpochContext:
    """Given to ``on_epoch_start`` and ``on_epoch_end`` of a runner.

    Attributes:
        phase: ``training`` or ``validation``.
        epoch: 0-based.
        global_step: Optimizer steps taken so far in the whole run.
        model: The model as it is called in this phase.
    """

    phase: str
    epoch: int
    global_step: int
    model: nn.Module


@dataclass(slots=True)
class StepContext:
    """Given to ``on_pre_step``, ``on_post_forward``, ``on_post_backward`` and ``on_post_step`` of a runner.

    A step is one micro-batch; ``ends_window`` tells whether an optimizer step belongs to it.

    Attributes:
        phase: ``training`` or ``validation``.
        epoch: 0-based.
        index: Micro-batch in this epoch, 0-based.
        global_step: Optimizer steps taken so far in the whole run.
        ends_window: The optimizer steps after this micro-batch (always True in validation).
        count: Real samples of this rank in the micro-batch.
        model: The model as it is called in this phase.
        batch: The batch on the device; entries may be replaced at ``on_pre_step``.
        prediction: The model's output; None before the forward. The terms are computed from it before
            ``on_post_forward``; what is put here then is seen by later handlers and by training metrics.
        terms: The values of the objective (training) or the metrics (validation); None before the forward. At
            ``on_post_forward`` values may be replaced and terms added.
        grad_norm: 2-norm of the window's gradient before clipping, float, shape ``()``; None where it is not computed.
    """

    phase: str
    epoch: int
    index: int
    global_step: int
    ends_window: bool
    count: int
    model: nn.Module
    batch: dict[str, Any]
    prediction: Any = None
    terms: TermValues | None = None
    grad_norm: Tensor | None = None


@dataclass(slots=True)
class GANStepContext(StepContext):
    """Given to the step points of a ``GANRunner``, ``on_post_{g,d}_{forward,backward}`` among them.

    Fields of ``StepContext`` speak of the generator.

    Attributes:
        judge: The discriminator past its wrapper, ``images -> logits``: what a penalty calls. Calling the wrapped one once
            more would break the gradient sync.
        trains_generator: May be set at ``on_pre_step``, alike on every rank and for every micro-batch of a window.
        trains_discriminator: As above.
        adversarial_weight: Factor of the adversarial term; may be replaced at ``on_pre_step``.
        real: Real images.
        real_logits: The discriminator's view of them in its own step; None before.
        fake_logits: As above, of the generated ones.
        discriminator_terms: What the discriminator minimises; terms may be added at ``on_post_d_forward``.
        grad_norms: 2-norm of the window's gradient before clipping by optimizer; empty where it is not computed.
    """

    judge: Callable[[Tensor], Tensor] | None = None
    trains_generator: bool = True
    trains_discriminator: bool = True
    adversarial_weight: float = 1.0
    real: Any = None
    real_logits: Tensor | None = None
    fake_logits: Tensor | None = None
    discriminator_terms: TermValues | None = None
    grad_norms: dict[str, Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class RunContext:
    """Given to ``on_training_began``, ``on_epoch_finished`` and ``on_training_finished`` of the trainer.

    Attributes:
        epoch: The epoch that begins, or that just ended, 0-based.
        epochs: Epochs that were asked for.
        global_step: Optimizer steps taken so far in the whole run.
        model: The training model, wrapped.
        metrics: Reduced metrics by section (``training``, ``validation``), the same on every rank; empty at the beginning.
        baseline: Reduced metrics of the baseline prediction by name; empty without a baseline.
        is_best: This epoch has the best monitored value so far.
        best_value: Best monitored value so far; None without a monitor.
        best_epoch: Its epoch.
        stop_reason: Why training ends here; None while it goes on.
        learning_rates: Learning rate of each parameter group, as the next step will use it.
        seconds: Wall-clock time of the epoch, validation included, on this rank.
        training_seconds: Of it, what was spent on training. On a GPU work may still be queued at its end, unless
            `non_finite` is ``raise``, as it is by default.
        num_samples: Real samples that the fleet trained on in the epoch; 0 where unknown.
        resumed_from: Epoch of the checkpoint that this launch continues; None for a fresh run.
    """

    epoch: int
    epochs: int
    global_step: int
    model: nn.Module
    metrics: Mapping[str, Any] = field(default_factory=dict)
    baseline: Mapping[str, Any] = field(default_factory=dict)
    is_best: bool = False
    best_value: float | None = None
    best_epoch: int | None = None
    stop_reason: str | None = None
    learning_rates: tuple[float, ...] = ()
    seconds: float = 0.0
    training_seconds: float = 0.0
    num_samples: float = 0.0
    resumed_from: int | None = None
