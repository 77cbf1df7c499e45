"""Work that rank 0 does alone while the others wait: at a store key, not in a collective.

A collective would end with the group's timeout however alive rank 0 is. Here a heartbeat tells a busy rank 0 from a
stopped one, and the limit is an option of its own.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from srforge.distributed.breadcrumbs import note_place
from srforge.distributed.errors import CollectiveError
from srforge.distributed.strategy import TrainingStrategy

_HEARTBEAT_SECONDS = 1.0
# Longer than a native call may hold Python's lock, far shorter than a night.
_SILENCE_SECONDS = 60.0
_MESSAGE_AFTER_SECONDS = 10.0
_POLL_SECONDS = (0.001, 0.05)
_FAREWELL_SECONDS = 2.0

# Every rank passes the same turns in the same order, so a count names them.
_turns = itertools.count()


@contextmanager
def main_work(strategy: TrainingStrategy, label: str, timeout_minutes: float = 120.0) -> Iterator[None]:
    """Run a block on every rank; no rank leaves it before rank 0 has.

    What rank 0 does in the block (a save, a gated hook) may last longer than the group's timeout.

    Args:
        strategy: The active one.
        label: What rank 0 does, for messages.
        timeout_minutes: How long the others wait at most, > 0.

    Raises:
        CollectiveError: Rank 0 stopped answering, or the time is up; on the waiting ranks.
        RuntimeError: The store is gone with the process that hosted it; on the waiting ranks.

    Collective: every rank must enter, in the same order.
    """
    if strategy.world_size == 1 or not dist.is_initialized():
        yield
        return
    note_place(label)
    store: Any = dist.PrefixStore("srforge/main_work", dist.distributed_c10d._get_default_store())  # type: ignore[attr-defined]  # noqa: SLF001  # no public way to the store that every rank shares
    turn = str(next(_turns))
    if not strategy.is_main:
        yield
        _wait_for_main(store, turn, f"[r{strategy.rank}] {label}", timeout_minutes * 60)
        return
    finished = threading.Event()
    beating = threading.Thread(target=_beat, args=(store, turn, finished), daemon=True)
    beating.start()
    try:
        yield
        store.set(f"{turn}/done", "1")
        _wait_for_others(store, turn, strategy.world_size - 1)
    finally:
        finished.set()
        beating.join()


def _beat(store: Any, turn: str, finished: threading.Event) -> None:
    while not finished.wait(_HEARTBEAT_SECONDS):
        store.add(f"{turn}/beat", 1)


def _wait_for_others(store: Any, turn: str, count: int) -> None:
    """Wait until the others know: rank 0 may host the store, and its process may end right after this.

    It costs nothing, as the next collective waits for them too. A rank that died is left to that collective.
    """
    deadline, poll = time.monotonic() + _FAREWELL_SECONDS, _POLL_SECONDS[0]
    while store.add(f"{turn}/seen", 0) < count and time.monotonic() < deadline:
        time.sleep(poll)
        poll = min(2 * poll, _POLL_SECONDS[1])


class _Watch:
    """What a thread sees of rank 0: a store behind a cut cable never answers whoever asks it."""

    def __init__(self, store: Any, turn: str) -> None:
        self.over = threading.Event()  # rank 0 is done, or the store is gone
        self.error: RuntimeError | None = None
        self.changed = time.monotonic()  # of rank 0's heartbeat
        self._abandoned = False
        threading.Thread(target=self._run, args=(store, turn), name="srforge-main-work", daemon=True).start()

    def abandon(self) -> None:
        self._abandoned = True

    def _run(self, store: Any, turn: str) -> None:
        beats, poll = 0, _POLL_SECONDS[0]
        try:
            while not self._abandoned and not store.check([f"{turn}/done"]):
                time.sleep(poll)
                poll = min(2 * poll, _POLL_SECONDS[1])
                if poll == _POLL_SECONDS[1] and (seen := store.add(f"{turn}/beat", 0)) != beats:
                    beats, self.changed = seen, time.monotonic()
            store.add(f"{turn}/seen", 1)
        except RuntimeError as error:
            self.error = error
        self.over.set()


def _wait_for_main(store: Any, turn: str, label: str, timeout: float) -> None:
    watch, started, has_told = _Watch(store, turn), time.monotonic(), False
    try:
        while not watch.over.wait(_POLL_SECONDS[1]):
            now = time.monotonic()
            if not has_told and now - started > _MESSAGE_AFTER_SECONDS:
                print(f"{label}: waiting for rank 0, up to {timeout:.0f} s", file=sys.stderr, flush=True)
                has_told = True
            if now - watch.changed > min(_SILENCE_SECONDS, timeout):
                raise CollectiveError(
                    f"{label}: rank 0 must answer while the others wait, but has been silent for "
                    f"{now - watch.changed:.0f} s. It is stopped or stuck, or its host is cut off: look at its log and at "
                    "its stacks (DEBUG_HANG=1)."
                )
            if now - started > timeout:
                raise CollectiveError(
                    f"{label}: rank 0 must be done within {timeout:.0f} s, but is still busy. Raise "
                    "`main_work_timeout_minutes`, or move the work out of the run."
                )
        if watch.error is not None:
            raise watch.error
    finally:
        watch.abandon()
