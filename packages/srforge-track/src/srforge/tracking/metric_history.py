"""``metrics.jsonl``: one line per epoch, in order, each epoch once, whole after any kill."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from srforge.distributed.errors import ConfigurationError
from srforge.tracking.errors import TrackingError
from srforge.tracking.values import json_number

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class MetricHistory:
    """The lines of one file. A line is ``{"epoch": 3, "training/loss": 0.25, ...}``.

    A new epoch is one append, down to the disk. A second report of the same epoch joins its line, and a rewind drops
    lines: both replace the file in one rename. A line that a kill tore off is dropped by the next launch.

    Args:
        path: The file; it and its folder are made when needed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._last: dict[str, Any] | None = None  # the line that this process wrote last

    def rows(self) -> list[dict[str, Any]]:
        """Return the whole lines, oldest epoch first.

        Raises:
            TrackingError: A line other than the last is not readable: somebody edited the file.
        """
        try:
            lines = self.path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return []
        rows = []
        for number, line in enumerate(lines[:-1], start=1):  # the text after the last newline is empty or torn
            try:
                row = json.loads(line)
                row["epoch"] = int(row["epoch"])
            except (ValueError, KeyError, TypeError) as error:
                raise TrackingError(f"{self.path}, line {number}, must be a line of metrics, but: {error}.") from error
            rows.append(row)
        return rows

    def rewind(self, epoch: int) -> None:
        """Keep only the lines of epochs before ``epoch``.

        Raises:
            TrackingError: The disk refused; the file is as it was.
        """
        self._last = None
        if self.path.exists():
            self._replace([row for row in self.rows() if row["epoch"] < epoch])

    def write(self, epoch: int, metrics: Mapping[str, float]) -> None:
        """Write the line of an epoch, or join its line if this process has just written it.

        Raises:
            ConfigurationError: The file has this epoch or a later one already.
            TrackingError: The disk refused; the file is as it was.
        """
        values = {name: json_number(value) for name, value in metrics.items()}
        if self._last is not None and self._last["epoch"] == epoch:
            self._last |= values
            self._replace([*self.rows()[:-1], self._last])
            return
        if self._last is None:
            rows = self.rows()
            last_epoch = rows[-1]["epoch"] if rows else -1
            if rows:
                self._replace(rows)  # drops a torn end
        else:
            last_epoch = self._last["epoch"]
        if epoch <= last_epoch:
            raise ConfigurationError(
                f"`epoch` must be above {last_epoch}, the last one in {self.path}, but is {epoch}. "
                f"Call rewind({epoch}) to cut the history there, or choose a new folder."
            )
        row = {"epoch": epoch, **values}
        self._append(_line(row))
        self._last = row

    def _append(self, line: bytes) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab", buffering=0) as file:
                size = file.tell()
                try:
                    while line:  # a disk that fills takes a part first and errs on the rest
                        line = line[file.write(line) :]
                    os.fsync(file.fileno())
                except OSError:
                    file.truncate(size)
                    raise
        except OSError as error:
            raise TrackingError(f"{self.path} could not be written: {error}. The lines before are whole.") from error

    def _replace(self, rows: list[dict[str, Any]]) -> None:
        write_whole(self.path, b"".join(_line(row) for row in rows))


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that at every moment it has its old content or all of the new one.

    Raises:
        TrackingError: The disk refused; the file is as it was.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise TrackingError(f"{path} could not be written: {error}. It is as it was.") from error


def _line(row: Mapping[str, Any]) -> bytes:
    return (json.dumps(row, allow_nan=False) + "\n").encode()
