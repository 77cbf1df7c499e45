"""Progress of one pass over a loader: a bar on a terminal, a few plain lines anywhere else. Tagged by rank."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

from torch import Tensor

from srforge.distributed import get_active_strategy, note_place

# Between two updates of what is shown; also how far the shown loss lags behind.
_BAR_INTERVAL_SECONDS = 0.5
_LINE_INTERVAL_SECONDS = 30.0


class Progress:
    """Shows how far a pass is. Never waits for the device in a step: the loss shown is one interval old.

    Args:
        phase: ``training`` or ``validation``.
        epoch: 0-based.
        total: Number of batches; None if unknown.
        rank: Shown as the tag ``[r0]``.
    """

    def __init__(self, phase: str, epoch: int, total: int | None, rank: int) -> None:
        self._phase, self._epoch = phase, epoch
        self._label = f"[r{rank}] epoch {epoch} {phase}"
        self._total = total
        self._bar: Any = None
        self._count = self._shown = 0
        self._pending: Tensor | None = None  # the loss of the previous interval, long since computed when it is read
        self._started = self._updated = time.monotonic()
        self._interval = _LINE_INTERVAL_SECONDS
        is_terminal = getattr(sys.stderr, "isatty", None)  # a stand-in for the stream may lack it
        if is_terminal is not None and is_terminal():
            from tqdm.auto import tqdm

            self._interval = _BAR_INTERVAL_SECONDS
            position = get_active_strategy().topology.local_rank
            self._bar = tqdm(total=total, desc=self._label, position=position, leave=False, dynamic_ncols=True)

    @classmethod
    def of_loader(cls, phase: str, epoch: int, loader: Any) -> Progress:
        """Make the progress of one pass of this rank over a loader."""
        try:
            total = len(loader)
        except TypeError:  # an iterable data set has no length
            total = None
        return cls(phase, epoch, total, get_active_strategy().rank)

    def advance(self, loss: Tensor | None = None) -> None:
        """Count one batch; ``loss``, shape ``()``, is this rank's own."""
        self._count += 1
        note_place(self._phase, self._epoch, self._count)
        now = time.monotonic()
        if now - self._updated < self._interval:
            return
        self._updated = now
        self._show()
        self._pending = None if loss is None else loss.detach()

    def _show(self) -> None:
        suffix = "" if self._pending is None else f"loss {float(self._pending):.4g}"
        if self._bar is not None:
            self._bar.set_postfix_str(suffix, refresh=False)
            self._bar.update(self._count - self._shown)
            self._shown = self._count
            return
        rate = self._count / max(time.monotonic() - self._started, 1e-9)
        total = "" if self._total is None else f"/{self._total}"
        print_line(f"{self._label} {self._count}{total} {rate:.1f} batches/s {suffix}".rstrip())

    def __enter__(self) -> Progress:  # noqa: PYI034  # Self needs Python 3.11
        note_place(self._phase, self._epoch, 0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
        elif error is None and self._count:
            self._pending = None
            self._show()


def print_line(text: str) -> None:
    """Write a line to standard error in one piece, as several ranks share a file; nothing without a console."""
    if sys.stderr is not None:
        sys.stderr.write(f"{text}\n")
