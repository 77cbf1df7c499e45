"""Each test ends a forked child, so that none of them pays for a new interpreter."""

import gc
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from srforge.distributed import termination
from srforge.distributed.termination import leave, leave_on_signals, on_exit, run_finishers

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="the children of these tests are forked"),
    # Python warns of forking beside threads; the children here start from this one alone.
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def _forget():
    yield
    termination._finishers.clear()


def end_of(child, *, signals=(), limit=20.0):
    """Run ``child(ready)`` in a forked process; its exit code, stderr and seconds from the first signal to its end."""
    reader, writer = os.pipe()
    ready_reader, ready_writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        gc.disable()  # objects of threads that the fork left behind
        # A shell's background job starts with SIGINT ignored, and ignored signals are left so.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(writer, 2)
        sys.stderr = os.fdopen(2, "w", closefd=False)
        try:
            child(lambda: os.write(ready_writer, b"x"))
        finally:
            os._exit(99)
    os.close(writer)
    if signals:
        os.read(ready_reader, 1)
    started = time.monotonic()
    for number in signals:
        os.kill(pid, number)
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            break
        if time.monotonic() - started > limit:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise AssertionError(f"the child had not ended after {limit} s")
        time.sleep(0.005)
    seconds = time.monotonic() - started
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.close(ready_reader)
    os.close(ready_writer)
    return os.waitstatus_to_exitcode(status), text, seconds


def say(text):
    os.write(2, text.encode())


def test_leave_runs_finishers_with_the_code_and_says_the_last_words_after_them():
    def child(_ready):
        on_exit(lambda code: say(f"finisher {code}\n"))
        leave(7, 5.0, last_words="[rank 1] ValueError: boom")

    code, text, _ = end_of(child)
    assert code == 7
    assert text == "finisher 7\n[rank 1] ValueError: boom\n"


def test_leave_waits_no_longer_than_it_was_told():
    def child(_ready):
        on_exit(lambda code: time.sleep(60))
        on_exit(lambda code: say("the other one ran\n"))
        leave(1, 0.3)

    code, text, seconds = end_of(child)
    assert (code, text) == (1, "the other one ran\n")
    assert seconds < 10


def test_failing_finisher_keeps_nothing_from_happening():
    def child(_ready):
        on_exit(lambda code: 1 / 0)
        on_exit(lambda code: say("second\n"))
        leave(3, 5.0)

    code, text, _ = end_of(child)
    assert code == 3
    assert "second\n" in text
    assert "a finisher failed: ZeroDivisionError" in text


def test_run_finishers_runs_each_once_in_order():
    seen = []
    on_exit(lambda code: seen.append(("first", code)))
    on_exit(lambda code: seen.append(("second", code)))
    run_finishers(0)
    run_finishers(0)
    assert seen == [("first", 0), ("second", 0)]


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)])
def test_signal_ends_a_process_whose_main_thread_never_returns_to_python(number, exit_code):
    def child(ready):
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # where the tests themselves run under nohup
        on_exit(lambda code: say(f"finisher {code}\n"))
        with leave_on_signals(
            "[rank 1] ", interrupt_too=True, announce=lambda reason: say(f"told the others: {reason}\n")
        ):
            # As in a blocked collective: the main thread is not interrupted, and runs no Python handler.
            signal.pthread_sigmask(signal.SIG_BLOCK, [number])
            lock = threading.Lock()
            lock.acquire()
            ready()
            lock.acquire()

    code, text, seconds = end_of(child, signals=[number])
    assert code == exit_code
    name = signal.Signals(number).name
    assert text.splitlines() == [
        f"[rank 1] received {name}: leaving with {exit_code}",
        f"told the others: received {name}",
        f"finisher {exit_code}",
    ]
    assert seconds < 5


def test_sigterm_ends_an_endless_python_loop():
    def child(ready):
        with leave_on_signals("", interrupt_too=False, announce=print):
            ready()
            while True:
                pass

    code, _, seconds = end_of(child, signals=[signal.SIGTERM])
    assert code == 143
    assert seconds < 5


