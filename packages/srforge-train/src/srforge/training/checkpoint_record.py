"""The small JSON beside each checkpoint, which commits it: what it is, and the digest that proves it."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from srforge.training.checkpoint_files import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class CheckpointRecord:
    """One committed checkpoint.

    Attributes:
        path: The ``.pt`` file.
        epoch: The finished epoch (0-based) whose end it holds; training continues with ``epoch + 1``.
        metrics: Reduced metrics of that epoch, flat.
        is_best: Whether it was the best epoch so far when it was written.
        finished: Whether the run was over with it.
        world_size: Number of ranks that wrote it.
        size: Bytes of the ``.pt`` file.
        sha256: Digest of the ``.pt`` file, hexadecimal.
        format_version: Layout of the state; see ``FORMAT_VERSION``.
    """

    path: Path
    epoch: int
    metrics: Mapping[str, float]
    is_best: bool
    finished: bool
    world_size: int
    size: int
    sha256: str
    format_version: int = FORMAT_VERSION


def encode_record(record: CheckpointRecord) -> bytes:
    """Return the JSON text of a record; it carries a digest of itself, so an altered record is noticed too."""
    fields = asdict(record)
    fields["path"] = record.path.name
    # JSON has no NaN or infinity; float("nan") reads the words back.
    fields["metrics"] = {
        name: value if math.isfinite(value) else str(value) for name, value in sorted(record.metrics.items())
    }
    fields["record_sha256"] = _digest(fields)
    return (json.dumps(fields, indent=2, allow_nan=False) + "\n").encode()


def read_record(path: Path) -> CheckpointRecord:
    """Read and check the JSON file of a checkpoint.

    Args:
        path: The ``.json`` file, or the temporary form of it.

    Raises:
        CheckpointError: The file is torn, altered, or of a format that this version cannot read.
        OSError: The file cannot be read at all.
    """
    try:
        fields: dict[str, Any] = json.loads(path.read_bytes().decode())
        stated = fields.pop("record_sha256")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{path} is torn or altered: it is no whole record ({error}).") from error
    if stated != _digest(fields):
        raise CheckpointError(f"{path} is torn or altered: its text does not match its own digest.")
    if fields.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: `format_version` must be {FORMAT_VERSION}, but is {fields.get('format_version')!r}. "
            "Load it with the SR-Forge version that wrote it, or take its weights by warm start."
        )
    try:
        fields["path"] = path.with_name(fields["path"])
        fields["metrics"] = {name: float(value) for name, value in fields["metrics"].items()}
        return CheckpointRecord(**fields)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} is altered: {error}.") from error


def _digest(fields: Mapping[str, Any]) -> str:
    canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()
