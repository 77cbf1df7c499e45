"""The failure matrix: each way to fail, in each phase, with each size of fleet; who ends when, with which last line.

python tests-integration/failure_matrix.py                      # the cells that CI runs
python tests-integration/failure_matrix.py --all                # every cell, 2 and 4 ranks
python tests-integration/failure_matrix.py --all --write docs/failure_table.md
"""

import argparse
import itertools
import json
import re
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from failure_faults import HOWS, OF_RANK_0, PHASES
from failure_run import STALLS, TIMEOUT_SECONDS, Outcome, run_cell

#: torchrun waits so long for a rank to obey SIGTERM; a stopped one cannot. No option changes it where a rank failed.
SHUTDOWN_SECONDS = 30
#: For everything between the fault and the end that is no timeout; a machine with other work takes long.
SLACK_SECONDS = 25
#: Every way to fail with both sizes of fleet; in every phase a death and a silence, and both sizes.
CI_CELLS = (
    ("raise", "before init", 4),
    ("raise", "forward", 2),
    ("raise", "gated function", 2),
    ("raise", "loader worker", 4),
    ("SIGKILL", "rehearsal", 4),
    ("SIGKILL", "between steps", 4),
    ("SIGKILL", "saving", 2),
    ("SIGKILL", "loader worker", 2),
    ("sys.exit(0)", "before init", 2),
    ("sys.exit(0)", "between steps", 2),
    ("sys.exit(0)", "validation", 4),
    ("sys.exit(0)", "gated function", 4),
    ("endless loop", "before init", 2),
    ("endless loop", "forward", 4),
    ("endless loop", "between steps", 2),
    ("endless loop", "gated function", 2),
    ("endless loop", "saving", 4),
    ("SIGSTOP", "rehearsal", 2),
    ("SIGSTOP", "validation", 2),
    ("SIGSTOP", "loader worker", 4),
)


def seconds_allowed(how):
    """From the fault to the end of everything."""
    return SLACK_SECONDS + (how in STALLS) * TIMEOUT_SECONDS + (how == "SIGSTOP") * SHUTDOWN_SECONDS


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
    if outcome.phase == "before init":
        return [f"rank {outcome.rank} of {outcome.world_size} did not (seen by rank 0)"]
    if outcome.phase in OF_RANK_0:
        return ["rank 0 must"]
    silent = outcome.how == "SIGSTOP" and not worker
    return ["Last seen:", f"rank {outcome.rank} {'no longer answers' if silent else 'in'}"]


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
    if any(findings(outcome) for outcome in outcomes):
        sys.exit("no table is written: see what was found above")
    if asked.write:
        asked.write.write_text(HEADER + as_markdown(outcomes))


if __name__ == "__main__":
    main()
