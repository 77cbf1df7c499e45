"""What a tracker is: the few calls that a training run makes, once per fleet, whatever stands behind them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


@runtime_checkable
class Tracker(Protocol):
    """Keeps what a run reports. Every rank calls every method; the effect happens on rank 0 only.

    The one axis is ``epoch``, 0-based. The properties and ``rewind`` answer the same on every rank.
    """

    @property
    def run_id(self) -> str:
        """Identity of the run, stable over its resumes."""

    @property
    def run_name(self) -> str:
        """Name for people."""

    @property
    def is_resumed(self) -> bool:
        """Whether this launch continues from a checkpoint."""

    def rewind(self, epoch: int) -> None:
        """Say that training goes on with ``epoch``: history from there on is cut, so that no epoch stands twice.

        Call it once per launch, before anything is logged; 0 starts over.
        """

    def log_metrics(self, metrics: Mapping[str, Any], *, epoch: int) -> None:
        """Keep the metrics of an epoch.

        Args:
            metrics: Flat or nested mapping of numbers; ``{"training": {"loss": 1}}`` is kept as ``training/loss``.
            epoch: The epoch they belong to, 0-based.
        """

    def log_image(self, name: str, image: Any, *, epoch: int) -> None:
        """Keep an image.

        Args:
            name: Such as ``validation/panel``; slashes make folders.
            image: uint8 array ``(H, W)`` or ``(H, W, 3)``, or tensor ``(C, H, W)`` with 1 or 3 channels, float in
                [0, 1] or uint8.
            epoch: The epoch it belongs to, 0-based.
        """

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Keep the configuration. Values that look like keys or passwords are replaced."""

    def set_summary(self, summary: Mapping[str, Any]) -> None:
        """Keep final results; later values replace earlier ones of the same name."""

    def save_file(self, path: str | Path) -> None:
        """Keep a copy of a file."""

    def finish(self, exit_code: int | None = 0) -> None:
        """End the run within bounded time; further calls do nothing.

        Args:
            exit_code: 0 for success; None asks the tracker to tell from how the interpreter is ending.
        """
