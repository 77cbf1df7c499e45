"""Weights into a run before it, and out of it after it; what a run resumes from is the trainer's business."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from srforge.distributed import get_active_strategy, main_process_only
from srforge.training import CheckpointStore, export_weights, warm_start_model


def start_from_weights(model: nn.Module, run: Mapping[str, Any], checkpoints: CheckpointStore, origin: Path) -> None:
    """Load the weights that ``run.warm_start`` names, unless the run continues from a checkpoint.

    Args:
        model: As ``setup_device`` returned it; averages are to be made after this.
        run: The section of that name.
        checkpoints: Those of the run.
        origin: What a relative path is relative to.

    Raises:
        CheckpointError: The file cannot be read or does not fit; on every rank.

    Collective: every rank must call.
    """
    options = dict(run["warm_start"])
    path = options.pop("path")
    strategy = get_active_strategy()
    if path is None or run["resume"] not in ("auto", "never"):
        return
    is_begun = strategy.is_main and run["resume"] == "auto" and checkpoints.newest() is not None
    if strategy.broadcast_object(is_begun):
        return
    report = warm_start_model(model, origin / path, **options)
    if strategy.is_main:
        print(f"weights from {path}: {report}", flush=True)


@main_process_only
def export_result(checkpoints: CheckpointStore, path: Path) -> None:
    """Write the weights of the best epoch, or of the last one where none is best; their average if there is one.

    Raises:
        CheckpointError: The disk refused.
    """
    record = checkpoints.best() or checkpoints.newest()
    if record is None:
        return
    state = checkpoints.load(record)
    weights = state["model"] if state["ema"] is None else state["ema"]["model"]
    weights = {name: value for name, value in weights.items() if not name.endswith("_extra_state")}  # a module's own
    metadata = {name: str(value) for name, value in record.metrics.items()}
    export_weights(weights, path, metadata={**metadata, "epoch": str(record.epoch)})
    print(f"weights of epoch {record.epoch + 1}: {path}", flush=True)
