"""Plain file work under the checkpoint store: no reader ever meets half a file, and what is written is digested.

No knowledge of epochs, ranks or training belongs here.
"""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING, BinaryIO, Protocol

from srforge.distributed.errors import SRForgeError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TEMPORARY_SUFFIX = ".tmp"
_CHUNK = 1 << 22


class CheckpointError(SRForgeError):
    """A checkpoint could not be written, is not whole, or does not fit."""


class Sink(Protocol):
    """What a writer of file content needs: the part of a binary file that appends."""

    def write(self, chunk: bytes, /) -> int:
        """Append bytes; return how many."""

    def flush(self) -> None:
        """Hand buffered bytes to the operating system."""


class DigestingSink:
    """Append-only file that counts and digests what passes through it.

    ``torch.save`` calls ``write`` from C++, where an exception would end the process or become another one. The first
    one, Ctrl-C included, is kept instead, later bytes are dropped, and ``raise_pending`` raises it once the serializer
    has returned.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self._error: BaseException | None = None
        self.size = 0

    def write(self, chunk: bytes, /) -> int:
        """Append ``chunk`` (any buffer of bytes) unless an earlier write failed."""
        view = memoryview(chunk).cast("B")
        if self._error is None:
            try:
                self._file.write(view)
                self._digest.update(view)
                self.size += view.nbytes
            except BaseException as error:  # noqa: BLE001  # see the class: it is raised later
                self._error = error
        return view.nbytes

    def flush(self) -> None:
        """Flush the file unless an earlier write failed."""
        if self._error is None:
            try:
                self._file.flush()
            except BaseException as error:  # noqa: BLE001  # as above
                self._error = error

    def raise_pending(self) -> None:
        """Raise what a write met.

        Raises:
            OSError: The first error of ``write`` or ``flush``; or ``KeyboardInterrupt``, if it came in one of them.
        """
        if self._error is not None:
            raise self._error

    @property
    def sha256(self) -> str:
        """Digest of the bytes so far, 64 hexadecimal digits."""
        return self._digest.hexdigest()


def temporary_path(path: Path) -> Path:
    """Return the dot-name beside ``path`` under which its content is written, unseen by whoever lists the folder."""
    return path.with_name(f".{path.name}{TEMPORARY_SUFFIX}")


def write_temporary(path: Path, write: Callable[[Sink], object]) -> DigestingSink:
    """Write the future content of ``path`` under its temporary name, down to the disk.

    Args:
        path: The final name; it is not touched.
        write: Called once with the sink to write to.

    Returns:
        The sink, with ``size`` in bytes and ``sha256`` of the content.

    Raises:
        OSError: The disk refused (full, read-only, gone). The temporary file is removed.
    """
    temporary = temporary_path(path)
    try:
        # A new inode each time: a writer that outlived its job keeps writing to its own, unlinked one.
        temporary.unlink(missing_ok=True)
        with temporary.open("xb") as file:
            sink = DigestingSink(file)
            write(sink)
            sink.flush()
            sink.raise_pending()
            os.fsync(file.fileno())
    except BaseException as error:
        remove_quietly(temporary)
        interrupt = error.__context__  # the serializer failed to close a file that it had left
        if isinstance(interrupt, KeyboardInterrupt) and not isinstance(error, OSError):
            raise interrupt from None
        raise
    return sink


def publish(path: Path) -> None:
    """Give the temporary file of ``path`` its final name, replacing what was there, and make the name durable.

    Raises:
        OSError: The rename failed; both names are as they were.
    """
    temporary_path(path).replace(path)
    sync_folder(path.parent)


def write_atomically(path: Path, write: Callable[[Sink], object]) -> DigestingSink:
    """Write ``path`` so that at every moment it is either its old content or all of the new one.

    Raises:
        OSError: The disk refused; ``path`` is as it was.
    """
    sink = write_temporary(path, write)
    try:
        publish(path)
    except BaseException:
        remove_quietly(temporary_path(path))
        raise
    return sink


def sync_folder(folder: Path) -> None:
    """Make renames inside ``folder`` durable. Windows has no such call and needs none."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest_file(file: BinaryIO) -> str:
    """Return the SHA-256 of an open file, 64 hexadecimal digits; its position is at the start afterwards."""
    digest = hashlib.sha256()
    file.seek(0)
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
    file.seek(0)
    return digest.hexdigest()


def remove_quietly(path: Path) -> None:
    """Remove a file if that is possible; for clean-up on a path where a better error is already on its way."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return
