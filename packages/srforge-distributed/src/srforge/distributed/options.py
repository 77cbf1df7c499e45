"""The options of distributed training: one frozen dataclass, checked when it is built."""

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from srforge.distributed.errors import ConfigurationError

STRATEGIES = ("auto", "single", "data_parallel", "ddp")
BACKENDS = ("auto", "nccl", "gloo")
COMPRESSIONS = ("none", "bf16", "fp16")


@dataclass(frozen=True, kw_only=True)
class DistributedOptions:
    """How to train on several devices; every default is right for most runs.

    Attributes:
        strategy: ``auto`` (from the environment and the device), ``single``, ``data_parallel`` or ``ddp``.
        backend: ``auto`` (nccl where CUDA and NCCL are there, else gloo), ``nccl`` or ``gloo``.
        timeout_minutes: How long a collective waits for the other ranks, in minutes, > 0.
        static_graph: The same parameters take part in every step. False for models whose branches change by step.
        find_unused_parameters: Look for parameters without gradient in each step; needs ``static_graph=False``.
        sync_batchnorm: BatchNorm statistics over the batch of all ranks instead of each rank's own. CUDA only.
        gradient_compression: ``none``, ``bf16`` or ``fp16``: the type in which gradients travel.
        check_replicas: Compare the replicas' parameters and buffers after the first step and at each epoch end.

    Raises:
        ConfigurationError: A value is of the wrong type or out of range, or the strategy is not offered (``fsdp``).
    """

    strategy: str = "auto"
    backend: str = "auto"
    timeout_minutes: float = 30.0
    static_graph: bool = True
    find_unused_parameters: bool = False
    sync_batchnorm: bool = False
    gradient_compression: str = "none"
    check_replicas: bool = True

    def __post_init__(self) -> None:
        refuse_fsdp({"strategy": self.strategy})
        _require_choice("strategy", self.strategy, STRATEGIES)
        _require_choice("backend", self.backend, BACKENDS)
        _require_choice("gradient_compression", self.gradient_compression, COMPRESSIONS)
        for name in ("static_graph", "find_unused_parameters", "sync_batchnorm", "check_replicas"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ConfigurationError(f"`{name}` must be true or false, but is {value!r}. Write it without quotes.")
        minutes = self.timeout_minutes
        is_number = isinstance(minutes, (int, float)) and not isinstance(minutes, bool)
        if not (is_number and math.isfinite(minutes) and minutes > 0):
            raise ConfigurationError(
                f"`timeout_minutes` must be a number > 0, but is {minutes!r}. Give the minutes a collective may wait."
            )

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any] | None) -> "DistributedOptions":
        """Build the options from configuration keys.

        Args:
            mapping: Keys are the attribute names; None means all defaults.

        Raises:
            ConfigurationError: A key is unknown (the nearest valid one is named) or a value cannot work.
        """
        mapping = {} if mapping is None else mapping
        refuse_fsdp(mapping)
        known = [field.name for field in fields(cls)]
        for key in mapping:
            if key not in known:
                nearest = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)[0]
                raise ConfigurationError(
                    f"`{key}` must be one of {', '.join(known)}, but is unknown. Did you mean `{nearest}`?"
                )
        return cls(**mapping)

    def changed(self) -> dict[str, Any]:
        """Return the options whose value differs from the default."""
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if getattr(self, field.name) != field.default
        }


def refuse_fsdp(config: Mapping[str, Any]) -> None:
    """Fail loudly where a configuration asks for FSDP, under any of the names that configurations use for it.

    Args:
        config: A whole configuration or a section of it. Looked at: ``strategy``, ``distributed.strategy``,
            ``system.strategy`` and ``system.distributed.strategy``.

    Raises:
        ConfigurationError: One of them says ``fsdp``: nothing is trained under another strategy in its stead.
    """
    for path in (
        ("strategy",),
        ("distributed", "strategy"),
        ("system", "strategy"),
        ("system", "distributed", "strategy"),
    ):
        value: Any = config
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        if isinstance(value, str) and value.strip().lower().startswith("fsdp"):
            raise ConfigurationError(
                f"`{'.'.join(path)}` must be one of {', '.join(STRATEGIES)}, but is {value!r}. "
                "FSDP is not offered: the model must fit on one device; use `ddp`."
            )


def _require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        nearest = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.0)[0]
        raise ConfigurationError(
            f"`{name}` must be one of {', '.join(choices)}, but is {value!r}. Did you mean {nearest!r}?"
        )
