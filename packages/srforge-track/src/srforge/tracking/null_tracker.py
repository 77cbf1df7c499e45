"""The tracker that keeps nothing, so that a loop needs no ``if tracker``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class NullTracker:
    """Takes every call and keeps nothing.

    Args:
        run_id: Answered by ``run_id`` and ``run_name``.
    """

    def __init__(self, run_id: str = "untracked") -> None:
        self.run_id = run_id
        self.run_name = run_id
        self.is_resumed = False

    def rewind(self, epoch: int) -> None:
        """Remember whether the run is resumed."""
        self.is_resumed = epoch > 0

    def log_metrics(self, metrics: Mapping[str, Any], *, epoch: int) -> None:
        """Keep nothing."""

    def log_image(self, name: str, image: Any, *, epoch: int) -> None:
        """Keep nothing."""

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Keep nothing."""

    def set_summary(self, summary: Mapping[str, Any]) -> None:
        """Keep nothing."""

    def save_file(self, path: str | Path) -> None:
        """Keep nothing."""

    def finish(self, exit_code: int | None = 0) -> None:
        """Do nothing."""