def test_interrupt_stays_python_s_when_alone():
    def child(ready):
        with leave_on_signals("", interrupt_too=False, announce=print):
            try:
                ready()
                time.sleep(30)
            except KeyboardInterrupt:
                os._exit(5)

    assert end_of(child, signals=[signal.SIGINT])[0] == 5


def test_finisher_that_is_at_work_when_the_signal_comes_gets_its_time():
    def finish(_code):
        ready_to_be_killed()
        time.sleep(1)
        say("finished\n")

    def child(ready):
        nonlocal ready_to_be_killed
        ready_to_be_killed = ready
        on_exit(finish)
        with leave_on_signals("", interrupt_too=True, announce=lambda _: None):
            run_finishers(0)
            time.sleep(30)

    ready_to_be_killed = None
    code, text, _ = end_of(child, signals=[signal.SIGTERM])
    assert code == 143
    assert text.splitlines() == ["received SIGTERM: leaving with 143", "finished"]


def test_process_that_cannot_start_threads_any_more_leaves_all_the_same():
    def child(ready):
        with leave_on_signals("", interrupt_too=True, announce=lambda _: None):
            time.sleep(0.1)  # for the watcher to be up

            def refuse(*_):
                raise RuntimeError("can't start new thread")

            threading.Thread.start = refuse
            ready()
            time.sleep(30)

    assert end_of(child, signals=[signal.SIGTERM])[0] == 143


def test_hangup_that_nohup_has_ignored_stays_ignored():
    def child(ready):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with leave_on_signals("", interrupt_too=True, announce=print):
            ready()
            time.sleep(1)
            os._exit(7)

    assert end_of(child, signals=[signal.SIGHUP])[0] == 7


def test_handler_of_the_script_stays():
    def child(ready):
        signal.signal(signal.SIGTERM, lambda *_: os._exit(6))
        with leave_on_signals("", interrupt_too=True, announce=print):
            ready()
            time.sleep(30)

    assert end_of(child, signals=[signal.SIGTERM])[0] == 6


def test_terminated_forked_worker_does_not_end_its_rank():
    def child(ready):
        with leave_on_signals("", interrupt_too=False, announce=print):
            worker = os.fork()
            if worker == 0:
                time.sleep(30)
                os._exit(0)
            time.sleep(0.2)
            os.kill(worker, signal.SIGTERM)
            _, status = os.waitpid(worker, 0)
            time.sleep(0.3)  # time for the watcher to do the wrong thing
            os._exit(8 if os.waitstatus_to_exitcode(status) == -signal.SIGTERM else 9)

    assert end_of(child)[0] == 8


def test_leaving_removes_the_shared_memory_that_a_killed_worker_was_creating():
    def work(connection):
        path = Path(f"/dev/shm/torch_{os.getpid()}_12345_0")
        path.write_text("")
        connection.send(str(path))
        time.sleep(60)

    def child(_ready):
        import multiprocessing

        context = multiprocessing.get_context("fork")
        here, there = context.Pipe()
        context.Process(target=work, args=(there,)).start()
        say(here.recv())
        leave(1, 1.0)

    _, path, _ = end_of(child)
    assert path.startswith("/dev/shm/torch_")
    assert not Path(path).exists()


def test_leaving_takes_the_child_processes_along():
    def child(_ready):
        import multiprocessing

        worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        worker.start()
        say(str(worker.pid))
        leave(1, 1.0)

    _, text, _ = end_of(child)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.kill(int(text), 0)
        except ProcessLookupError:
            return
        state = Path("/proc", text, "stat")
        if state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z":  # nobody is there to reap it
            return
        time.sleep(0.05)
    pytest.fail("the worker outlived its parent")


def test_outside_the_main_thread_signals_are_left_alone():
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def body():
        with leave_on_signals("", interrupt_too=True, announce=print):
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [before]
