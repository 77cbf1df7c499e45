"""A rank whose launcher is gone leaves by itself.

torchrun starts each rank in a session of its own. When torchrun is killed outright nobody tells the ranks: they would
wait at the rendezvous, or train on unseen, for as long as the group's timeout allows.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from srforge.distributed.breadcrumbs import ORPHANED
from srforge.distributed.environment_variables import launched_by_torchrun
from srforge.distributed.termination import SIGNAL_DRAIN_SECONDS, leave, print_bounded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ORPHAN_EXIT_CODE = 1
_POLL_SECONDS = 1.0

_launcher: int | None = None


@contextlib.contextmanager
def leave_with_launcher(tag: str, announce: Callable[[str], None]) -> Iterator[None]:
    """Leave with 1 when the torchrun that started this process is gone during the body.

    Seen through the parent's id, which changes when the parent dies; so what stands between torchrun and the script
    (``--no-python`` and a shell) hides it. Does nothing without torchrun, and on Windows, which keeps the id.

    Args:
        tag: Prefix of what is printed, such as ``[rank 1] ``.
        announce: Called with the reason before this process leaves; must end in a moment.
    """
    if not launched_by_torchrun() or os.name != "posix":
        yield
        return
    global _launcher  # noqa: PLW0603 - the process has one
    parent = _launcher = os.getppid()
    over = threading.Event()
    if _is_foster_parent(parent):
        _leave(tag, announce)
    watcher = threading.Thread(target=_watch, args=(parent, over, tag, announce), name="srforge-launcher", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        _launcher = None


def is_orphan() -> bool:
    """Return whether the torchrun that started this process is gone; ``leave_with_launcher`` says so, and leaves, soon."""
    return _launcher is not None and os.getppid() != _launcher


def _watch(parent: int, over: threading.Event, tag: str, announce: Callable[[str], None]) -> None:
    while not over.wait(_POLL_SECONDS):
        if os.getppid() != parent:
            _leave(tag, announce)


def _leave(tag: str, announce: Callable[[str], None]) -> None:
    print_bounded(f"{tag}error: torchrun, which started this rank, is gone: leaving with {ORPHAN_EXIT_CODE}")
    with contextlib.suppress(Exception):
        announce(ORPHANED)
    leave(ORPHAN_EXIT_CODE, SIGNAL_DRAIN_SECONDS)


def _is_foster_parent(pid: int, proc: Path = Path("/proc")) -> bool:
    """Return whether the parent is process 1 and no launcher: torchrun died while this process was importing.

    In a container torchrun may be process 1 itself.
    """
    if pid != 1:
        return False
    try:
        command = (proc / "1" / "cmdline").read_bytes().lower()
    except OSError:
        return False  # hidden: no reason to leave
    return b"python" not in command and b"torch" not in command
