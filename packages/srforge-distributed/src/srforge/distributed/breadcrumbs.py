"""Where each rank is: noted for nothing in the loop, sent to the store twice a second by a thread, read when all is over.

After a timeout this tells in which phase and step every rank was last seen, and which one no longer answers. A rank that
ends before the others leaves its reason there too.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import threading
import time
from typing import Any, NamedTuple

import torch.distributed as dist

from srforge.distributed.termination import run_bounded

_PERIOD_SECONDS = 0.5
# Of a large fleet each rank reports less often: the store serves about so many reports a second.
_REPORTS_PER_SECOND = 64

_FAREWELL_SECONDS = 1.0

#: Reasons to end that may come from another rank's end.
ORPHANED = "torchrun, which started it, is gone"
CONSEQUENCES = ("received SIGTERM", "received SIGHUP", "received SIGINT", ORPHANED)

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


def note_end(reason: str) -> None:
    """Leave word of why this rank ends before the others; takes a second at most.

    Args:
        reason: One line.
    """
    publisher = _publisher
    if publisher is not None:
        run_bounded([lambda: publisher.say_why(reason)], _FAREWELL_SECONDS)


class Sighting(NamedTuple):
    """What the store knows of a rank.

    Attributes:
        rank: Which.
        place: Where it was last seen, in words.
        answers: It reported while this was asked.
        order: How many ranks had left word of their end before it, or None: it has not.
        reason: What it said of its end.
    """

    rank: int
    place: str
    answers: bool
    order: int | None = None
    reason: str = ""

    def __str__(self) -> str:
        if self.order is not None:
            return f"rank {self.rank} ended in {self.place}: {self.reason}"
        return f"rank {self.rank} {'in' if self.answers else 'no longer answers, last in'} {self.place}"


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

    def say_why(self, reason: str) -> None:
        """Store why this rank ends; the first reason that is no consequence of another end is marked as the cause."""
        with contextlib.suppress(RuntimeError):  # the store is gone: nobody is left to be told
            order = self.store.add("ends", 1) - 1
            self.store.set(f"{self.rank}/end", json.dumps([order, reason]))
            if reason not in CONSEQUENCES and self.store.add("causes", 1) == 1:
                self.store.set("cause", str(self.rank))

    def read(self, rank: int) -> tuple[int, str]:
        """Return (reports so far, place in words) of a rank."""
        key = str(rank)
        beat, phase, epoch, step = (
            json.loads(self.store.get(key)) if self.store.check([key]) else (0, "start", None, None)
        )
        return int(beat), _in_words(phase, epoch, step)

    def read_all(self) -> list[tuple[int, str]]:
        """Return what ``read`` does, of every rank."""
        return [self.read(rank) for rank in range(self.world_size)]

    def read_end(self, rank: int) -> tuple[int | None, str]:
        """Return (ranks that ended before, reason) of a rank that left word, else (None, "")."""
        key = f"{rank}/end"
        order, reason = json.loads(self.store.get(key)) if self.store.check([key]) else (None, "")
        return order, reason

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


def first_to_end() -> Sighting | None:
    """Return the first rank that left word of an end with a cause of its own, or None: nobody has, or the store is gone.

    A rank that was told to end, or lost its launcher, may be a victim of another one that died without a word.
    """
    publisher, found = _publisher, list[Sighting]()
    if publisher is None:
        return None

    def look() -> None:
        with contextlib.suppress(RuntimeError):
            if publisher.store.check(["cause"]):
                rank = int(publisher.store.get("cause"))
                found.append(Sighting(rank, publisher.read(rank)[1], False, *publisher.read_end(rank)))

    run_bounded([look], _FAREWELL_SECONDS)
    return found[0] if found else None


def look_at_fleet() -> list[Sighting] | None:
    """Return what is known of each rank, in rank order; takes some seconds.

    Returns:
        None without a fleet; empty where its store no longer answers: it is gone with the process that hosted it, the
        process is stopped, or its host is cut off.
    """
    publisher, sightings = _publisher, list[Sighting]()
    if publisher is None:
        return None

    def look() -> None:
        with contextlib.suppress(RuntimeError):
            before = publisher.read_all()
            time.sleep(2 * publisher.period)
            found = [
                Sighting(rank, place, beat > old or rank == publisher.rank, *publisher.read_end(rank))
                for rank, ((old, _), (beat, place)) in enumerate(zip(before, publisher.read_all(), strict=True))
            ]
            sightings.extend(found)

    run_bounded([look], 2 * publisher.period + 2.0)
    return list(sightings)


def describe_fleet(sightings: list[Sighting] | None) -> str:
    """Return what ``look_at_fleet`` found in one line; empty without a fleet."""
    if sightings is None:
        return ""
    if not sightings:
        return (
            "Last seen: nobody. The host of rank 0, where the ranks report, no longer answers: it ended or is cut off."
        )
    return f"Last seen: {'; '.join(map(str, sightings))}."


def _in_words(phase: str, epoch: int | None, step: int | None) -> str:
    return phase + ("" if epoch is None else f", epoch {epoch}") + ("" if step is None else f", step {step}")
