import io
import re
import sys

import pytest
import torch

from srforge.training import progress as progress_module
from srforge.training.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """A clock that goes on by a quarter of a second at each look."""
    now = [0.0]

    def tick():
        now[0] += 0.25
        return now[0]

    monkeypatch.setattr(progress_module.time, "monotonic", tick)
    return now


def test_a_log_file_gets_a_few_plain_tagged_lines(monkeypatch, clock):
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    with Progress("training", 3, 200, rank=1) as progress:
        for _ in range(200):
            progress.advance(torch.tensor(0.5))
    lines = log.getvalue().splitlines()
    assert 2 <= len(lines) <= 4
    assert "\r" not in log.getvalue()
    assert "\x1b" not in log.getvalue()
    assert all(re.match(r"\[r1\] epoch 3 training \d+/200 [\d.]+ batches/s", line) for line in lines)
    assert lines[-1].startswith("[r1] epoch 3 training 200/200")


def test_the_loss_shown_is_one_interval_old(monkeypatch, clock):
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    with Progress("training", 0, None, rank=0) as progress:
        for step in range(250):
            progress.advance(torch.tensor(float(step)))
    shown = [float(line.rpartition("loss ")[2]) for line in log.getvalue().splitlines() if "loss" in line]
    assert shown == sorted(shown)
    assert shown[0] < 125, "the value of the first interval's end, shown at the second's"


def test_a_terminal_gets_a_bar_tagged_by_rank(monkeypatch, clock):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progress("validation", 2, 8, rank=5) as progress:
        for _ in range(8):
            progress.advance()
    assert "[r5] epoch 2 validation" in terminal.getvalue()


def test_an_empty_pass_and_a_failed_one_print_nothing_more(monkeypatch, clock):
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    with Progress("validation", 0, 0, rank=0):
        pass
    progress = Progress("training", 0, 5, rank=0)
    progress.advance()
    progress.__exit__(ValueError, ValueError("broken"), None)
    assert log.getvalue() == ""
