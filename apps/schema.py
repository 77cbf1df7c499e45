"""The keys of the configuration that have a fixed meaning: an unknown one is refused when the configuration is composed.

What a group's entry builds with ``_target_`` (data, model, objective, ...) has the keys of the class it names instead.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, make_dataclass
from typing import Any, Dict, List, Optional  # noqa: UP035  # OmegaConf reads these annotations at run time

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from srforge.distributed import DistributedOptions


@dataclass
class DataConfig:
    """Data sets and what belongs to them."""

    scale: int = MISSING
    train: Dict[str, Any] = field(default_factory=dict)  # noqa: UP006  # see the import
    validation: Optional[Dict[str, Any]] = None  # noqa: UP006, UP045
    baseline: Optional[Dict[str, Any]] = None  # noqa: UP006, UP045
    baseline_name: str = "baseline"


@dataclass
class SchedulerConfig:
    """When learning rates change."""

    interval: str = "epoch"
    monitor: Optional[str] = None  # noqa: UP045
    factory: Optional[Dict[str, Any]] = None  # noqa: UP006, UP045


@dataclass
class TrainingConfig:
    """How long, in which portions, and how exactly to train.

    ``validation_tile``: side in LR pixels of the tiles in which large images are validated; null: whole images.

    ``batch_size`` is per rank (16 if neither is given); ``global_batch_size`` counts the samples of an optimizer step over
    all ranks and accumulated micro-batches, and divides for you.
    """

    epochs: int = MISSING
    batch_size: Optional[int] = None  # noqa: UP045
    global_batch_size: Optional[int] = None  # noqa: UP045
    accumulate: int = 1
    steps_per_epoch: Optional[int] = None  # noqa: UP045
    tail: str = "exact"
    validation_batch_size: int = 1
    validation_tile: Optional[int] = None  # noqa: UP045
    validate_every: int = 1
    precision: str = "fp32"
    channels_last: bool = False
    compile: str = "off"
    deterministic: bool = False
    max_norm: Optional[float] = None  # noqa: UP045
    non_finite: str = "raise"
    ema_decay: Optional[float] = None  # noqa: UP045
    monitor: Optional[str] = None  # noqa: UP045
    mode: str = "max"
    patience: Optional[int] = None  # noqa: UP045
    max_steps: Optional[int] = None  # noqa: UP045
    max_minutes: Optional[float] = None  # noqa: UP045
    main_work_timeout_minutes: float = 120.0


# The keys, types and defaults of ``srforge.distributed.DistributedOptions``.
DistributedConfig = make_dataclass(
    "DistributedConfig",
    [(option.name, option.type, field(default=option.default)) for option in fields(DistributedOptions)],
)


@dataclass
class SystemConfig:
    """Where to train. Nothing in here changes the result, but for the options of ``distributed`` that say so."""

    device: Any = "auto"
    num_workers: int = 0
    strategy: Optional[str] = None  # noqa: UP045
    distributed: DistributedConfig = field(default_factory=DistributedConfig)  # type: ignore[valid-type]  # made above


@dataclass
class WarmStartConfig:
    """Weights to begin with; without a path the model begins with its own.

    ``prefixes`` maps beginnings of names in the file to those in the model, ``parts`` takes only these attributes of the
    model, ``nest`` is the key under which the weights lie, ``strict`` makes every difference an error.
    """

    path: Optional[str] = None  # noqa: UP045
    prefixes: Dict[str, str] = field(default_factory=dict)  # noqa: UP006
    strict: bool = True
    parts: Optional[List[str]] = None  # noqa: UP006, UP045
    nest: Optional[str] = None  # noqa: UP045


@dataclass
class RunConfig:
    """Name, folder and seed of the run.

    Without a name the folder is ``root/preset-digest``, the digest being that of every key that shapes the result: the
    same command continues its own run. ``resume`` is ``auto``, ``never`` or a checkpoint's path.
    """

    name: Optional[str] = None  # noqa: UP045
    preset: str = "run"
    root: str = "runs"
    seed: Optional[int] = 0  # noqa: UP045
    fresh: bool = False
    resume: str = "auto"
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    keep_last: int = 2
    show_replicas: bool = True


@dataclass
class TrainConfig:
    """The whole configuration of ``train.py``."""

    data: DataConfig = field(default_factory=DataConfig)
    model: Dict[str, Any] = field(default_factory=dict)  # noqa: UP006
    objective: Dict[str, Any] = field(default_factory=dict)  # noqa: UP006
    metrics: Dict[str, Any] = field(default_factory=dict)  # noqa: UP006
    optimizer: Dict[str, Any] = field(default_factory=dict)  # noqa: UP006
    parts: Dict[str, Any] = field(default_factory=dict)  # noqa: UP006  # values of `optimizer` by trainable part
    runner: Dict[str, Any] = field(default_factory=dict)  # noqa: UP006
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    tracking: Dict[str, Any] = field(default_factory=dict)  # noqa: UP006
    system: SystemConfig = field(default_factory=SystemConfig)
    run: RunConfig = field(default_factory=RunConfig)
    strategy: Optional[str] = None  # noqa: UP045  # the same as system.strategy
    dry_run: bool = False


def register() -> None:
    """Make the schema known to Hydra."""
    ConfigStore.instance().store(name="schema", node=TrainConfig)
