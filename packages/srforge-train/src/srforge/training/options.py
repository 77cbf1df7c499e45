"""The settings of runners and trainer: frozen, keyword-only, checked where they are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from typing import Any

from srforge.distributed import ConfigurationError

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
COMPILE_MODES = ("off", "default", "reduce-overhead")
NON_FINITE_POLICIES = ("raise", "skip", "ignore")
MONITOR_MODES = ("max", "min")


def require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Refuse a value that is not among the choices.

    Raises:
        ConfigurationError: ``value`` is not in ``choices``.
    """
    if value not in choices:
        # YAML 1.1 reads a bare `off` as false: say what it should be instead of leaving the user to guess.
        hint = ' Write it in quotes: "off".' if value is False and "off" in choices else ""
        raise ConfigurationError(f"`{name}` must be one of {', '.join(choices)}, but is {value!r}.{hint}")


def require_positive(name: str, value: float | None) -> None:
    """Refuse a number that is set and not above zero.

    Raises:
        ConfigurationError: ``value`` is a number <= 0.
    """
    if value is not None and not value > 0:
        raise ConfigurationError(f"`{name}` must be above 0 or null, but is {value!r}.")


def require_count(name: str, value: Any) -> None:
    """Refuse what is set and no whole number above zero.

    Raises:
        ConfigurationError: ``value`` is something else.
    """
    if value is not None and (isinstance(value, bool) or not isinstance(value, Integral)):
        raise ConfigurationError(f"`{name}` must be a whole number above 0, but is {value!r}. Give one, such as 1.")
    require_positive(name, None if value is None else int(value))


@dataclass(frozen=True, kw_only=True)
class RunnerOptions:
    """How a runner computes: precision, speed, and what it does with gradients.

    Args:
        precision: ``fp32``, ``tf32``, ``bf16`` (autocast) or ``fp16`` (autocast with a gradient scaler).
        channels_last: Keep 4-D tensors and weights in the channels-last memory format.
        compile: ``off``, ``default`` or ``reduce-overhead`` (CUDA graphs), for ``torch.compile``.
        deterministic: Ask torch for deterministic kernels; what has none is an error.
        accumulate: Micro-batches per optimizer step, for loaders without a plan (iterable data sets). A loader with a
            plan brings its own number.
        max_norm: Clip the gradient's 2-norm to this value before each optimizer step; None: do not clip. With several
            optimizers each is clipped on its own; ``{name: value}`` gives them values of their own.
        non_finite: What to do about a gradient with NaN or inf: ``raise``, ``skip`` the step, or ``ignore`` it. With fp16
            the scaler skips such steps; ``raise`` then ends a run whose scale has vanished.
        inputs: Keys of the batch that are given to the model's forward, in order.

    Raises:
        ConfigurationError: A value is outside its range.
    """

    precision: str = "fp32"
    channels_last: bool = False
    compile: str = "off"
    deterministic: bool = False
    accumulate: int = 1
    max_norm: float | Mapping[str, float | None] | None = None
    non_finite: str = "raise"
    inputs: tuple[str, ...] = ("lr",)

    def __post_init__(self) -> None:
        require_choice("precision", self.precision, PRECISIONS)
        require_choice("compile", self.compile, COMPILE_MODES)
        require_choice("non_finite", self.non_finite, NON_FINITE_POLICIES)
        for norm in self.max_norm.values() if isinstance(self.max_norm, Mapping) else (self.max_norm,):
            require_positive("max_norm", norm)
        require_count("accumulate", self.accumulate)
        inputs: Any = self.inputs  # from YAML it may be a list, or one name
        object.__setattr__(self, "inputs", (inputs,) if isinstance(inputs, str) else tuple(inputs))

    def max_norm_of(self, optimizer: str) -> float | None:
        """Return the largest gradient norm of the optimizer of that name; None: do not clip."""
        return self.max_norm.get(optimizer) if isinstance(self.max_norm, Mapping) else self.max_norm


@dataclass(frozen=True, kw_only=True)
class TrainerOptions:
    """When to validate, what counts as best, and when to stop.

    Args:
        monitor: Name of the metric that decides which epoch is best, for example ``validation/psnr_y``; None: none.
        mode: ``max`` if a larger monitored value is better, ``min`` if a smaller one is.
        patience: Stop after this many validated epochs without a new best value; None: never.
        validate_every: Validate after every so many epochs (and after the last one).
        max_steps: Stop after this many optimizer steps; None: no limit.
        max_minutes: Stop at the first epoch end after this many minutes of this launch; None: no limit.
        stop_file: Stop at the first epoch end at which this file exists; None: no such file.
        main_work_timeout_minutes: How long rank 0 may work alone (hooks, saves) while the other ranks wait.
        config_text: The configuration of the run as text, kept in each checkpoint.

    Raises:
        ConfigurationError: A value is outside its range.
    """

    monitor: str | None = None
    mode: str = "max"
    patience: int | None = None
    validate_every: int = 1
    max_steps: int | None = None
    max_minutes: float | None = None
    stop_file: Path | None = None
    main_work_timeout_minutes: float = 120.0
    config_text: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        require_choice("mode", self.mode, MONITOR_MODES)
        for name in ("patience", "validate_every", "max_steps"):
            require_count(name, getattr(self, name))
        for name in ("max_minutes", "main_work_timeout_minutes"):
            require_positive(name, getattr(self, name))
        if self.patience is not None and self.monitor is None:
            raise ConfigurationError("`monitor` must be set when `patience` is, but is None. Name the metric to watch.")
