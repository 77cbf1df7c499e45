"""Whichever rank fails, all end soon, and the cause with its rank is the last thing that is told."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness import free_port, kill_session, launch, rank_environment

PROGRAM = Path(__file__).with_name("entrypoint_program.py")


def root_cause(output):
    """The part of torchrun's report that comes last."""
    assert "Root Cause (first observed failure):" in output, output
    return output.rpartition("Root Cause (first observed failure):")[2]


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("raise", "ValueError: the batch is bad"),
        ("configuration", "error: `batch_size` must be > 0, but is 0. Raise it."),
        ("exit", "error: exited with 0 before the end of main"),
        ("kill", "Signal 9 (SIGKILL)"),
    ],
)
def test_cause_and_its_rank_come_last_under_torchrun(tmp_path, how, cause):
    started = time.monotonic()
    ended = launch(PROGRAM, how, str(tmp_path), nproc=2, timeout=100)
    assert ended.returncode != 0
    assert time.monotonic() - started < 60  # the barrier's own limit
    last = root_cause(ended.stderr)
    assert cause in last
    assert "rank      : 1" in last
    if how != "kill":
        assert f"[rank 1] {cause}" in ended.stderr
        assert (tmp_path / "finished-1").read_text() == "1"


@pytest.mark.parametrize("how", ["raise", "exit"])
def test_hydra_outside_changes_nothing(tmp_path, how):
    pytest.importorskip("hydra")
    ended = launch(PROGRAM, how, str(tmp_path), "hydra", nproc=2, timeout=100)
    assert ended.returncode != 0
    last = root_cause(ended.stderr)
    assert "rank      : 1" in last
    assert {"raise": "ValueError: the batch is bad", "exit": "exited with 0 before"}[how] in last


def start(how, folder, world_size):
    """Start the ranks without a launcher, and wait until all are past their first barrier."""
    processes, port = [], free_port()
    for rank in range(world_size):
        environment = rank_environment(rank, world_size, port)
        if world_size == 1:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with (folder / f"log-{rank}").open("wb") as log:
            command = [sys.executable, str(PROGRAM), how, str(folder)]
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True))
    deadline = time.monotonic() + 90
    while len(list(folder.glob("pid-*"))) < world_size:
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.05)
    return processes


def ends(processes, limit):
    """Exit codes, and the seconds that it took."""
    started = time.monotonic()
    try:
        codes = [process.wait(max(0.1, started + limit - time.monotonic())) for process in processes]
        return codes, time.monotonic() - started
    finally:
        for process in processes:
            kill_session(process)


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_ends_ranks_in_a_collective_and_in_a_python_loop(tmp_path, number, exit_code):
    processes = start("loop", tmp_path, 2)
    time.sleep(0.5)  # rank 0 is in its second barrier, which nobody else will reach
    for process in processes:
        process.send_signal(number)
    codes, seconds = ends(processes, 30)
    assert codes == [exit_code, exit_code]
    assert seconds < 5
    if number == signal.SIGTERM:
        assert [(tmp_path / f"finished-{rank}").read_text() for rank in range(2)] == ["143", "143"]
        assert "[rank 0] received SIGTERM: leaving with 143" in (tmp_path / "log-0").read_text()


def test_without_a_launcher_all_ranks_end_and_the_cause_is_in_one_log(tmp_path):
    processes = start("raise", tmp_path, 2)
    codes, seconds = ends(processes, 40)
    assert codes == [1, 1]
    assert seconds < 30
    assert (tmp_path / "log-1").read_text().splitlines()[-1] == "[rank 1] ValueError: the batch is bad"
    assert "[rank 0] Another rank ended first: its own log tells the cause." in (tmp_path / "log-0").read_text()


def test_alone_sigterm_ends_with_143_and_an_error_on_purpose_is_one_line(tmp_path):
    (process,) = start("wait", tmp_path, 1)
    process.send_signal(signal.SIGTERM)
    codes, _ = ends([process], 30)
    assert codes == [143]
    assert (tmp_path / "finished-0").read_text() == "143"
    (tmp_path / "pid-0").unlink()
    codes, _ = ends(start("configuration", tmp_path, 1), 30)
    assert codes == [1]
    assert (tmp_path / "log-0").read_text() == "error: `batch_size` must be > 0, but is 0. Raise it.\n"


def test_normal_end_is_quiet(tmp_path):
    processes = start("end", tmp_path, 2)
    codes, _ = ends(processes, 60)
    assert codes == [0, 0]
    assert [(tmp_path / f"log-{rank}").read_text() for rank in range(2)] == ["", ""]
    assert [(tmp_path / f"finished-{rank}").read_text() for rank in range(2)] == ["0", "0"]
