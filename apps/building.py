"""From configuration to objects: what YAML says with ``_target_`` becomes what it names."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from hydra.errors import HydraException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from srforge.distributed import ConfigurationError, SRForgeError


def build(node: Any, **overrides: Any) -> Any:
    """Instantiate a node of the configuration; None stays None.

    Raises:
        ConfigurationError: What the node names cannot be found, or does not take these arguments.
        SRForgeError: Whatever of ours the named object raised.
    """
    if node is None:
        return None
    failure: SRForgeError
    try:
        return instantiate(node, _convert_="all", **overrides)
    except HydraException as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, SRForgeError):
            cause = cause.__cause__
        failure = cause or ConfigurationError(" ".join(str(error).split()))
    raise failure  # outside the handler: an error whose context is its own consequence would be a ring


def plain(config: DictConfig) -> dict[str, Any]:
    """Return the composed configuration as plain Python values, every interpolation resolved.

    Raises:
        ConfigurationError: A mandatory value is missing, an interpolation leads nowhere, or ``+`` added a key that
            nothing reads; the message names it.
    """
    try:
        missing = OmegaConf.missing_keys(config)
        if missing:
            raise ConfigurationError(f"`{min(missing)}` must be given, but is missing. Add {min(missing)}=VALUE.")
        _refuse_unknown(config)
        container = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:  # an interpolation that leads nowhere
        raise ConfigurationError(" ".join(str(error).split())) from error
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


def _refuse_unknown(config: DictConfig, prefix: str = "") -> None:
    """Refuse what was added with ``+`` to a section whose keys are fixed: it would have no effect."""
    schema = OmegaConf.get_type(config)
    known = {field.name for field in fields(schema)} if is_dataclass(schema) else None
    for name in map(str, config):
        if known is not None and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            advice = f"Did you mean {prefix}{near[0]}?" if near else "Leave it out."
            raise ConfigurationError(f"`{prefix}{name}` must be a key that exists, but is none. {advice}")
        if not OmegaConf.is_missing(config, name) and OmegaConf.is_dict(config[name]):
            _refuse_unknown(config[name], f"{prefix}{name}.")


@dataclass(frozen=True)
class BatchSizes:
    """How many samples a step has.

    Attributes:
        per_rank: Samples of one micro-batch on one rank.
        accumulate: Micro-batches of one optimizer step.
        global_batch: Samples of one optimizer step over all ranks.
    """

    per_rank: int
    accumulate: int
    global_batch: int


def batch_sizes(training: Mapping[str, Any], world_size: int) -> BatchSizes:
    """Work out the batch sizes from what the user gave.

    Raises:
        ConfigurationError: Both sizes are given, one is below 1, or the global one cannot be divided.
    """
    per_rank, global_batch, accumulate = training["batch_size"], training["global_batch_size"], training["accumulate"]
    if per_rank is not None and global_batch is not None:
        raise ConfigurationError(
            f"`training.batch_size` (per rank) and `training.global_batch_size` must not both be given, but are {per_rank} "
            f"and {global_batch}. Set one of them to null."
        )
    for name in ("batch_size", "global_batch_size", "accumulate", "validation_batch_size"):
        if training[name] is not None and training[name] < 1:
            raise ConfigurationError(f"`training.{name}` must be at least 1, but is {training[name]}.")
    if global_batch is None:
        per_rank = 16 if per_rank is None else per_rank
        return BatchSizes(per_rank, accumulate, per_rank * accumulate * world_size)
    shares = accumulate * world_size
    if global_batch % shares != 0 or global_batch < shares:
        raise ConfigurationError(
            f"`training.global_batch_size` must be a multiple of ranks x accumulate = {world_size} x {accumulate}, but is "
            f"{global_batch}. Choose {max(shares, round(global_batch / shares) * shares)}."
        )
    return BatchSizes(global_batch // shares, accumulate, global_batch)
