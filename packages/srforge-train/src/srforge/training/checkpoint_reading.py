"""Check a checkpoint against its record, and read it without running anything it holds."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, BinaryIO

import torch

from srforge.training.checkpoint_files import CheckpointError, digest_file
from srforge.training.checkpoint_record import read_record

if TYPE_CHECKING:
    from pathlib import Path

    from srforge.training.checkpoint_record import CheckpointRecord


def load_plain(file: BinaryIO, path: Path) -> Any:
    """Unpickle with ``weights_only=True`` onto the CPU.

    Raises:
        CheckpointError: The file holds something other than tensors and plain values, or is no such file.
    """
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        refused = re.search(r"(?:GLOBAL|global|class) ([\w.]+)", str(error))
        reason = f"it asks for {refused[1]}" if refused else str(error).partition("\n")[0]
        raise CheckpointError(
            f"{path} must hold only tensors and plain values, but was refused: {reason}. Nothing in it was run."
        ) from error


def verify(record: CheckpointRecord, file: BinaryIO) -> None:
    """Compare an open state file with its record; the position is at the start afterwards.

    Raises:
        CheckpointError: Size or digest differ.
    """
    check_size(record)
    if digest_file(file) != record.sha256:
        raise CheckpointError(f"{record.path} is altered: its SHA-256 is not the one in its record.")


def check_size(record: CheckpointRecord) -> None:
    """Compare the size of a state file with its record: the cheap part of ``verify``.

    Raises:
        CheckpointError: The file is missing or has another size.
    """
    if not record.path.is_file():
        raise CheckpointError(f"{record.path} is missing, but its record is there.")
    size = record.path.stat().st_size
    if size != record.size:
        raise CheckpointError(f"{record.path} is torn: it must have {record.size} bytes, but has {size}.")


def is_whole(record_path: Path) -> bool:
    """Whether a record, committed or not, matches the state file in place."""
    try:
        record = read_record(record_path)
        with record.path.open("rb") as file:
            verify(record, file)
    except (CheckpointError, OSError):
        return False
    return True
