"""What the training loop needs of the objects it is given: small Protocols, so that no other package is imported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Loader(Protocol):
    """Something that yields batches: a torch ``DataLoader``, or any sized or unsized iterable of mappings."""

    def __iter__(self) -> Iterator[Any]:
        """Start a pass over the data."""
        ...


class Tracker(Protocol):
    """Where metrics, images and the configuration of a run are kept. Every method is called on every rank."""

    def log_metrics(self, metrics: Mapping[str, Any], *, epoch: int) -> None:
        """Keep the metrics of one epoch."""
        ...

    def log_image(self, name: str, image: Any, *, epoch: int) -> None:
        """Keep one picture, uint8, shape ``(H, W, 3)``."""
        ...

    def set_summary(self, summary: Mapping[str, Any]) -> None:
        """Keep values that describe the whole run."""
        ...

    def rewind(self, epoch: int) -> None:
        """Drop what was logged for ``epoch`` and later ones: they are about to be replayed."""
        ...

    def finish(self, exit_code: int = 0) -> None:
        """Close the run; bounded in time."""
        ...
