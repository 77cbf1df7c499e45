"""The failure matrix: each way to fail, in each phase, with each size of fleet; who ends when, with which last line.

python tests-integration/failure_matrix.py                      # the cells that CI runs
python tests-integration/failure_matrix.py --all                # every cell, 2 and 4 ranks
python tests-integration/failure_matrix.py --all --write docs/failure_table.md
"""

import argparse
import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from failure_faults import HOWS, OF_RANK_0, PHASES
from harness import kill_session

HERE = Path(__file__).resolve().parent
#: Where a process only stops answering, nothing but this time can tell.
TIMEOUT_SECONDS = 15
#: torchrun waits so long for a rank to obey SIGTERM; a stopped one cannot. No option changes it where a rank failed.
SHUTDOWN_SECONDS = 30
#: For everything between the fault and the end that is no timeout; a machine with other work takes long.
SLACK_SECONDS = 25
LIMIT_SECONDS = 150
STALLS = ("endless loop", "SIGSTOP")
#: Every way to fail and every phase at least once, all kinds of end, both sizes of fleet.
CI_CELLS = (
    ("raise", "before init", 2),
    ("raise", "forward", 4),
    ("raise", "loader worker", 2),
    ("SIGKILL", "rehearsal", 2),
    ("SIGKILL", "saving", 2),
    ("SIGKILL", "loader worker", 2),
    ("sys.exit(0)", "between steps", 2),
    ("sys.exit(0)", "gated function", 2),
    ("endless loop", "before init", 2),
    ("endless loop", "gated function", 2),
    ("SIGSTOP", "validation", 2),
)
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
        code: Of the launcher; None: it had to be killed.
        seconds: From the fault to the end of the last process.
        root: What torchrun calls the root cause: the end of its report.
        last_line: The last line of that with a message.
        root_rank: The rank in it.
        left: Processes, shared memory and unfinished files that were left.
        output: All that was printed.
        folder: The run's folder.
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


def seconds_allowed(how):
    """From the fault to the end of everything."""
    return SLACK_SECONDS + (how in STALLS) * TIMEOUT_SECONDS + (how == "SIGSTOP") * SHUTDOWN_SECONDS


def run_cell(how, phase, world_size, folder):
    """Run the script with one fault; see how it ends."""
    outcome = Outcome(how, phase, world_size, rank_of(phase, world_size))
    cell, notes = uuid.uuid4().hex, Path(folder, "notes")
    notes.mkdir(parents=True, exist_ok=True)
    process = start(f"{how}:{phase}:{outcome.rank}", world_size, folder, cell)
    seen = set()
    deadline = time.monotonic() + LIMIT_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        seen |= processes_of(cell)
        time.sleep(0.1)
    outcome.code = process.poll()
    while (alive := processes_of(cell)) and time.monotonic() < deadline:
        seen |= alive
        if process.poll() is not None:
            deadline = min(
                deadline, time.monotonic() + 8
            )  # 2 on a quiet machine: interpreters end slowly beside others
        time.sleep(0.1)
    ended = time.time()
    outcome.left = [f"process {pid}: {_command(pid)}" for pid in processes_of(cell)]
    for pid in processes_of(cell):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    kill_session(process)
    outcome.left += [str(path) for path in Path("/dev/shm").iterdir() if _owner(path.name) in seen]
    outcome.left += [
        str(path.name) for path in Path(folder, "runs").rglob(".*") if path.is_file() and path.suffix != ".lock"
    ]
    outcome.output = Path(folder, "log").read_text(errors="replace")
    if (notes / "fault").exists():
        outcome.seconds = ended - float((notes / "fault").read_text())
    _read_root(outcome)
    return outcome


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


def findings(outcome):
    """What is wrong with an outcome, one sentence each."""
    found = []
    if not outcome.code:
        found.append(f"the launcher must end non-zero, but its code is {outcome.code}")
    if not 0 <= outcome.seconds <= seconds_allowed(outcome.how):
        found.append(f"all must end within {seconds_allowed(outcome.how)} s, but took {outcome.seconds:.1f}")
    unfinished = outcome.how in ("SIGKILL", *STALLS) and outcome.phase == "saving"  # removed by the next launch
    found += [f"left behind: {each}" for each in outcome.left if not (unfinished and each.startswith("."))]
    missing = [text for text in _expected(outcome) if text not in outcome.root]
    found += [f"the root cause must say {text!r}, but is {outcome.last_line!r}" for text in missing]
    return found


