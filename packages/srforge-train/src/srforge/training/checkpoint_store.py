"""A folder of checkpoints in which the newest committed one can always be loaded, whatever killed the writer.

Layout: ``epoch-00007.pt`` (``torch.save`` of the state) and ``epoch-00007.json`` (see ``checkpoint_record``), whose
rename is the commit. A save goes: both under dot-names and down to the disk, rename the ``.pt``, rename the JSON. A
removal goes: JSON to a dot-name, remove the ``.pt``, remove the dot-name. So whatever a kill leaves behind carries a
dot-file that says what was under way, and ``remove_litter`` finishes or undoes it.

Plain file code: who calls it, on which rank and when, is the trainer's business.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import torch

from srforge.distributed.errors import ConfigurationError
from srforge.training.checkpoint_files import (
    TEMPORARY_SUFFIX,
    CheckpointError,
    publish,
    remove_quietly,
    sync_folder,
    temporary_path,
    write_temporary,
)
from srforge.training.checkpoint_reading import check_size, is_whole, load_plain, verify
from srforge.training.checkpoint_record import CheckpointRecord, encode_record, read_record
from srforge.training.plain_state import to_plain

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from srforge.training.checkpoint_files import Sink

_NAME = re.compile(r"epoch-(\d{5,})\.(pt|json)")
_REMOVED_SUFFIX = ".removed"


class CheckpointStore:
    """Checkpoints of one run in one folder; see the module's text for the layout.

    Args:
        folder: Made by the first save.
        keep_last: Number of newest checkpoints that stay, >= 1.
        keep_best: Whether the newest one that was saved as best stays as well.

    Raises:
        ConfigurationError: ``keep_last`` is below 1.
    """

    def __init__(self, folder: str | Path, *, keep_last: int = 2, keep_best: bool = True) -> None:
        if keep_last < 1:
            raise ConfigurationError(f"`keep_last` must be at least 1, but is {keep_last}. Set it to 1 or more.")
        self.folder = Path(folder)
        self.keep_last = keep_last
        self.keep_best = keep_best

    def save(
        self,
        state: Mapping[str, Any],
        *,
        epoch: int,
        metrics: Mapping[str, float],
        is_best: bool,
        finished: bool,
        world_size: int,
    ) -> Path:
        """Write one checkpoint, commit it, then drop those that need not stay.

        Args:
            state: Nested state; see ``to_plain`` for what it may hold.
            epoch: The epoch that has just finished, 0-based.
            metrics: Reduced metrics of that epoch, flat.
            is_best: Whether this epoch is the best so far.
            finished: Whether the run is over.
            world_size: Number of ranks of this run.

        Returns:
            Path of the ``.pt`` file.

        Raises:
            CheckpointError: A value could not be read back, or the disk refused. Earlier checkpoints are whole.
        """
        plain = to_plain(state)
        path = self.folder / f"epoch-{epoch:05d}.pt"

        def write_state(sink: Sink) -> None:
            torch.save(plain, cast("IO[bytes]", sink))

        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            sink = write_temporary(path, write_state)
            record = CheckpointRecord(
                path=path,
                epoch=epoch,
                metrics={name: float(value) for name, value in metrics.items()},
                is_best=is_best,
                finished=finished,
                world_size=world_size,
                size=sink.size,
                sha256=sink.sha256,
            )
            write_temporary(path.with_suffix(".json"), lambda sink: sink.write(encode_record(record)))
            publish(path)
            publish(path.with_suffix(".json"))
        except OSError as error:
            if temporary_path(path).exists():  # else the state is in place, and the pending record can still commit it
                remove_quietly(temporary_path(path))
                remove_quietly(temporary_path(path.with_suffix(".json")))
            raise self._write_error(path, error) from error
        self._retain(record)
        return path

    def records(self) -> list[CheckpointRecord]:
        """Return the committed checkpoints, oldest epoch first; what is torn is left out with a warning naming it.

        Sizes are compared, contents are not: ``newest`` and ``load`` do that.
        """
        found = []
        for path in sorted(self._files("json")):
            try:
                record = read_record(path)
                check_size(record)
            except (CheckpointError, OSError) as error:
                warnings.warn(f"Checkpoint skipped: {error}", stacklevel=2)
                continue
            found.append(record)
        return sorted(found, key=lambda record: record.epoch)

    def newest(self) -> CheckpointRecord | None:
        """Return the newest complete checkpoint, its content verified, or None; others are named in a warning."""
        return self._first_whole(reversed(self.records()))

    def best(self) -> CheckpointRecord | None:
        """Return the newest complete checkpoint that was the best when it was saved, or None."""
        return self._first_whole(record for record in reversed(self.records()) if record.is_best)

    def load(self, source: CheckpointRecord | str | Path) -> dict[str, Any]:
        """Read a checkpoint's state onto the CPU after verifying its digest; nothing in the file can run.

        Args:
            source: A record, or the path of a ``.pt`` file with its ``.json`` beside it.

        Raises:
            CheckpointError: The file is missing, torn, altered, not committed, or holds more than plain values.
        """
        if not isinstance(source, CheckpointRecord):
            path = Path(source)
            try:
                source = read_record(path.with_suffix(".json"))
            except OSError as error:
                raise CheckpointError(
                    f"{path} must have its record {path.with_suffix('.json').name} beside it, but: {error}. "
                    "Copy both files, or take the weights alone by warm start."
                ) from error
        try:
            with source.path.open("rb") as file:
                verify(source, file)
                state: dict[str, Any] = load_plain(file, source.path)
        except OSError as error:
            raise CheckpointError(f"{source.path} cannot be read: {error}.") from error
        return state

    def remove_litter(self) -> None:
        """Finish or undo what a killed save or removal left; call it once at launch, before ``newest``.

        Only this store's own names are touched.

        Raises:
            CheckpointError: The folder cannot be written.
        """
        try:
            for path in sorted(self._own_dot_files()):
                self._settle(path)
        except OSError as error:
            raise self._write_error(self.folder, error) from error

    def rewind(self, epoch: int) -> list[str]:
        """Remove the checkpoints of ``epoch`` and later, newest first, so that a kill in between leaves a whole run.

        A launch that goes back calls it, or the next one would continue the branch that was left.

        Returns:
            Names of the removed ``.pt`` files.

        Raises:
            CheckpointError: The folder cannot be written.
        """
        abandoned = [record for record in reversed(self.records()) if record.epoch >= epoch]
        try:
            for record in abandoned:
                self._remove(record.path.with_suffix(".json"))
        except OSError as error:
            raise self._write_error(self.folder, error) from error
        return [record.path.name for record in abandoned]

    def _retain(self, saved: CheckpointRecord) -> None:
        """Drop what need not stay. The file just committed is whole and always stays, so one complete file remains.

        Later epochs than the one just saved are a branch that was left by resuming from an earlier file, or by starting
        over: they go, or the next launch would continue that branch.
        """
        others = [record for record in self.records() if record.epoch != saved.epoch]
        abandoned = [record for record in others if record.epoch > saved.epoch]
        line = [record for record in others if record.epoch < saved.epoch] + [saved]
        kept = line[-self.keep_last :]
        if self.keep_best:
            kept += [record for record in line if record.is_best][-1:]
        try:
            for record in others:
                if record not in kept:
                    self._remove(record.path.with_suffix(".json"))
        except OSError as error:
            warnings.warn(f"{saved.path} is saved, but an older one could not be removed: {error}.", stacklevel=3)
        if abandoned:
            warnings.warn(
                f"{', '.join(record.path.name for record in abandoned)} removed: training went back to {saved.path}.",
                stacklevel=3,
            )

    def _remove(self, json_path: Path) -> None:
        marker = json_path.with_name(f".{json_path.name}{_REMOVED_SUFFIX}")
        json_path.replace(marker)
        json_path.with_suffix(".pt").unlink(missing_ok=True)
        marker.unlink()

    def _settle(self, dot_file: Path) -> None:
        json_path = dot_file.with_name(dot_file.name[1:]).with_suffix("")
        state_path = json_path.with_suffix(".pt")
        if dot_file.name.endswith(f".json{TEMPORARY_SUFFIX}") and is_whole(dot_file):
            publish(json_path)  # the kill came between the two renames: the state is in place
            return
        if json_path.suffix == ".json" and not json_path.exists():
            state_path.unlink(missing_ok=True)
        dot_file.unlink(missing_ok=True)
        sync_folder(self.folder)

    def _first_whole(self, records: Iterable[CheckpointRecord]) -> CheckpointRecord | None:
        for record in records:
            try:
                with record.path.open("rb") as file:
                    verify(record, file)
            except (CheckpointError, OSError) as error:
                warnings.warn(f"Checkpoint skipped: {error}", stacklevel=3)
                continue
            return record
        return None

    def _files(self, kind: str) -> list[Path]:
        if not self.folder.is_dir():
            return []
        matches = ((path, _NAME.fullmatch(path.name)) for path in self.folder.iterdir())
        return [path for path, match in matches if match and match[2] == kind]

    def _own_dot_files(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        own = re.compile(rf"\.{_NAME.pattern}({re.escape(TEMPORARY_SUFFIX)}|{re.escape(_REMOVED_SUFFIX)})")
        return [path for path in self.folder.iterdir() if own.fullmatch(path.name)]

    def _write_error(self, path: Path, error: OSError) -> CheckpointError:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            earlier = [record for record in self.records() if record.path != path]
        previous = f"The previous file {earlier[-1].path} is whole." if earlier else "There is no earlier file."
        return CheckpointError(
            f"{path} could not be written: {error.strerror or error} (errno {error.errno}). {previous}"
        )
