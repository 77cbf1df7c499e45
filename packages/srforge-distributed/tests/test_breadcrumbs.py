"""Two ranks of one process: each thread's store is the same one."""

import json
import threading
import time

import pytest
from torch._C._distributed_c10d import HashStore

from srforge.distributed import breadcrumbs, note_place
from srforge.distributed.breadcrumbs import (
    describe_fleet,
    first_to_end,
    look_at_fleet,
    note_end,
    start_reporting,
    stop_reporting,
)


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(breadcrumbs, "_PERIOD_SECONDS", 0.3)
    monkeypatch.setattr(breadcrumbs, "_here", ("start", None, None))
    yield
    stop_reporting()


def test_fleet_is_described_by_phase_epoch_and_step_and_by_who_still_answers():
    store = HashStore()
    store.set("srforge/seen/1", json.dumps([7, "validation", 2, 5]))  # it never reports again
    start_reporting(store, 0, 3)
    note_place("training", 3, 17)
    time.sleep(0.3)
    assert describe_fleet(look_at_fleet()) == (
        "Last seen: rank 0 in training, epoch 3, step 17; rank 1 no longer answers, last in validation, epoch 2, step 5; "
        "rank 2 no longer answers, last in start."
    )


def test_nothing_is_known_without_a_fleet():
    note_end("ValueError: boom")
    assert first_to_end() is None
    assert look_at_fleet() is None
    assert describe_fleet(None) == ""


def test_rank_that_ended_is_told_apart_from_one_that_fell_silent_and_the_first_comes_first():
    store = HashStore()
    start_reporting(store, 2, 3)
    note_end("received SIGTERM")
    assert first_to_end() is None  # it may be a victim
    start_reporting(store, 1, 3)
    note_place("training", 0, 4)
    note_end("ValueError: boom")
    start_reporting(store, 0, 3)
    note_place("validation", 1, 2)
    first = first_to_end()
    assert (first.rank, first.order, first.reason) == (1, 1, "ValueError: boom")
    assert describe_fleet(look_at_fleet()) == (
        "Last seen: rank 0 in validation, epoch 1, step 2; rank 1 ended in start: ValueError: boom; "
        "rank 2 ended in start: received SIGTERM."
    )


def test_word_of_the_end_takes_bounded_time_where_the_store_does_not_answer(monkeypatch):
    monkeypatch.setattr(breadcrumbs, "_FAREWELL_SECONDS", 0.2)
    store = HashStore()
    store.set("srforge/seen/cause", "0")
    start_reporting(store, 0, 1)
    over = threading.Event()

    def hang(_):
        over.wait(60)
        raise RuntimeError("the store is gone")

    monkeypatch.setattr(breadcrumbs._publisher, "say_why", lambda _: over.wait(60))
    monkeypatch.setattr(breadcrumbs._publisher, "read_end", hang)
    started = time.monotonic()
    note_end("ValueError: boom")
    assert first_to_end() is None
    assert time.monotonic() - started < 5
    over.set()


def test_reports_end():
    store = HashStore()
    start_reporting(store, 0, 1)
    stop_reporting()
    before = store.get("srforge/seen/0")
    time.sleep(0.3)
    assert store.get("srforge/seen/0") == before
    assert look_at_fleet() is None


def test_store_that_does_not_answer_takes_bounded_time(monkeypatch):
    start_reporting(HashStore(), 0, 1)
    over = threading.Event()

    def read():
        over.wait(60)
        raise RuntimeError("the store is gone")

    monkeypatch.setattr(breadcrumbs._publisher, "read_all", read)
    started = time.monotonic()
    assert look_at_fleet() == []
    assert "The host of rank 0, where the ranks report, no longer answers" in describe_fleet([])
    assert time.monotonic() - started < 10
    over.set()


def test_a_note_costs_a_training_step_nothing():
    started = time.perf_counter()
    for step in range(10_000):
        note_place("training", 0, step)
    assert (time.perf_counter() - started) / 10_000 < 20e-6  # 0.1 us on a quiet machine
