"""The kill matrix: training that is killed again and again must end on the bits of training that was not.

    python tests-integration/kill_matrix.py                      # a few minutes: every phase, 1 and 2 ranks
    python tests-integration/kill_matrix.py --worlds 1 2 4 --kills 28 --launch interpreters

A kill is SIGKILL to one rank or to all, at a phase of the run and then after a delay drawn from the seed that is printed
first. Launches of one folder follow each other until all kills of its lineage are spent and one comes to the end; weights,
buffers, optimizer, schedule, average, hooks and the history file are then compared with those of an uninterrupted run.
That one has no workers, so that the comparison also says that workers change nothing. Ranks are forked from a program that
has imported everything (another one for the uninterrupted run), or are new interpreters.
"""

import argparse
import contextlib
import json
import os
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from harness import free_port
from kill_points import OF_A_LAUNCH, OF_RANK_0, PHASES
from kill_program import NUM_EPOCHS
from run_comparison import compare_runs

PROGRAM = Path(__file__).with_name("kill_program.py")
LAUNCH_SECONDS = 60.0
#: Ranks that lost their peer, and workers that lost their rank, are gone by then.
AFTERMATH_SECONDS = 20.0
#: Ranks that are left get SIGTERM after this time, as a launcher would send it.
LAUNCHER_SECONDS = 3.0
MOST_DELAY = 0.3


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the matrix.

    Attributes:
        world_size: Ranks.
        workers: Loader workers of each rank.
        persistent: Workers live over epochs.
        accumulate: Micro-batches of an optimizer step.
        gan: Two networks against each other instead of one.
    """

    world_size: int
    workers: int
    persistent: bool = False
    accumulate: int = 2
    gan: bool = False

    def __str__(self) -> str:
        kind = f"{self.workers} persistent workers" if self.persistent else f"{self.workers} workers"
        return f"{self.world_size} rank{'s' * (self.world_size > 1)}, {kind}{', GAN' if self.gan else ''}"


@dataclass(frozen=True, kw_only=True)
class Kill:
    """What was done to one launch.

    Attributes:
        case: The row of the matrix.
        phase: Where it was aimed.
        epoch: The epoch aimed at; None outside epochs.
        victims: ``all`` or a rank.
        delay: Seconds between the phase and the kill; 0: the process killed itself there.
        landed: Where rank 0 was when it died.
        aftermath: Seconds until everything of the launch was gone.
    """

    case: Case
    phase: str
    epoch: int | None
    victims: str
    delay: float
    landed: str
    aftermath: float


class Launcher:
    """Starts ranks: forked from one program that lives as long as this object, or as new interpreters."""

    def __init__(self, *, forks: bool, hash_seed: int) -> None:
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": str(hash_seed)}
        self.environment["PYTHONPATH"] = os.pathsep.join(
            [str(PROGRAM.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        self._ranks: list[subprocess.Popen[bytes]] = []
        self.server = self._start("serve", pipes=subprocess.PIPE) if forks else None

    def start(self, task: dict[str, Any]) -> int:
        """Start one rank in a session of its own, and return its process id."""
        if self.server is None:
            with Path(task["log"]).open("ab") as log:
                self._ranks.append(self._start(json.dumps(task), pipes=None, log=log))
            return self._ranks[-1].pid
        self.server.stdin.write(json.dumps(task).encode() + b"\n")
        self.server.stdin.flush()
        return int(self.server.stdout.readline())

    def _start(self, argument: str, *, pipes: int | None, log: Any = None) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [sys.executable, str(PROGRAM), argument],
            env=self.environment,
            stdin=pipes or subprocess.DEVNULL,
            stdout=pipes or log,
            stderr=log,
            start_new_session=True,
        )

    def close(self) -> None:
        """End the program that forks; take leave of the ranks, which have ended."""
        for rank in self._ranks:
            rank.wait(timeout=20)
        if self.server is not None:
            self.server.stdin.close()
            self.server.wait(timeout=20)
            self.server.stdout.close()


class Launch:
    """The processes of one launch on one folder."""

    def __init__(
        self, launcher: Launcher, case: Case, folder: Path, target: dict[str, Any] | None, device: str
    ) -> None:
        self.notes = folder.with_name(f"{folder.name}-notes")
        shutil.rmtree(self.notes, ignore_errors=True)
        self.notes.mkdir(parents=True)
        self.log = folder.with_name(f"{folder.name}.log")
        port = free_port()
        self.pids = []
        for rank in range(case.world_size):
            fleet = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": case.world_size, "MASTER_PORT": port}
            environment = {name: str(value) for name, value in fleet.items()} if case.world_size > 1 else {}
            environment |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
            options = {name: getattr(case, name) for name in ("workers", "persistent", "accumulate", "gan")}
            options |= {"folder": str(folder), "notes": str(self.notes), "pause": 0.01, "device": device}
            self.pids.append(
                launcher.start(
                    {"environment": environment, "case": options, "target": target, "log": f"{self.log}.r{rank}"}
                )
            )
        self._handles = [os.pidfd_open(pid) for pid in self.pids]

    def wait(self, seconds: float, *, for_note: bool = False) -> bool:
        """Wait until every rank is gone, or (``for_note``) the target is reached or a rank is gone."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            gone, _, _ = select.select(self._handles, [], [], 0)
            if for_note and (gone or (self.notes / "reached").exists()):
                return True
            if len(gone) == len(self._handles):
                return True
            time.sleep(0.001)
        return False

    def kill(self, ranks: range, number: int = signal.SIGKILL) -> None:
        """Send a signal to these ranks, and to nothing else: what they started has to notice by itself."""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handles[rank], number)

    def end(self) -> float:
        """Return the seconds until nothing of the launch is left; kill what is left after the time that is allowed."""
        started, is_told = time.monotonic(), False
        while time.monotonic() - started < AFTERMATH_SECONDS and any(_session_lives(pid) for pid in self.pids):
            time.sleep(0.02)
            if not is_told and time.monotonic() - started > LAUNCHER_SECONDS:
                # What torchrun does at once: a rank that waits for one that never came cannot know.
                is_told = True
                self.kill(range(len(self.pids)), signal.SIGTERM)
        passed = time.monotonic() - started
        for pid, handle in zip(self.pids, self._handles, strict=True):
            if _session_lives(pid):
                os.killpg(pid, signal.SIGKILL)
            os.close(handle)
        return passed

    @property
    def is_done(self) -> bool:
        """Whether every rank came to the end of training."""
        return all((self.notes / f"r{rank}.done").exists() for rank in range(len(self.pids)))

    def output(self) -> str:
        """Return what the ranks printed, the ends of it."""
        return "\n".join(Path(f"{self.log}.r{rank}").read_text()[-3000:] for rank in range(len(self.pids)))


