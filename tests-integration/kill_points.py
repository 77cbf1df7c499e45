"""Where the kill program may die: names for moments of a run, put in from outside.

Nothing in the packages knows of this. ``KillPoints.install`` wraps functions and attaches hooks in the test program's own
process; each passage of a point leaves a note of where the rank is, and the chosen one kills the process at once or
tells the driver, which kills after a delay.
"""

import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from srforge.distributed import get_active_strategy
from srforge.training import Hook, checkpoint_files, checkpoint_store, hooks_into, trainer

#: Every phase in which a run can be killed, in the order in which a launch passes them.
PHASES = (
    "start-up",
    "resume: reading",
    "resume: restored",
    "rehearsal",
    "training",
    "sync",
    "validation",
    "scheduler",
    "save: begun",
    "save: writing the state",
    "save: before the rename",
    "save: between the renames",
    "save: committed",
    "save: removing an older file",
)
#: Passed by rank 0 alone.
OF_RANK_0 = tuple(phase for phase in PHASES if phase.startswith("save") or phase == "resume: reading")
#: Passed once a launch, in no epoch.
OF_A_LAUNCH = PHASES[:4]
_NOTE_SIZE = 96


class KillPoints:
    """Notes each passage, and acts at the target.

    Args:
        folder: Notes are ``r0.now``; ``reached`` tells the driver.
        rank: Of this process.
        target: ``phase``, ``epoch`` (None: any), ``index`` (passages to let go by first), ``rank``, ``action`` (``self``
            or ``tell``); None: nothing happens.
    """

    def __init__(self, folder: str | Path, rank: int, target: dict[str, Any] | None) -> None:
        self.folder = Path(folder)
        self.rank = rank
        self.target = target if target is not None and target["rank"] == rank else None
        self.epoch: int | None = None
        self._passages_left = self.target["index"] if self.target else 0
        self._note = os.open(self.folder / f"r{rank}.now", os.O_WRONLY | os.O_CREAT)

    def reach(self, phase: str) -> None:
        """Note that this rank is here; die, or tell the driver, if this is the target."""
        where = phase if self.epoch is None else f"{phase}, epoch {self.epoch}"
        os.pwrite(self._note, where.ljust(_NOTE_SIZE).encode(), 0)
        if self.target is None or self.target["phase"] != phase or self.target["epoch"] not in (None, self.epoch):
            return
        if self._passages_left > 0:
            self._passages_left -= 1
            return
        if self.target["action"] == "self":
            os.kill(os.getpid(), signal.SIGKILL)
        self.target = None
        self.folder.joinpath("reached").touch()

    def before(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with the point in front of it."""

        @functools.wraps(function)
        def reaching(*args: Any, **kwargs: Any) -> Any:
            self.reach(phase)
            return function(*args, **kwargs)

        return reaching

    def install(self) -> None:
        """Wrap what a launch passes before and outside its epochs; call it once, after ``setup_device``."""
        store = checkpoint_store.CheckpointStore
        trainer.read_checkpoint = self.before("resume: reading", trainer.read_checkpoint)
        restore = trainer.restore_state

        def restored(*args: Any, **kwargs: Any) -> Any:
            standing = restore(*args, **kwargs)
            self.reach("resume: restored")
            return standing

        trainer.restore_state = restored
        trainer.rehearse_training = self.before("rehearsal", trainer.rehearse_training)
        strategy = get_active_strategy()
        strategy.sync_buffers = self.before("sync", strategy.sync_buffers)
        store.save = self.before("save: begun", store.save)
        sink = checkpoint_files.DigestingSink
        sink.write = self.before("save: writing the state", sink.write)
        checkpoint_store.publish = self._around_publish(checkpoint_store.publish)
        store._remove = self.before("save: removing an older file", store._remove)

    def _around_publish(self, publish: Callable[[Path], None]) -> Callable[[Path], None]:
        def publishing(path: Path) -> None:
            self.reach("save: before the rename" if path.suffix == ".pt" else "save: between the renames")
            publish(path)
            if path.suffix == ".json":
                self.reach("save: committed")

        return publishing


class PassingBy(Hook):
    """Makes the points of a runner known: its steps, in ``phase``."""

    def __init__(self, points: KillPoints, phase: str) -> None:
        self.points = points
        self.phase = phase

    @hooks_into("on_pre_step")
    def pass_step(self, context: Any) -> None:
        self.points.epoch = context.epoch
        self.points.reach(self.phase)
