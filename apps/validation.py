"""Validation of images too large for one forward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from srforge.sr import forward_in_tiles
from srforge.training import ValidationRunner


class TiledValidationRunner(ValidationRunner):
    """Runs the model on tiles of the LR image and puts the results together.

    Attributes:
        tile: Side of a tile in LR pixels; None: whole images.
    """

    tile: int | None = None

    def forward_batch(self, network: Callable[..., Any], batch: Mapping[str, Any]) -> Any:
        """Return the enlarged images."""
        return network(batch["lr"]) if self.tile is None else forward_in_tiles(network, batch["lr"], tile=self.tile)
