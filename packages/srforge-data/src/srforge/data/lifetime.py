"""No worker and no fork server outlives its rank, however the rank ends.

A worker that a fork server started is the server's child: it is not told when the rank is killed. Both hold the read
end of a pipe whose write end the rank holds, so the kernel can tell them. This module must stay light: the fork server
imports it before torch.
"""

import os
import re
import select
import signal
import sys
import threading
from multiprocessing import current_process, parent_process
from multiprocessing.connection import wait

_POLL_SECONDS = 0.5
_SERVER_COMMAND = re.compile(r"multiprocessing\.forkserver import main; ?main\((\d+), (\d+), ")


def end_with_parent(*, by_signal: bool = sys.platform == "linux") -> None:
    """Make this worker process end as soon as the process that asked for it does.

    A daemon thread waits for that, also where a third process holds the pipe's other end open.

    Args:
        by_signal: The kernel watches the pipe too: it ends the process also while a C call holds the interpreter's lock.
    """
    parent = parent_process()
    if parent is None:
        return  # the rank itself
    watched = [parent.sentinel]
    if by_signal:
        _end_on_eof(int(parent.sentinel))
    if sys.platform == "linux":
        try:
            watched.append(os.pidfd_open(int(parent.pid or 0)))
        except ProcessLookupError:
            os._exit(1)
        except OSError:
            pass  # an old kernel: the pipe is what there is
    threading.Thread(target=_wait_and_end, args=(watched, os.getppid()), name="srforge-lifetime", daemon=True).start()


def guard_fork_server(command_line: list[str] | None = None) -> bool:
    """In a fork server, end it with its rank from now on, and not before; anywhere else, do nothing.

    The server watches its rank by itself once it serves, but for the seconds in which it imports the preloaded
    modules nobody would.

    A launcher sends SIGTERM to a rank's whole process group. A server that ended by it would leave the rank in the belief
    that its workers are dead: one that cannot obey SIGTERM, as it is stopped, would be left behind.

    Args:
        command_line: Of this process; for tests.

    Returns:
        Whether this process is a fork server that is now guarded.
    """
    if sys.platform != "linux":
        return False
    command = " ".join(sys.orig_argv if command_line is None else command_line)
    found = _SERVER_COMMAND.search(command)
    # A worker is forked from the server and has its command line; while it unpickles its task it knows no parent yet.
    is_worker = parent_process() is not None or getattr(current_process(), "_inheriting", False)
    if found is None or is_worker:
        return False
    _end_on_eof(int(found.group(2)))
    # Blocked, not ignored: what is sent to a child that has just been forked waits for it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    os.register_at_fork(after_in_child=_unblock_sigterm)
    return True


def _unblock_sigterm() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _end_on_eof(pipe: int) -> None:
    """Have the kernel send SIGIO, whose default action ends a process, when the pipe's last writer is gone."""
    import fcntl

    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    hung_up = select.poll()
    hung_up.register(pipe, select.POLLIN)
    if hung_up.poll(0):
        os._exit(1)  # the rank died before the kernel was asked


def _wait_and_end(watched: list[int], parent_pid: int) -> None:
    # Forked siblings inherit each other's write ends, so the parent's id is looked at too.
    while not wait(watched, timeout=_POLL_SECONDS):
        if os.getppid() != parent_pid:
            break
    os._exit(1)
