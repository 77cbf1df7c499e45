"""Several trackers side by side, behind the interface of one."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from srforge.distributed.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from srforge.tracking.tracker import Tracker


class Trackers:
    """Passes every call on to each tracker, in order; the first one answers for identity and name.

    Args:
        trackers: One or more.

    Raises:
        ConfigurationError: None was given.
    """

    def __init__(self, *trackers: Tracker) -> None:
        if not trackers:
            raise ConfigurationError("`trackers` must be at least one, but are none. Pass NullTracker().")
        self.trackers = trackers

    @property
    def run_id(self) -> str:
        """Identity of the run by the first tracker."""
        return self.trackers[0].run_id

    @property
    def run_name(self) -> str:
        """Name of the run by the first tracker."""
        return self.trackers[0].run_name

    @property
    def is_resumed(self) -> bool:
        """Whether this launch continues from a checkpoint."""
        return self.trackers[0].is_resumed

    def rewind(self, epoch: int) -> None:
        """Rewind each."""
        for tracker in self.trackers:
            tracker.rewind(epoch)

    def log_metrics(self, metrics: Mapping[str, Any], *, epoch: int) -> None:
        """Log to each."""
        for tracker in self.trackers:
            tracker.log_metrics(metrics, epoch=epoch)

    def log_image(self, name: str, image: Any, *, epoch: int) -> None:
        """Log to each."""
        for tracker in self.trackers:
            tracker.log_image(name, image, epoch=epoch)

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Log to each."""
        for tracker in self.trackers:
            tracker.log_config(config)

    def set_summary(self, summary: Mapping[str, Any]) -> None:
        """Set in each."""
        for tracker in self.trackers:
            tracker.set_summary(summary)

    def save_file(self, path: str | Path) -> None:
        """Save in each."""
        for tracker in self.trackers:
            tracker.save_file(path)

    def finish(self, exit_code: int | None = 0) -> None:
        """Finish each, also when one of them fails, which is said."""
        for tracker in self.trackers:
            try:
                tracker.finish(exit_code)
            except Exception as error:  # noqa: BLE001, PERF203 - the others must still end
                warnings.warn(f"{type(tracker).__name__} failed to finish: {error!r}", stacklevel=2)
