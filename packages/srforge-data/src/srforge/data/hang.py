"""Hang reports: with ``DEBUG_HANG`` every process of the rank dumps the stacks of all its threads again and again.

``faulthandler`` writes them from a C thread of its own into ``hang/r0.txt`` (the rank) and ``hang/r0-w1.txt`` (its
worker 1), so they come also while the interpreter's lock is held. One small process per rank copies the files to
stderr line by line with a tag: it is not stuck when the rank is.
"""

import atexit
import faulthandler
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from srforge.data.environment_variables import hang_period, launched_rank, switch_on_flight_recorder

FOLDER = "hang"

_report: "HangReport | None" = None
_armed: IO[str] | None = None  # faulthandler keeps the file's descriptor, not the file: it must stay open
_copier: subprocess.Popen[bytes] | None = None


@dataclass(frozen=True)
class HangReport:
    """What a process needs to report hangs; travels to the workers.

    Attributes:
        period: Seconds between two dumps, > 0.
        folder: Absolute folder of the files.
        rank: Rank whose process, or whose worker, reports.
    """

    period: float
    folder: str
    rank: int


def arm_hang_reports() -> HangReport | None:
    """Start the reports of the rank's own process when ``DEBUG_HANG`` asks for them; again is harmless.

    Returns:
        What its workers need to do the same, or None when reports are off.

    Raises:
        ConfigurationError: ``DEBUG_HANG`` is neither a switch nor a positive number.
    """
    global _report, _copier  # noqa: PLW0603 - one report and one copier per process
    period = hang_period()
    if period is None or _report is not None:
        return _report  # the folder stays where it was, also after a change of the working folder
    _report = HangReport(period, str(Path(FOLDER).absolute()), launched_rank())
    folder = Path(_report.folder)
    folder.mkdir(parents=True, exist_ok=True)
    for stale in [*folder.glob(f"r{_report.rank}.txt"), *folder.glob(f"r{_report.rank}-*.txt")]:
        stale.unlink(missing_ok=True)
    switch_on_flight_recorder(folder)
    _dump_forever(_report, f"r{_report.rank}")
    _copier = _start_copier(_report)
    return _report


def arm_worker(report: HangReport, worker: int, loader: int) -> None:
    """Start the reports of a worker process.

    Args:
        report: What the rank's ``arm_hang_reports`` returned.
        worker: Number of the worker in its loader.
        loader: Number of the loader in the rank's process; the first one is left out of the file's name.
    """
    of_loader = f"-l{loader}" if loader else ""
    _dump_forever(report, f"r{report.rank}{of_loader}-w{worker}")


def disarm_hang_reports() -> None:
    """Stop the reports of this process and the copying to stderr."""
    global _report, _armed, _copier  # noqa: PLW0603 - see above
    _report = None
    faulthandler.cancel_dump_traceback_later()
    if _armed is not None:
        _armed.close()
        _armed = None
    if _copier is not None and _copier.stdin is not None:
        _copier.stdin.close()  # the copier ends at the end of its input, after what is still to copy
        with suppress(subprocess.TimeoutExpired):
            _copier.wait(timeout=5.0)
        _copier = None


def _dump_forever(report: HangReport, name: str) -> None:
    global _armed  # noqa: PLW0603 - see above
    _armed = Path(report.folder, f"{name}.txt").open("a", encoding="utf-8", buffering=1)  # noqa: SIM115 - stays open
    faulthandler.dump_traceback_later(report.period, repeat=True, file=_armed)


def _start_copier(report: HangReport) -> "subprocess.Popen[bytes]":
    # Its stdin is a pipe that only this process holds: however this process ends, the copier reads the end of it.
    script = Path(__file__).with_name("hang_copier.py")
    command = [sys.executable, "-S", "-E", str(script), report.folder, str(report.rank)]
    copier = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)  # noqa: S603 - our own script
    atexit.register(disarm_hang_reports)
    return copier
