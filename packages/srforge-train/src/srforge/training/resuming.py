"""Which checkpoint a launch continues: rank 0 chooses and reads it, every other rank receives it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from srforge.distributed import SRForgeError, get_active_strategy
from srforge.training.checkpoint_files import CheckpointError
from srforge.training.checkpoint_store import CheckpointStore


def read_checkpoint(store: CheckpointStore | None, source: str | Path) -> tuple[dict[str, Any] | None, str]:
    """Return the state to continue from, and the file's name; ``(None, "")`` if there is nothing to continue.

    Separate file systems work, and ranks cannot disagree. An error of rank 0 is raised on every rank.

    Args:
        store: Where the run keeps its checkpoints; None: only a path can be resumed.
        source: ``auto``, ``never`` or a path.

    Raises:
        CheckpointError: The checkpoint cannot be read.

    Collective: every rank must call.
    """
    strategy = get_active_strategy()
    answer: tuple[dict[str, Any] | None, str, str] = (None, "", "")
    if strategy.is_main:
        try:
            answer = (*_read(store, source), "")
        except SRForgeError as error:
            answer = (None, "", str(error))
    state, name, failure = strategy.broadcast_object(answer)
    if failure:
        raise CheckpointError(failure)
    return state, name


def _read(store: CheckpointStore | None, source: str | Path) -> tuple[dict[str, Any] | None, str]:
    if str(source) == "never":
        return None, ""
    if str(source) != "auto":
        folder = store if store is not None else CheckpointStore(Path(source).parent)
        return folder.load(Path(source)), str(source)
    if store is None:
        return None, ""
    store.remove_litter()
    newest = store.newest()
    return (None, "") if newest is None else (store.load(newest), newest.path.name)