def _expected(outcome):
    """Parts of the root cause."""
    worker = outcome.phase == "loader worker"
    rank = f"rank      : {outcome.rank} "
    if outcome.how == "raise":
        return ["ValueError: a planted fault", rank]
    if outcome.how == "SIGKILL":
        return ["DataLoader worker" if worker else "Signal 9 (SIGKILL)", rank]
    if outcome.how == "sys.exit(0)":
        return ["DataLoader worker" if worker else "exited with 0 before the end of main", rank]
    if outcome.how == "SIGTERM":
        return ["exitcode  : 143", rank]
    if outcome.phase == "before init":
        return [f"ranks [{outcome.rank}] did not arrive"]
    if outcome.phase in OF_RANK_0:
        return ["rank 0 must"]
    silent = outcome.how == "SIGSTOP" and not worker
    return ["Last seen:", f"rank {outcome.rank} {'no longer answers' if silent else 'in'}"]


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


def as_markdown(outcomes):
    """The table, for the documentation."""
    lines = [
        "| fault | phase | ranks | fails | all ended after | last line of the report |",
        "|---|---|---|---|---|---|",
    ]
    for each in outcomes:
        text = re.sub(r"(?<=pid )\d+|(?<=PID )\d+|(?<=localhost:)\d+|(?<=pid\(s\) )\d+", "...", each.last_line)
        text = re.sub(r"\[/\S+/gloo/\S+\]", "gloo:", text).replace("|", "\\|").replace("`", "'")
        lines.append(
            f"| `{each.how}` | {each.phase} | {each.world_size} | rank {each.rank} | {each.seconds:.0f} s | "
            f"rank {each.root_rank}: `{text[:400]}` |"
        )
    return "\n".join(lines) + "\n"


HEADER = f"""# What each failure looks like

Written by `tests-integration/failure_matrix.py` from a run of `apps/train.py` under `torchrun` over gloo, on a machine with
two cores and other work. "All ended" is counted from the fault to the end of the last process, workers included. A process
that only stops answering shows when a time is up: `system.distributed.timeout_minutes` and
`training.main_work_timeout_minutes`, both {TIMEOUT_SECONDS} s here; a stopped process needs `torchrun`'s SIGKILL on top of
that, which comes after {SHUTDOWN_SECONDS} s.

"""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every cell")
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4], help="sizes of fleet, with --all")
    parser.add_argument("--jobs", type=int, default=1, help="cells at once")
    parser.add_argument("--write", type=Path, help="write the table there")
    parser.add_argument("--keep", type=Path, help="append each outcome there as a line of JSON, and skip what is there")
    asked = parser.parse_args()
    cells = list(itertools.product(HOWS, PHASES, asked.worlds)) if asked.all else list(CI_CELLS)
    known = {}
    if asked.keep and asked.keep.exists():
        rows = [Outcome(**json.loads(line)) for line in asked.keep.read_text().splitlines()]
        known = {(each.how, each.phase, each.world_size): each for each in rows}

    def run(cell):
        if cell not in known:
            with tempfile.TemporaryDirectory(prefix="failure-") as folder:
                known[cell] = outcome = run_cell(*cell, folder)
            if asked.keep:
                with asked.keep.open("a") as file:
                    file.write(json.dumps(vars(outcome)) + "\n")
            print(
                f"{cell}: {outcome.seconds:.1f} s, {outcome.last_line[:150]}",
                *findings(outcome),
                sep="\n  ",
                flush=True,
            )
        return known[cell]

    with ThreadPoolExecutor(asked.jobs) as pool:
        outcomes = list(pool.map(run, cells))
    if asked.write:
        asked.write.write_text(HEADER + as_markdown(outcomes))
    sys.exit(any(findings(outcome) for outcome in outcomes))


if __name__ == "__main__":
    main()
