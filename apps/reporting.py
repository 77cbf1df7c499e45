"""What a person sees of a run: the plan before it, pictures and summaries during it, one line after it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from torch import nn

from assembly import num_steps_of
from building import BatchSizes, build
from srforge.distributed import TrainingStrategy, main_process_only, on_exit
from srforge.sr import panel
from srforge.tracking import NullTracker, Trackers
from srforge.training import Hook, ImageLogger, LossLogger, MetricsLogger, TrainingResult, ValidationRunner


def launch_folder() -> Path:
    """Return the folder that the command was typed in, whatever Hydra changed to."""
    return Path(HydraConfig.get().runtime.cwd)


def build_trackers(nodes: DictConfig, folder: Path) -> Trackers:
    """Build the configured trackers side by side; they are closed on every way out of the script."""
    built = [build(node)(folder=folder) for node in nodes.values()]
    trackers = Trackers(*(built or [NullTracker()]))
    on_exit(trackers.finish)
    return trackers


def build_hooks(trackers: Trackers, validator: ValidationRunner, settings: dict[str, Any]) -> list[Hook]:
    """Build the trainer's hooks, and attach the one that draws pictures to the validation."""
    scale = settings["data"]["scale"]

    def draw(batch: dict[str, Any], prediction: Any) -> Any:
        return panel(batch["lr"][0], prediction[0], batch["hr"][0], scale)

    validator.hooks.attach(ImageLogger(trackers, draw, "validation"))
    return [LossLogger(show_replicas=settings["run"]["show_replicas"]), MetricsLogger(trackers, settings)]


@main_process_only
def announce(
    strategy: TrainingStrategy,
    sizes: BatchSizes,
    train_loader: Any,
    model: nn.Module,
    settings: Mapping[str, Any],
    folder: Path,
) -> None:
    """Print what is about to happen."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"{strategy.world_size} rank(s), strategy {strategy.name} ({strategy.reason}), device {strategy.device}\n"
        f"batch {sizes.per_rank} per rank x {strategy.world_size} ranks x {sizes.accumulate} accumulated = "
        f"{sizes.global_batch} samples a step\n"
        f"{settings['training']['epochs']} epochs, {num_steps_of(train_loader, settings['training'])} steps, "
        f"{parameters:,} parameters\n"
        f"run folder {folder}",
        flush=True,
    )


@main_process_only
def report(result: TrainingResult, settings: dict[str, Any]) -> None:
    """Print how the run ended: the monitored metric against the baseline."""
    monitor = settings["training"]["monitor"]
    section, _, name = (monitor or "").partition("/")
    value = result.metrics.get(section, {}).get(name)
    if value is None:
        print(f"finished after {result.epochs} epochs, {result.global_step} steps", flush=True)
        return
    unit = " dB" if name.startswith("psnr") else ""
    compared = ""
    if name in result.baseline:
        base = result.baseline[name]
        compared = f" ({settings['data']['baseline_name']} {base:.2f}, {value - base:+.2f})"
    best, epoch = result.best_value, result.best_epoch
    after = ""
    if best is not None and epoch is not None and epoch != result.epochs - 1:
        after = f"; best {best:.2f}{unit} in epoch {epoch + 1}"
    print(f"{name} {value:.2f}{unit}{compared}{after}", flush=True)
