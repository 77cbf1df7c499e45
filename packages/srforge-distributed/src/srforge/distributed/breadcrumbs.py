"""Where each rank is: noted for nothing in the loop, sent to the store twice a second by a thread, read when all is over.

After a timeout this tells in which phase and step every rank was last seen, and which one no longer answers.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import threading
import time
from typing import Any

import torch.distributed as dist

from srforge.distributed.termination import run_bounded

_PERIOD_SECONDS = 0.5
# Of a large fleet each rank reports less often: the store serves about so many reports a second.
_REPORTS_PER_SECOND = 64

_here: tuple[str, int | None, int | None] = ("start", None, None)
_publisher: _Publisher | None = None


def note_place(phase: str, epoch: int | None = None, step: int | None = None) -> None:
    """Note where this process is.

    Args:
        phase: Such as ``training``.
        epoch: 0-based.
        step: 0-based, within the phase.
    """
    global _here  # noqa: PLW0603 - one place per process; a plain assignment is all that a training step pays
    _here = (phase, epoch, step)


class _Publisher:
    """Sends this rank's notes, and reads those of all."""

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self.store = dist.PrefixStore("srforge/seen", store)  # type: ignore[attr-defined]  # torch builds without it exist
        self.rank = rank
        self.world_size = world_size
        self.period = max(_PERIOD_SECONDS, world_size / _REPORTS_PER_SECOND)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="srforge-breadcrumbs", daemon=True)

    def start(self) -> None:
        self._send(0)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join(1.0)

    def read(self) -> list[tuple[int, str]]:
        """Return (reports so far, place in words) of each rank."""
        keys = [str(rank) for rank in range(self.world_size)]
        found = []
        for key in keys:
            beat, phase, epoch, step = (
                json.loads(self.store.get(key)) if self.store.check([key]) else (0, "start", None, None)
            )
            found.append((int(beat), _in_words(phase, epoch, step)))
        return found

    def _run(self) -> None:
        beat = 0
        try:
            while not self._over.wait(self.period):
                beat += 1
                self._send(beat)
        except RuntimeError:
            return  # the store is gone: the run is over, one way or the other

    def _send(self, beat: int) -> None:
        self.store.set(str(self.rank), json.dumps([beat, *_here]))


def start_reporting(store: Any, rank: int, world_size: int) -> None:
    """Start to send this rank's notes to a store that every rank reaches."""
    global _publisher  # noqa: PLW0603 - belongs to the process, as the process group does
    stop_reporting()
    _publisher = _Publisher(store, rank, world_size)
    _publisher.start()
    # A thread that is inside torch when the interpreter goes aborts the process.
    atexit.register(stop_reporting)


def stop_reporting() -> None:
    """Stop to send notes; to be called before the store goes."""
    global _publisher  # noqa: PLW0603 - as above
    if _publisher is not None:
        _publisher.stop()
        _publisher = None
        atexit.unregister(stop_reporting)


def describe_fleet() -> str:
    """Return where each rank was last seen and which no longer answer, in one line; takes some seconds.

    Returns:
        Empty where nothing is known: no fleet, or its store is gone.
    """
    publisher, lines = _publisher, list[str]()
    if publisher is None:
        return ""

    def look() -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone with the rank that hosted it
            before = publisher.read()
            time.sleep(2 * publisher.period)
            for rank, ((old, _), (beat, place)) in enumerate(zip(before, publisher.read(), strict=True)):
                lines.append(f"rank {rank} {'in' if beat > old else 'no longer answers, last in'} {place}")

    # A store that a stopped process hosts never answers.
    run_bounded([look], 2 * publisher.period + 2.0)
    return f"Last seen: {'; '.join(lines)}." if lines else ""


def _in_words(phase: str, epoch: int | None, step: int | None) -> str:
    return phase + ("" if epoch is None else f", epoch {epoch}") + ("" if step is None else f", step {step}")
