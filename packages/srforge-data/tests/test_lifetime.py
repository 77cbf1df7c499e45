import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from srforge.data.lifetime import end_with_parent, guard_fork_server

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal on a pipe is Linux's")


def wait_forever(by_signal, answers):
    end_with_parent(by_signal=by_signal)
    answers.put(os.getpid())
    time.sleep(3600)


def start_and_die(by_signal, third, answers):
    context = multiprocessing.get_context("fork")
    context.Process(target=wait_forever, args=(by_signal, answers)).start()
    if third:
        context.Process(target=time.sleep, args=(30,)).start()
    answers.put("all started")
    time.sleep(3600)


@linux_only
@pytest.mark.parametrize(("by_signal", "third"), [(True, False), (False, False), (True, True)])
def test_worker_ends_when_its_parent_is_killed_also_if_a_third_process_holds_the_pipe(by_signal, third):
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    parent = context.Process(target=start_and_die, args=(by_signal, third, answers))
    parent.start()
    (worker,) = {answers.get(), answers.get()} - {"all started"}
    pids = [child.pid for child in psutil.Process(parent.pid).children()]
    assert worker in pids
    assert len(pids) == 1 + third
    os.kill(parent.pid, signal.SIGKILL)
    parent.join()
    began = time.monotonic()
    while is_running(worker) and time.monotonic() - began < 2.0:
        time.sleep(0.01)
    outlived = is_running(worker)
    for pid in filter(is_running, pids):
        os.kill(pid, signal.SIGKILL)
    assert not outlived


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_rank_itself_is_left_alone():
    end_with_parent()  # a process without a multiprocessing parent
    assert "srforge-lifetime" not in [thread.name for thread in threading.enumerate()]


def test_only_a_fork_server_is_guarded():
    assert not guard_fork_server(["python", "-c", "print()"])
    assert not guard_fork_server(["python", "train.py", "--resume"])


@linux_only
def test_a_worker_that_still_unpickles_its_task_is_not_taken_for_its_server(monkeypatch):
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    assert not guard_fork_server(["-c", "from multiprocessing.forkserver import main; main(99, 98, [], **{})"])


@linux_only
def test_fork_server_ends_when_the_last_writer_of_its_pipe_is_gone():
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:  # the code of the command line is the interpreter's own
        os.close(write_end)
        command = f"from multiprocessing.forkserver import main; main(5, {read_end}, ['torch'], **{{}})"
        if guard_fork_server(["python", "-c", command]):
            time.sleep(30)
        os._exit(4)
    os.close(read_end)
    time.sleep(0.2)
    os.close(write_end)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) in (-signal.SIGIO, 1)  # 1: the pipe was closed before it was watched


@linux_only
def test_fork_server_outlives_sigterm_and_its_children_do_not():
    """Else a rank would take its workers for dead when the server is told to end, and leave a stopped one behind."""
    read_end, write_end = os.pipe()
    told, tell = os.pipe()
    server = os.fork()
    if server == 0:
        os.close(write_end)
        guard_fork_server(["-c", f"from multiprocessing.forkserver import main; main(5, {read_end}, [], **{{}})"])
        os.kill(os.getpid(), signal.SIGTERM)
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(4)
        os.write(tell, str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())
        time.sleep(30)
        os._exit(4)
    os.close(read_end)
    assert int(os.read(told, 10)) == -signal.SIGTERM
    os.close(write_end)
    assert os.waitstatus_to_exitcode(os.waitpid(server, 0)[1]) in (-signal.SIGIO, 1)


@linux_only
def test_a_parent_that_is_gone_already_ends_the_process_at_once():
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(write_end)
        time.sleep(0.2)
        guard_fork_server(["-c", f"from multiprocessing.forkserver import main; main(5, {read_end}, [], **{{}})"])
        os._exit(4)
    os.close(read_end)
    os.close(write_end)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
