"""How a process leaves before its end: finishers get a bounded time, then it is gone, whatever else is stuck.

Destructors, ``atexit`` functions and process groups are not cleaned up on this way: any of them may wait for a rank
that is gone already.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    _Finisher = TypeVar("_Finisher", bound=Callable[[int], object])

# SIGHUP: the terminal was closed (without nohup, which has it ignored); torchrun hands it on. Windows has none.
_TOLD_TO_END = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
SIGINT_EXIT_CODE = 128 + signal.SIGINT

#: Seconds for the finishers of a process that was told to end; launchers kill what stays longer.
SIGNAL_DRAIN_SECONDS = 3.0

_finishers: list[Callable[[int], object]] = []
_finishing = threading.Lock()  # held while a finisher runs at the normal end
_leaving = threading.Lock()  # taken by the thread that ends the process, and never given back
_watching = False


def on_exit(finisher: _Finisher) -> _Finisher:
    """Register what is to be closed however the script ends under ``rank_entrypoint``, such as a tracker's run.

    Args:
        finisher: Called once with the exit code, at the normal end too. After a failure or a signal it runs in a
            thread of its own and gets a few seconds. It must not call collectives.

    Returns:
        The finisher, so that this can be used as a decorator.
    """
    _finishers.append(finisher)
    return finisher


def run_finishers(exit_code: int) -> None:
    """Run the registered finishers in order and forget them; an error of one does not keep the others from running."""
    while _finishers:
        with _finishing:
            _finish(_finishers.pop(0), exit_code)


def leave(exit_code: int, drain_seconds: float, *, last_words: str = "") -> NoReturn:
    """End the process after at most ``drain_seconds``, and a moment for its output.

    Child processes are killed: without clean-up nothing else would end the workers of a loader.

    Args:
        exit_code: What the launcher sees.
        drain_seconds: Time for all finishers together.
        last_words: Printed to stderr once more after finishers that ran, so that the cause stands last.
    """
    try:
        if _leaving.acquire(timeout=drain_seconds):  # else another thread is leaving and had the time for its finishers
            finishers = [_bind(finisher, exit_code) for finisher in _finishers]
            _finishers.clear()
            run_bounded([*finishers, _wait_for_finisher], drain_seconds)
            if finishers and last_words:
                print_bounded(last_words)
        _kill_children()
        run_bounded([sys.stdout.flush, sys.stderr.flush], 1.0)
    finally:  # no thread can be started any more, or there is no standard output: the process ends all the same
        os._exit(exit_code)


def print_bounded(text: str) -> None:
    """Print to stderr without waiting for ever on a full pipe that nobody reads."""
    run_bounded([lambda: print(text, file=sys.stderr, flush=True)], 1.0)  # noqa: T201 - the last words of a process


@contextlib.contextmanager
def leave_on_signals(tag: str, *, interrupt_too: bool, announce: Callable[[str], None]) -> Iterator[None]:
    """Leave with 143 on SIGTERM, 129 on SIGHUP and 130 on SIGINT in the body, also while it is blocked in a collective.

    A Python signal handler runs only when the main thread is back in Python; a blocked collective may keep it away
    until the group's timeout. Here C code writes the signal's number into a socket, and a thread reads it there. A
    handler that the script installed itself stays. Does nothing outside the main thread, where signals cannot be set.

    Args:
        tag: Prefix of what is printed, such as ``[rank 1] ``.
        interrupt_too: Leave at once on SIGINT too, instead of raising KeyboardInterrupt.
        announce: Called with the reason before this process leaves; must end in a moment.
    """
    exit_codes: dict[int, int] = {}
    if threading.current_thread() is threading.main_thread():
        for number in _TOLD_TO_END:
            if signal.getsignal(number) is signal.SIG_DFL:
                exit_codes[number] = 128 + number
        if interrupt_too and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            exit_codes[signal.SIGINT] = SIGINT_EXIT_CODE
    if not exit_codes:
        yield
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    threading.Thread(
        target=_watch, args=(reader, exit_codes, tag, announce), name="srforge-signals", daemon=True
    ).start()
    # In this order no signal is lost in between.
    previous_descriptor = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    previous_handlers = {number: signal.signal(number, _wait_for_the_watcher) for number in exit_codes}
    _set_watching(True)
    try:
        yield
    finally:
        _set_watching(False)
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(previous_descriptor)
        writer.close()  # ends the thread


def _watch(reader: socket.socket, exit_codes: dict[int, int], tag: str, announce: Callable[[str], None]) -> None:
    with reader:
        while numbers := reader.recv(64):
            for number in numbers:
                if number in exit_codes:
                    name = signal.Signals(number).name
                    with contextlib.suppress(Exception):
                        print_bounded(f"{tag}received {name}: leaving with {exit_codes[number]}")
                        announce(f"received {name}")
                    leave(exit_codes[number], SIGNAL_DRAIN_SECONDS)


def _wait_for_the_watcher(_number: int, _frame: object) -> None:
    """Stand as the Python handler, which has to exist for the signal's number to be written to the socket."""


def _set_watching(value: bool) -> None:  # noqa: FBT001 - a setter
    global _watching  # noqa: PLW0603 - signal state belongs to the process, and the fork hook has to see it
    _watching = value


def _restore_signals_in_child() -> None:
    """Give a forked child its signals back: the SIGTERM of a loader worker would end this rank through the socket."""
    if _watching:
        _set_watching(False)
        _finishers.clear()
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(-1)
            for number in (*_TOLD_TO_END, signal.SIGINT):
                if signal.getsignal(number) is _wait_for_the_watcher:
                    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=_restore_signals_in_child)


def _wait_for_finisher() -> None:
    with _finishing:
        pass


def _bind(finisher: Callable[[int], object], exit_code: int) -> Callable[[], object]:
    return lambda: _finish(finisher, exit_code)


def _finish(finisher: Callable[[int], object], exit_code: int) -> None:
    try:
        finisher(exit_code)
    except Exception as error:  # noqa: BLE001 - the process is ending for another reason, which must stay visible
        print_bounded(f"a finisher failed: {type(error).__name__}: {error}")


def run_bounded(functions: Sequence[Callable[[], object]], seconds: float) -> None:
    """Run all functions at once, and stop waiting for them after ``seconds``."""
    deadline = time.monotonic() + seconds
    threads = [threading.Thread(target=function, daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def _kill_children() -> None:
    multiprocessing = sys.modules.get("multiprocessing")
    children = multiprocessing.active_children() if multiprocessing is not None else []
    for child in children:
        with contextlib.suppress(Exception):
            child.kill()
    if children:
        run_bounded([lambda: _remove_shared_memory(children)], 1.0)


def _remove_shared_memory(children: Sequence[Any], folder: Path = Path("/dev/shm")) -> None:  # noqa: S108 - torch's choice
    """Remove what a worker had just created for a tensor and not yet unlinked when it was killed."""
    from multiprocessing.connection import wait

    alive = {child.sentinel for child in children}
    while alive:
        alive -= set(wait(alive))
    for child in children:
        for path in folder.glob(f"torch_{child.pid}_*"):
            path.unlink(missing_ok=True)
