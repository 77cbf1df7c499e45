"""What becomes of the ranks when the launcher is killed or told to end, or another launcher runs beside it."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness import kill_session, rank_environment

PROGRAM = Path(__file__).with_name("entrypoint_program.py")


def start(how, folder, log, *, wait=True):
    """Start two ranks under torchrun, and return it and their process ids once both are past their first barrier."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(PROGRAM)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with log.open("wb") as file:
        launcher = subprocess.Popen(
            [*command, how, str(folder)], env=environment, stdout=file, stderr=file, start_new_session=True
        )
    deadline = time.monotonic() + 90
    while wait and len(pids := [text for path in folder.glob("pid-*") if (text := path.read_text())]) < 2:
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
    return launcher, [int(pid) for pid in pids] if wait else []


def is_alive(pid):
    """Whether a process runs; one that nobody reaps has ended too."""
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def seconds_until_gone(pids, limit):
    started = time.monotonic()
    try:
        while any(is_alive(pid) for pid in pids):
            assert time.monotonic() - started < limit, "a rank lives on"
            time.sleep(0.02)
        return time.monotonic() - started
    finally:
        for pid in filter(is_alive, pids):
            os.kill(pid, signal.SIGKILL)


def test_ranks_of_a_killed_torchrun_leave_and_say_why(tmp_path):
    """Rank 0 is blocked in a collective, rank 1 never leaves Python."""
    launcher, pids = start("loop", tmp_path, tmp_path / "log")
    os.kill(launcher.pid, signal.SIGKILL)
    launcher.wait()
    assert seconds_until_gone(pids, 10) < 6  # 2 on a quiet machine
    said = (tmp_path / "log").read_text()
    # One of them may see its peer's end before its own second is over.
    assert re.search(r"\[rank \d\] error: torchrun, which started this rank, is gone", said), said


def test_sigterm_to_torchrun_ends_everything_soon(tmp_path):
    launcher, pids = start("loop", tmp_path, tmp_path / "log")
    started = time.monotonic()
    launcher.send_signal(signal.SIGTERM)
    seconds_until_gone(pids, 30)
    code = launcher.wait(30)
    assert code != 0
    assert time.monotonic() - started < 10
    assert [(tmp_path / f"finished-{rank}").read_text() for rank in range(2)] == ["143", "143"]


@pytest.mark.parametrize("rank", [0, 1])
def test_sigterm_to_one_rank_ends_all_and_is_the_root_cause(tmp_path, rank):
    """A preemption that reaches one rank only."""
    launcher, _ = start("loop", tmp_path, tmp_path / "log")
    started = time.monotonic()
    os.kill(int((tmp_path / f"pid-{rank}").read_text()), signal.SIGTERM)
    code = launcher.wait(60)
    assert code != 0
    assert time.monotonic() - started < 30
    last = (tmp_path / "log").read_text().rpartition("Root Cause (first observed failure):")[2]
    assert f"rank      : {rank}" in last
    assert "exitcode  : 143" in last


def test_killing_a_torchrun_by_the_harness_takes_its_ranks_along(tmp_path):
    launcher, pids = start("loop", tmp_path, tmp_path / "log")
    kill_session(launcher)
    assert seconds_until_gone(pids, 5) < 1


def test_two_standalone_jobs_at_once_do_not_meet(tmp_path):
    """Each finds a port of its own, and its ranks find each other and nobody else."""
    folders = [tmp_path / name for name in ("one", "other")]
    for folder in folders:
        folder.mkdir()
    launchers = [start("end", folder, folder / "log", wait=False)[0] for folder in folders]
    try:
        assert [launcher.wait(100) for launcher in launchers] == [0, 0]
    finally:
        for launcher in launchers:
            kill_session(launcher)
    for folder in folders:
        assert sorted(path.name for path in folder.glob("finished-*")) == ["finished-0", "finished-1"]


def test_taken_port_is_named_with_the_cure():
    """Two jobs on torch's usual port: the second one says what to do, at once."""
    program = "import torch; from srforge.distributed import setup_device; setup_device(torch.nn.Linear(1, 1), 'cpu')"
    with socket.socket() as other_job:
        other_job.bind(("127.0.0.1", 0))
        other_job.listen()
        environment = rank_environment(0, 2, other_job.getsockname()[1])
        ended = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=False
        )
    assert ended.returncode == 1
    cure = "Launch with torchrun --standalone, which finds one, or choose another MASTER_PORT."
    assert ended.stderr.splitlines()[-1].endswith(cure)
