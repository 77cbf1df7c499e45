"""Pictures of validation: what the numbers do not show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from srforge.distributed import main_process_only
from srforge.training.contexts import StepContext
from srforge.training.hooks import Hook, hooks_into
from srforge.training.protocols import Tracker


class ImageLogger(Hook):
    """Draws the first batches of rank 0's validation shard and hands the pictures to a tracker.

    Attach it to a validation runner.

    Args:
        tracker: Where pictures are kept.
        draw: Called with the batch and the prediction; returns a picture, uint8, shape ``(H, W, 3)``.
        name: Name of the pictures; numbered if there are several.
        num_images: Batches that are drawn.
        every: Draw after every so many epochs, counted from the first.
    """

    def __init__(
        self,
        tracker: Tracker,
        draw: Callable[[dict[str, Any], Any], Any],
        name: str,
        *,
        num_images: int = 1,
        every: int = 1,
    ) -> None:
        self._tracker = tracker
        self._draw = draw
        self._name = name
        self._num_images = num_images
        self._every = every

    @hooks_into("on_post_step")
    @main_process_only
    def log_image(self, context: StepContext) -> None:
        """Draw one batch."""
        if context.index < self._num_images and context.epoch % self._every == 0:
            name = self._name if self._num_images == 1 else f"{self._name}-{context.index}"
            self._tracker.log_image(name, self._draw(context.batch, context.prediction), epoch=context.epoch)
