"""SIGTERM in each phase, to each process that can get it: the ranks leave with 143, the launcher with a failure, soon.

python tests-integration/termination_matrix.py                  # the cells that CI runs
python tests-integration/termination_matrix.py --all --write docs/termination_table.md
"""

import argparse
import contextlib
import itertools
import os
import signal
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from failure_faults import PHASES
from failure_run import LIMIT_SECONDS, clear, processes_of, rank_of, start, watch

#: A busy rank is in the phase; the other waits for it: at the rendezvous, in a collective, or for rank 0's work.
TARGETS = ("busy rank", "waiting rank", "both ranks", "torchrun", "every process")
WORLD_SIZE = 2
#: From the signal to the end of the last process.
SECONDS_ALLOWED = 5
CI_CELLS = (
    ("torchrun", "before init"),
    ("busy rank", "rehearsal"),
    ("waiting rank", "forward"),
    ("every process", "between steps"),
    ("waiting rank", "validation"),
    ("both ranks", "gated function"),
    ("torchrun", "saving"),
    ("every process", "loader worker"),
)


@dataclass
class Ending:
    """What one cell showed.

    Attributes:
        code: Of the launcher; None: it had to be killed.
        seconds: From the signal to the end of the last process.
        ranks_143: The ranks that said that they leave with 143.
        left: Processes, shared memory and unfinished files that were left.
        output: All that was printed.
    """

    target: str
    phase: str
    code: int | None = None
    seconds: float = -1.0
    ranks_143: list[int] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    output: str = ""


def run_cell(target, phase, folder):
    """Start the script, wait until one rank is in the phase and the other waits for it, send the signal, see the end."""
    ending = Ending(target, phase)
    cell, notes, busy = uuid.uuid4().hex, Path(folder, "notes"), rank_of(phase, WORLD_SIZE)
    notes.mkdir(parents=True, exist_ok=True)
    process = start(f"hold:{phase}:{busy}", WORLD_SIZE, folder, cell)
    deadline = time.monotonic() + LIMIT_SECONDS
    while not (notes / "fault").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1.0)
    if process.poll() is not None or not (notes / "fault").exists():
        ending.left, ending.output = (
            clear(process, cell, set(), folder),
            Path(folder, "log").read_text(errors="replace"),
        )
        return ending
    ranks = {rank: int((notes / f"pid-{rank}").read_text()) for rank in range(WORLD_SIZE)}
    targets = {
        "busy rank": [ranks[busy]],
        "waiting rank": [ranks[1 - busy]],
        "both ranks": list(ranks.values()),
        "torchrun": [process.pid],
        "every process": sorted(processes_of(cell)),
    }
    sent = time.time()
    for pid in targets[target]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    seen, ended = watch(process, cell, deadline)
    ending.code, ending.seconds = process.poll(), ended - sent
    ending.left = clear(process, cell, seen, folder)
    ending.output = Path(folder, "log").read_text(errors="replace")
    said = "[rank {}] received SIGTERM: leaving with 143"
    ending.ranks_143 = [rank for rank in ranks if said.format(rank) in ending.output]
    return ending


def findings(ending, seconds_allowed=SECONDS_ALLOWED):
    """What is wrong with an ending, one sentence each."""
    if ending.seconds < 0:
        return ["the launch must be alive in the phase when the signal is sent, but had ended or never came there"]
    found = [f"left behind: {each}" for each in ending.left if not (ending.phase == "saving" and each.startswith("."))]
    if not ending.code:
        found.append(f"the launcher must end non-zero, but its code is {ending.code}")
    if ending.seconds > seconds_allowed:
        found.append(f"all must end within {seconds_allowed} s, but took {ending.seconds:.1f}")
    if ending.ranks_143 != list(range(WORLD_SIZE)):
        found.append(f"every rank must leave with 143, but only {ending.ranks_143} did")
    if "rank" in ending.target and "exitcode  : 143" not in ending.output.rpartition("Root Cause")[2]:
        found.append("the root cause must be the exit code 143")
    return found


HEADER = """# SIGTERM in each phase

Written by `tests-integration/termination_matrix.py` from a run of `apps/train.py` on two ranks under `torchrun` over gloo, on a
machine with two cores. One rank is busy in the phase, the other one waits for it: at the rendezvous, in a collective, or until
rank 0 is done. "Ended" is counted from the signal to the end of the last process, loader workers included.

| SIGTERM to | phase | launcher's code | leave with 143 | all ended after |
|---|---|---|---|---|
"""


def as_markdown(endings):
    """The table, for the documentation."""
    return HEADER + "".join(
        f"| {each.target} | {each.phase} | {each.code} | {' and '.join(f'rank {rank}' for rank in each.ranks_143)} "
        f"| {each.seconds:.1f} s |\n"
        for each in endings
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every cell")
    parser.add_argument("--write", type=Path, help="write the table there")
    asked = parser.parse_args()
    endings = []
    for cell in itertools.product(TARGETS, PHASES) if asked.all else CI_CELLS:
        with tempfile.TemporaryDirectory(prefix="termination-") as folder:
            endings.append(run_cell(*cell, folder))
        print(f"{cell}: {endings[-1].seconds:.1f} s", *findings(endings[-1]), sep="\n  ", flush=True)
    if any(findings(ending) for ending in endings):
        sys.exit("no table is written: see what was found above")
    if asked.write:
        asked.write.write_text(as_markdown(endings))


if __name__ == "__main__":
    main()
