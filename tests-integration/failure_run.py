"""One launch of ``apps/train.py`` with a fault in it, and all that can be seen of its end."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from failure_faults import OF_RANK_0
from harness import kill_session

HERE = Path(__file__).resolve().parent
#: Where a process only stops answering, nothing but this time can tell.
TIMEOUT_SECONDS = 15
LIMIT_SECONDS = 150
STALLS = ("endless loop", "SIGSTOP")
ARGUMENTS = (
    "data.train._target_=failure_faults.images",
    "data.validation._target_=failure_faults.images",
    "data.baseline=null",
    "model.num_features=4",
    "model.num_blocks=1",
    "tracking=none",
    "training.epochs=2",
    "training.steps_per_epoch=3",
    "training.batch_size=2",
)


@dataclass
class Outcome:
    """What one cell showed.

    Attributes:
        how: Of the fault.
        phase: In which it came.
        world_size: Number of ranks.
        rank: The one that failed.
        code: Of the launcher; None: it had to be killed.
        seconds: From the fault to the end of the last process.
        root: What torchrun calls the root cause: the end of its report.
        last_line: The last line of that with a message.
        root_rank: The rank in it.
        left: Processes, shared memory and unfinished files that were left.
        output: All that was printed.
    """

    how: str
    phase: str
    world_size: int
    rank: int
    code: int | None = None
    seconds: float = -1.0
    root: str = ""
    last_line: str = ""
    root_rank: int | None = None
    left: list[str] = field(default_factory=list)
    output: str = ""


def rank_of(phase, world_size):
    """The rank that fails."""
    return 0 if phase in OF_RANK_0 else world_size - 1


def run_cell(how, phase, world_size, folder):
    """Run the script with one fault; see how it ends."""
    outcome = Outcome(how, phase, world_size, rank_of(phase, world_size))
    cell, notes = uuid.uuid4().hex, Path(folder, "notes")
    notes.mkdir(parents=True, exist_ok=True)
    process = start(f"{how}:{phase}:{outcome.rank}", world_size, folder, cell)
    seen, ended = watch(process, cell, time.monotonic() + LIMIT_SECONDS)
    outcome.code = process.poll()
    outcome.left = clear(process, cell, seen, folder)
    outcome.output = Path(folder, "log").read_text(errors="replace")
    if (notes / "fault").exists():
        outcome.seconds = ended - float((notes / "fault").read_text())
    _read_root(outcome)
    return outcome


def watch(process, cell, deadline):
    """Wait until the launcher and all that it started have ended; return every process that was seen, and the time."""
    seen = set()
    while (alive := processes_of(cell)) or process.poll() is None:
        seen |= alive
        if process.poll() is not None:  # 2 s on a quiet machine: interpreters end slowly beside others
            deadline = min(deadline, time.monotonic() + 8)
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    return seen, time.time()


def clear(process, cell, seen, folder):
    """Kill what is left of a cell and remove nothing else; return what was left: processes, memory, unfinished files."""
    left = [f"process {pid}: {_command(pid)}" for pid in processes_of(cell)]
    for pid in processes_of(cell):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    kill_session(process)
    left += [str(path) for path in Path("/dev/shm").iterdir() if _owner(path.name) in seen]
    hidden = (path for path in Path(folder, "runs").rglob(".*") if path.is_file() and path.suffix != ".lock")
    return left + [path.name for path in hidden]


def start(fault, world_size, folder, cell=""):
    """Start the script under torchrun with a fault (empty: none)."""
    how, phase, _ = fault.split(":") if fault else ("", "", "")
    minutes = (TIMEOUT_SECONDS if how in STALLS else 100) / 60
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world_size}"]
    arguments = [
        *ARGUMENTS,
        f"run.root={folder}/runs",
        f"system.num_workers={1 if phase == 'loader worker' else 0}",
        f"++system.distributed.timeout_minutes={minutes}",
        f"training.main_work_timeout_minutes={minutes}",
    ]
    environment = {
        **os.environ,
        "TEST_FAULT": fault or "none:none:0",
        "TEST_NOTES": str(Path(folder, "notes")),
        "TEST_CELL": cell,
        "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    with Path(folder, "log").open("ab") as log:
        return subprocess.Popen(
            [*command, str(HERE / "failure_program.py"), *arguments],
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def processes_of(cell):
    """Every living process of a cell, by a variable that all of them inherit."""
    mark, found = f"TEST_CELL={cell}\0".encode(), set()
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in environ.read_bytes():
                found.add(int(environ.parent.name))
    return found


def _read_root(outcome):
    outcome.root = outcome.output.rpartition("Root Cause (first observed failure):")[2] if outcome.output else ""
    rank = re.search(r"rank      : (\d+)", outcome.root)
    outcome.root_rank = int(rank[1]) if rank else None
    lines = [
        line.strip().removeprefix("traceback : ")
        for line in outcome.root.splitlines()
        if line.strip() and set(line.strip()) != {"="}
    ]
    lines = lines or outcome.output.strip().splitlines() or [""]
    outcome.last_line = " ".join(lines[-2:]) if lines[-1].startswith("Last seen") else lines[-1]


def _owner(name):
    found = re.match(r"torch_(\d+)_", name)
    return int(found[1]) if found else None


def _command(pid):
    with contextlib.suppress(OSError):
        return Path("/proc", str(pid), "cmdline").read_bytes().replace(b"\0", b" ").decode()[:120]
    return "?"