def _session_lives(pid: int) -> bool:
    """Whether a process of the session that ``pid`` began is alive; zombies, which nobody may have waited for yet, are not."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == pid and fields[0] not in "ZX":
                return True
    return False


def run_to_end(launcher: Launcher, case: Case, folder: Path, device: str) -> None:
    """Run one launch that nobody kills.

    Raises:
        RuntimeError: It failed; the message has what its ranks printed.
    """
    launch = Launch(launcher, case, folder, None, device)
    launch.wait(LAUNCH_SECONDS)
    launch.kill(range(case.world_size))
    launch.end()
    if not launch.is_done:
        raise RuntimeError(f"{case}: a launch without a kill did not come to its end\n{launch.output()}")


def kill_once(
    launcher: Launcher, case: Case, folder: Path, phase: str, dice: random.Random, device: str
) -> Kill | None:
    """Start a launch and kill it in a phase; None if training was over before the kill came.

    Raises:
        RuntimeError: The phase was not reached, or something outlived the kill.
    """
    records = sorted((folder / "checkpoints").glob("epoch-*.json"))
    first = int(records[-1].stem.partition("-")[2]) + 1 if records else 0
    if phase == "resume: restored" and not records:
        phase = "save: committed"  # there must be something to restore: the next launch gets this phase
    last = NUM_EPOCHS - 1
    epoch = None if phase in OF_A_LAUNCH else min(last, first + dice.choice((0, 0, 0, 1)))
    if phase == "save: removing an older file":
        epoch = max(2, first)  # two stay, and the best one besides: the first removal is that of epoch 0, in epoch 2
    teller = 0 if phase in OF_RANK_0 else dice.randrange(case.world_size)
    delay = 0.0 if dice.random() < 0.4 else dice.uniform(0.0, MOST_DELAY)
    victim = teller if delay == 0.0 else dice.randrange(case.world_size)
    kills_all = delay > 0.0 and (case.world_size == 1 or dice.random() < 0.5)
    index = dice.randrange(4) if phase in {"training", "save: writing the state"} else 0
    target = {
        "phase": phase,
        "epoch": epoch,
        "index": index,
        "rank": teller,
        "action": "tell" if delay else "self",
    }
    launch = Launch(launcher, case, folder, target, device)
    was_reached = launch.wait(LAUNCH_SECONDS, for_note=True)
    time.sleep(delay)
    launch.kill(range(case.world_size) if kills_all else range(victim, victim + 1))
    aftermath = launch.end()
    if launch.is_done and was_reached:
        return None
    if not was_reached or aftermath >= AFTERMATH_SECONDS:
        raise RuntimeError(f"{case}, {target}: reached {was_reached}, gone after {aftermath:.1f} s\n{launch.output()}")
    return Kill(
        case=case,
        phase=phase,
        epoch=epoch,
        victims="all" if kills_all or case.world_size == 1 else f"rank {victim}",
        delay=delay,
        landed=(launch.notes / "r0.now").read_text().strip(),
        aftermath=aftermath,
    )


def run_matrix(
    cases: list[Case],
    phases: list[list[str]],
    *,
    seed: int,
    folder: Path,
    forks: bool = True,
    device: str = "cpu",
) -> list[Kill]:
    """Kill each case in each of its phases, and return the kills.

    Args:
        cases: Rows of the matrix.
        phases: Of each case, in the order of its launches.
        seed: Of phases' moments, victims and delays.
        folder: For the runs; empty.
        forks: Fork ranks from one program; else every rank is a new interpreter.
        device: ``cpu`` or ``cuda``.

    Raises:
        RuntimeError: A killed run ended on other bits, or did not end.
    """
    dice = random.Random(seed)
    quiet, killed = Launcher(forks=forks, hash_seed=1), Launcher(forks=forks, hash_seed=2)
    kills: list[Kill] = []
    try:
        for number, (case, wanted) in enumerate(zip(cases, phases, strict=True)):
            plain = replace(case, workers=0, persistent=False)
            reference = folder / re.sub(r"\W+", "-", f"whole {plain} {plain.accumulate}")
            if not reference.exists():
                run_to_end(quiet, plain, reference, device)
            left, lineage = list(wanted), 0
            while left:
                run, is_over = folder / f"killed-{number}-{lineage}", False
                while left and not is_over:
                    kill = kill_once(killed, case, run, left[0], dice, device)
                    if kill is None:
                        is_over = True
                    else:
                        kills.append(kill)
                        print(row_of(kill), flush=True)
                        left = left[1:] if kill.phase == left[0] else left
                run_to_end(killed, case, run, device)
                found = compare_runs(reference, run)
                if found:
                    raise RuntimeError(f"{case}, seed {seed}: other bits in {found[:20]} after {kills}")
                lineage += 1
    finally:
        quiet.close()
        killed.close()
    return kills


def row_of(kill: Kill) -> str:
    """Return a kill as a row of a Markdown table."""
    aim = kill.phase if kill.epoch is None else f"{kill.phase}, epoch {kill.epoch}"
    delay = "at once" if kill.delay == 0 else f"{1000 * kill.delay:.0f} ms"
    return f"| {kill.case} | {aim} | {kill.victims} | {delay} | {kill.landed} | {kill.aftermath:.2f} s |"


def table_of(kills: list[Kill]) -> str:
    """Return the kills as a Markdown table."""
    head = (
        "| ranks and workers | aimed at | killed | after | rank 0 died in | all gone after |\n|---|---|---|---|---|---|"
    )
    return "\n".join([head, *map(row_of, kills)]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    parser.add_argument(
        "--kills", type=int, default=len(PHASES), help="kills of each row, dealt from all phases in turn"
    )
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--launch", choices=("fork", "interpreters"), default="fork")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--table", type=Path, help="a Markdown file to write the table of kills to")
    options = parser.parse_args()
    cases = [
        Case(world_size=world, workers=workers, persistent=persistent, accumulate=1 if world == 4 else 2)
        for world in options.worlds
        for workers in options.workers
        for persistent in ((False, True) if workers else (False,))
    ]
    cases += [Case(world_size=world, workers=0, gan=True) for world in options.worlds if world < 4]
    print("seed", options.seed, flush=True)
    dice = random.Random(options.seed)
    deck = [phase for _ in range(options.kills * len(cases)) for phase in dice.sample(PHASES, len(PHASES))]
    phases = [deck[row * options.kills : (row + 1) * options.kills] for row in range(len(cases))]
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        forks = options.launch == "fork"
        kills = run_matrix(cases, phases, seed=options.seed, folder=Path(folder), forks=forks, device=options.device)
    seconds = time.monotonic() - started
    verdict = f"{len(kills)} kills, seed {options.seed}, {seconds:.0f} s: every run ended on the same bits.\n"
    print(verdict)
    if options.table is not None:
        command = " ".join(["python tests-integration/kill_matrix.py", *sys.argv[1:]])
        title = (
            f"# The last run of the kill matrix\n\n`{command}`, torch {torch.__version__}, {os.cpu_count()} CPU cores"
        )
        options.table.write_text(f"{title}\n\n{verdict}\n{table_of(kills)}")


if __name__ == "__main__":
    main()
