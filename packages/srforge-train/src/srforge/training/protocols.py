"""What the training loop needs of the objects it is given: small Protocols, so that no other package is imported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from srforge.training.ema import ExponentialMovingAverage
from srforge.training.hooks import HookPoints
from srforge.training.schedules import Schedule


@runtime_checkable
class Loader(Protocol):
    """Something that yields batches: a torch ``DataLoader``, or any sized or unsized iterable of mappings."""

    def __iter__(self) -> Iterator[Any]:
        """Start a pass over the data."""
        ...


class Runner(Protocol):
    """What trainer, rehearsal and checkpoints ask of a training loop, with one optimizer or with several.

    Attributes:
        model: As ``setup_device`` returned it.
        ema: Moving average of the model or of a part; None: none.
        hooks: Its hook points.
        global_step: Optimizer steps taken; steps of several optimizers on the same samples count as one.
    """

    model: nn.Module
    ema: ExponentialMovingAverage | None
    hooks: HookPoints
    global_step: int

    @property
    def optimizers(self) -> Mapping[str, torch.optim.Optimizer]:
        """The optimizers by name."""
        ...

    @property
    def schedules(self) -> Mapping[str, Schedule]:
        """The schedules by name."""
        ...

    @property
    def scalers(self) -> Mapping[str, torch.amp.GradScaler]:
        """The gradient scalers by name."""
        ...

    def run_epoch(self, loader: Any, epoch: int, *, max_steps: int | None = None) -> dict[str, Any]:
        """Train on this rank's share of one epoch, and return its sums and counts."""
        ...

    def dry_step(self, data: Any) -> None:
        """Run the forward and backward passes of one step on a batch of the loader: no hooks, no optimizer step."""
        ...


class Tracker(Protocol):
    """Where metrics, images and the configuration of a run are kept. Every method is called on every rank."""

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Keep the configuration of the run."""
        ...

    def log_metrics(self, metrics: Mapping[str, Any], *, epoch: int) -> None:
        """Keep the metrics of one epoch."""
        ...

    def log_image(self, name: str, image: Any, *, epoch: int) -> None:
        """Keep one picture, uint8, shape ``(H, W, 3)``."""
        ...

    def set_summary(self, summary: Mapping[str, Any]) -> None:
        """Keep values that describe the whole run."""
        ...

    def rewind(self, epoch: int) -> None:
        """Drop what was logged for ``epoch`` and later ones: they are about to be replayed."""
        ...

    def finish(self, exit_code: int = 0) -> None:
        """Close the run; bounded in time."""
        ...
