"""Ranks that were told different things are refused by name, before they train something that nobody asked for."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from srforge.distributed.active import get_active_strategy
from srforge.distributed.errors import ConfigurationError


def require_same(what: str, values: Mapping[str, Any]) -> None:
    """Refuse values that must be the same on every rank and are not.

    Args:
        what: What the values are, for the message: ``configuration``.
        values: By name; compared by their ``repr``.

    Raises:
        ConfigurationError: On every rank, if one has other values; names the ranks, the keys and the values.

    Collective: every rank must call. One small one where all agree.
    """
    strategy = get_active_strategy()
    if strategy.world_size == 1:
        return
    own = {name: repr(value) for name, value in values.items()}
    digest = hashlib.sha256(repr(sorted(own.items())).encode()).digest()
    digests = strategy.all_gather(torch.frombuffer(bytearray(digest), dtype=torch.uint8)).tolist()
    if all(other == digests[0] for other in digests):
        return
    everyone: list[dict[str, str]] = strategy.all_gather_object(own)
    parts = [
        f"`{name}` is {everyone[0].get(name, 'missing')} on rank 0 and {told.get(name, 'missing')} on rank {rank}"
        for rank, told in enumerate(everyone)
        for name in sorted({*everyone[0], *told})
        if everyone[0].get(name) != told.get(name)
    ]
    raise ConfigurationError(
        f"`{what}` must be the same on every rank, but {'; '.join(parts[:8])}. Give every rank the same command line and "
        "files."
    )
