"""Pictures of validation: what the numbers do not show."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
        every: Draw in the first validated epoch, and then in the next one that comes so many epochs later or after that.
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
        self._last: int | None = None  # the epoch that was drawn last

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch that was drawn last; nothing while the interval is one epoch, which needs no memory."""
        return {} if self._every == 1 else {"last": self._last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take it back."""
        self._last = state.get("last")

    @hooks_into("on_post_step")
    @main_process_only
    def log_image(self, context: StepContext) -> None:
        """Draw one batch."""
        # By distance: validation has an interval of its own, and would never meet the multiples of another one.
        is_due = self._last in (None, context.epoch) or context.epoch >= (self._last or 0) + self._every
        if is_due and context.index < self._num_images:
            self._last = context.epoch
            name = self._name if self._num_images == 1 else f"{self._name}-{context.index}"
            self._tracker.log_image(name, self._draw(context.batch, context.prediction), epoch=context.epoch)
