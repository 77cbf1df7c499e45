"""One launch at a time in a run's folder: two would write into one history."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from srforge.distributed import ConfigurationError

# The rank of a killed launch may live on for two seconds, and its workers as long after it.
_PATIENCE_SECONDS = 10.0

# Descriptors, open until this process ends: then the kernel gives the locks back, whatever the end.
_held: dict[Path, int] = {}


def lock_run(folder: Path) -> None:
    """Keep other launches out of a run's folder for as long as this process lives.

    The lock is a file beside the folder, so that a run that starts over does not remove it. Without file locks (on
    Windows) nothing is kept out.

    Raises:
        ConfigurationError: Another process trains in this folder; the message names it.
        OSError: The file beside the folder cannot be written.
    """
    try:
        import fcntl
    except ImportError:
        return
    if folder in _held:
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(folder.with_name(f".{folder.name}.lock"), os.O_RDWR | os.O_CREAT, 0o644)
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(0.2)
                continue
            holder = os.read(file, 1000).decode(errors="replace") or "another process"
            os.close(file)
            raise ConfigurationError(
                f"`run.name` must be of a run that no other launch trains, but {holder} does in {folder}. Wait for it, end "
                "it, or choose another name."
            ) from None
    os.ftruncate(file, 0)
    os.write(file, f"process {os.getpid()} on {socket.gethostname()}".encode())
    _held[folder] = file
