import gc
import os
import sys
import time

import pytest

from srforge.distributed import orphans, termination
from srforge.distributed.orphans import _is_foster_parent, is_orphan, leave_with_launcher

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="the processes of these tests are forked"),
    # Python warns of forking beside threads; the children here start from this one alone.
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]


def rank_of_a_launcher_that_dies(body, writer):
    """Fork a launcher that forks a rank and dies; the rank runs the body."""
    launcher = os.fork()
    if launcher == 0:
        is_watched, watching = os.pipe()
        rank = os.fork()
        if rank == 0:
            gc.disable()  # objects of threads that the fork left behind
            try:
                os.dup2(writer, 2)
                body(lambda: os.write(watching, b"."))
            finally:
                os._exit(99)
        os.read(is_watched, 1)
        os._exit(0)
    os.waitpid(launcher, 0)


@pytest.mark.parametrize("launched", [True, False])
def test_rank_leaves_within_two_seconds_of_its_torchrun(monkeypatch, launched):
    if launched:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    else:
        monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    reader, writer = os.pipe()

    def body(tell_the_launcher):
        termination._finishers.clear()
        sys.stderr = os.fdopen(2, "w", closefd=False)
        with leave_with_launcher("[rank 1] ", lambda reason: os.write(2, f"told the others: {reason}\n".encode())):
            tell_the_launcher()
            time.sleep(4)
        os.write(2, b"came to its end")

    rank_of_a_launcher_that_dies(body, writer)
    started = time.monotonic()
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()  # ends when the rank has
    seconds = time.monotonic() - started
    if launched:
        assert said.splitlines() == [
            "[rank 1] error: torchrun, which started this rank, is gone: leaving with 1",
            "told the others: torchrun, which started it, is gone",
        ]
        assert seconds < 3.5
    else:
        assert said == "came to its end"


def test_rank_of_a_living_launcher_is_left_alone(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setattr(orphans, "_POLL_SECONDS", 0.01)
    with leave_with_launcher("", print):
        time.sleep(0.1)
        assert not is_orphan()
    assert not is_orphan()


def test_orphan_is_known_by_its_parent_s_id(monkeypatch):
    monkeypatch.setattr(orphans, "_launcher", os.getppid())
    assert not is_orphan()
    monkeypatch.setattr(orphans, "_launcher", -1)
    assert is_orphan()


@pytest.mark.parametrize(
    ("pid", "command", "gone"),
    [
        (1, b"/sbin/init\0", True),
        (1, b"/usr/bin/python3\0/opt/torchrun\0train.py\0", False),
        (1, None, False),
        (2, b"/sbin/init\0", False),
    ],
)
def test_process_1_is_a_launcher_only_if_it_looks_like_one(tmp_path, pid, command, gone):
    if command is not None:
        (tmp_path / "1").mkdir()
        (tmp_path / "1" / "cmdline").write_bytes(command)
    assert _is_foster_parent(pid, tmp_path) is gone
