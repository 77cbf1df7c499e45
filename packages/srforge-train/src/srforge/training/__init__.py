"""A training loop that reads top to bottom. Open ``trainer`` first, then ``runners``: that is the machine."""

from srforge.training.accumulator import MetricAccumulator
from srforge.training.adversarial import (
    AdversarialCriterion,
    AdversarialTerm,
    Hinge,
    LeastSquares,
    Relativistic,
    RelativisticAverage,
    Vanilla,
    Wasserstein,
)
from srforge.training.checkpoint_files import CheckpointError
from srforge.training.checkpoint_record import CheckpointRecord
from srforge.training.checkpoint_store import CheckpointStore
from srforge.training.contexts import EpochContext, GANStepContext, RunContext, StepContext
from srforge.training.ema import ExponentialMovingAverage
from srforge.training.gan import GANRunner
from srforge.training.gan_hooks import DiscriminatorWarmup, GradientPenalty, R1Penalty, R2Penalty, StepRatio
from srforge.training.gan_model import GANModel
from srforge.training.gradients import NonFiniteGradientError
from srforge.training.hooks import Hook, hooks_into
from srforge.training.image_logger import ImageLogger
from srforge.training.loss_logger import LossLogger, MetricsLogger
from srforge.training.objective import LinearRamp, Metrics, Objective, Term, TermValues
from srforge.training.options import RunnerOptions, TrainerOptions
from srforge.training.resuming import warm_start_model
from srforge.training.runners import TrainingRunner, ValidationRunner
from srforge.training.schedules import Schedule, warmup_cosine
from srforge.training.stopping import TrainingResult
from srforge.training.trainer import Trainer, UnpreparedModelError
from srforge.training.warm_start import WarmStart, warm_start
from srforge.training.weights_export import export_weights

__all__ = [
    "AdversarialCriterion",
    "AdversarialTerm",
    "CheckpointError",
    "CheckpointRecord",
    "CheckpointStore",
    "DiscriminatorWarmup",
    "EpochContext",
    "ExponentialMovingAverage",
    "GANModel",
    "GANRunner",
    "GANStepContext",
    "GradientPenalty",
    "Hinge",
    "Hook",
    "ImageLogger",
    "LeastSquares",
    "LinearRamp",
    "LossLogger",
    "MetricAccumulator",
    "Metrics",
    "MetricsLogger",
    "NonFiniteGradientError",
    "Objective",
    "R1Penalty",
    "R2Penalty",
    "Relativistic",
    "RelativisticAverage",
    "RunContext",
    "RunnerOptions",
    "Schedule",
    "StepContext",
    "StepRatio",
    "Term",
    "TermValues",
    "Trainer",
    "TrainerOptions",
    "TrainingResult",
    "TrainingRunner",
    "UnpreparedModelError",
    "ValidationRunner",
    "Vanilla",
    "WarmStart",
    "Wasserstein",
    "export_weights",
    "hooks_into",
    "warm_start",
    "warm_start_model",
    "warmup_cosine",
]
