"""The frame around a script's main function: when one rank fails, all end soon and the cause is on record."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import re
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, ParamSpec, TypeVar

from srforge.distributed.active import get_active_strategy
from srforge.distributed.breadcrumbs import describe_fleet, first_to_end, look_at_fleet, note_end
from srforge.distributed.environment_variables import error_file, full_traceback
from srforge.distributed.errors import ConfigurationError, LaunchEnvironmentError, SRForgeError
from srforge.distributed.orphans import is_orphan, leave_with_launcher
from srforge.distributed.termination import (
    SIGINT_EXIT_CODE,
    leave,
    leave_on_signals,
    print_bounded,
    run_bounded,
    run_finishers,
)
from srforge.distributed.topology import Topology

if TYPE_CHECKING:
    from collections.abc import Callable

_P = ParamSpec("_P")
_R = TypeVar("_R")

#: Seconds for the finishers (trackers) of a rank that fails, before the process ends.
DRAIN_SECONDS = 10.0
#: Seconds that a rank which only lost its peer waits, so that the launcher sees the peer's failure first.
AFTERMATH_SECONDS = 2.0
# A process that is killed closes its connections a moment before its children get another parent.
_REPARENTING_SECONDS = 0.1

# What torch says when the process at the other end of a connection is gone (gloo, NCCL, store).
_LOST_PEER = re.compile(
    r"connection (was )?(likely )?(closed|reset|aborted)|broken pipe|socket closed|got 0 bytes|ncclRemoteError"
    r"|remote process exit",
    re.IGNORECASE,
)
# The same of a time that is up, and of rank 0 in `main_work`.
_OUT_OF_TIME = re.compile(r"timed? ?out|has been silent|is still busy", re.IGNORECASE)


def rank_entrypoint(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Frame a script's main function so that no failure of one rank leaves the others waiting.

    With several ranks, an uncaught exception is printed with the rank on every line and recorded where torchrun looks
    for the root cause; finishers registered with ``on_exit`` get a bounded time, and the process ends without any
    clean-up that could wait for other ranks. ``SystemExit`` before the function returned is a failure even with code
    0, since the other ranks would wait. Ctrl-C, SIGTERM and SIGHUP leave at once, with 130, 143 and 129; a rank whose
    torchrun was killed leaves within two seconds and the time of its finishers. After the normal end, the process group
    is closed when the interpreter exits.

    With one process, exceptions pass through after the finishers, and Ctrl-C ends with 130 and without a traceback.
    Errors of SR-Forge are one line, ``error: ...``, in both cases, unless ``SRFORGE_FULL_TRACEBACK=1``.

    With Hydra put ``@hydra.main`` outermost and this below it.

    Args:
        function: The script's main function.

    Returns:
        The framed function, with the same signature.
    """

    @functools.wraps(function)
    def main(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        topology = _topology()
        several = topology.world_size > 1
        tag = f"[rank {topology.rank}] " if several else ""
        with leave_on_signals(tag, interrupt_too=several, announce=note_end), leave_with_launcher(tag, note_end):
            try:
                result = function(*args, **kwargs)
            except BaseException as error:  # every way out of main ends here
                if several:
                    if topology.rank > 0 and isinstance(error, ConfigurationError):
                        # A mistake in the configuration is made on every rank: rank 0 says it for all, and the launcher
                        # ends this one meanwhile.
                        time.sleep(AFTERMATH_SECONDS)
                    _leave_fleet(error, tag)
                _finish_alone(error)
                raise
            if several:
                note_end("returned from main")
            run_finishers(0)
            # Not now: a sweep calls main again, and the group of a launch can be opened only once.
            atexit.register(get_active_strategy().teardown)
        return result

    return main


def _topology() -> Topology:
    try:
        return Topology.from_environment()
    except LaunchEnvironmentError:  # main will meet the same error; it is shown as any other
        return Topology.single()


def _finish_alone(error: BaseException) -> None:
    """Close what has to be closed before the error of a process that nobody waits for passes on.

    Raises:
        SystemExit: In place of an error of SR-Forge, which has been shown as one line, and of Ctrl-C.
    """
    if isinstance(error, SystemExit):
        run_finishers(_exit_code(error))
    elif isinstance(error, KeyboardInterrupt):
        run_finishers(SIGINT_EXIT_CODE)
        raise SystemExit(SIGINT_EXIT_CODE) from error
    else:
        text = _describe(error)
        _record(error, text)
        run_finishers(1)
        if isinstance(error, SRForgeError):
            print_bounded(text)
            raise SystemExit(1) from error


def _leave_fleet(error: BaseException, tag: str) -> NoReturn:
    """End this process so that the others notice: they may be waiting for it in a collective."""
    if isinstance(error, KeyboardInterrupt):
        leave(SIGINT_EXIT_CODE, 0.0)
    exit_code, last_words = 1, ""
    try:
        exit_code, last_words = _tell(error, tag)
    finally:  # whatever cannot be told, the others must not wait
        leave(exit_code, DRAIN_SECONDS, last_words=last_words)


def _tell(error: BaseException, tag: str) -> tuple[int, str]:
    """Print and record what ended this rank; return its exit code and the line that is to stand last."""
    exit_code = 1
    if isinstance(error, SystemExit):
        exit_code = _exit_code(error) or 1
        text = f"error: exited with {error.code!r} before the end of main, while the other ranks go on. Return instead."
    else:
        text = _describe(error)
    if is_aftermath(error):
        text = _show_aftermath(text, tag)
        _record(error, text)
    else:
        reason = f"exited with {error.code!r}" if isinstance(error, SystemExit) else _in_one_line(error)
        if _is_timeout(error) and (seen := describe_fleet(look_at_fleet())):
            text += f"\n{seen}"
        note_end(reason)
        _record(error, text)
        _print_tagged(text, tag)
    return exit_code, tag + text.splitlines()[-1]


def _show_aftermath(text: str, tag: str) -> str:
    """Print an error that says no more than that another process is gone; return it with what is known of that one."""
    started = time.monotonic()
    time.sleep(_REPARENTING_SECONDS)
    if is_orphan():  # the connection that broke was torchrun's
        time.sleep(AFTERMATH_SECONDS)
        return text
    first = first_to_end()
    if first is None:
        text += "\nAnother rank ended first: its own log tells the cause."
    else:
        text += f"\nRank {first.rank} ended first: {first.reason}. Its own log tells more."
    _print_tagged(text, tag)
    sightings = look_at_fleet()
    # Time for the launcher to see the failure that came first, and to record it as the root cause. torchrun compares
    # whole seconds.
    time.sleep(max(0.0, started + AFTERMATH_SECONDS - time.monotonic()))
    more = [describe_fleet(sightings)]
    silent = [str(each.rank) for each in sightings or [] if not each.answers and each.order is None]
    if silent:
        ranks = f"Rank {silent[0]}" if len(silent) == 1 else f"Ranks {', '.join(silent)}"
        more.append(f"{ranks} died without a word, or the host is cut off: look at the log, and at the host's.")
    for line in filter(None, more):
        _print_tagged(line, tag)
        text += f"\n{line}"
    return text


def _in_one_line(error: BaseException) -> str:
    message = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {message[:200]}" if message else type(error).__name__


def is_aftermath(error: BaseException | None) -> bool:
    """Return whether an error says no more than that another process is gone."""
    return _says(error, _LOST_PEER)


def _is_timeout(error: BaseException | None) -> bool:
    """Return whether an error says that other ranks did not come in time."""
    return _says(error, _OUT_OF_TIME)


def _says(error: BaseException | None, pattern: re.Pattern[str]) -> bool:
    seen: set[int] = set()  # a library that raises an error's own cause makes the chain a ring
    while error is not None and id(error) not in seen:
        if isinstance(error, (RuntimeError, SRForgeError)) and pattern.search(str(error)):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def _exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    return error.code if isinstance(error.code, int) else 1


def _describe(error: BaseException) -> str:
    if isinstance(error, SRForgeError) and not full_traceback():
        return f"error: {error}"
    own_frame = error.__traceback__  # that of `main` here, which tells a reader nothing
    below = own_frame and own_frame.tb_next
    return "".join(traceback.format_exception(type(error), error, below or own_frame)).rstrip()


def _print_tagged(text: str, tag: str) -> None:
    run_bounded([_flush_output], 1.0)
    # One write, so that the lines of two ranks do not mix.
    print_bounded("\n".join(tag + line for line in text.splitlines()))


def _flush_output() -> None:
    with contextlib.suppress(Exception):  # a closed pipe, or no standard output
        sys.stdout.flush()


def _record(error: BaseException, text: str) -> None:
    """Write the failure where torchrun reads the root cause from, in its format."""
    path = error_file()
    if path is None:
        return
    message = {
        "message": f"{type(error).__name__}: {error}",
        "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))},
    }
    try:
        Path(path).write_text(json.dumps({"message": message}), encoding="utf-8")
    except OSError as failure:
        print_bounded(f"the failure could not be recorded in {path}: {failure}")
