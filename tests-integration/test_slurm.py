"""Training under a real SLURM on two nodes: the shim, signals, requeues and torchrun inside a batch script."""

import json
import os
import re
import shlex
import sys
import time
from pathlib import Path

import pytest

from failure_run import ARGUMENTS
from slurm_cluster import made_cluster, why_no_cluster

HERE = Path(__file__).resolve().parent
APP = HERE.parent / "apps" / "train.py"
SHIM = (sys.executable, "-m", "srforge.distributed", "shim")
PAGE = HERE.parent / "docs" / "launching.md"
CHECK = (sys.executable, "-m", "srforge.distributed", "check", "--device=cpu", "--max-mebibytes=1")
TOLD = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", "PYTHONPATH": str(HERE)}
PROGRAMS = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
#: The two job scripts of the documentation: behind the shim, and with one torchrun per node.
SHIM_JOB, TORCHRUN_JOB = re.findall(r"```bash\n(#!/bin/bash\n.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
#: So many that a job is in one of them when something happens to it, and that the next launch gets through.
EPOCHS = 40
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]  # a requeued job waits for minutes


@pytest.fixture(scope="module")
def cluster():
    if reason := why_no_cluster():
        pytest.skip(reason)
    with made_cluster(2) as made:
        yield made


@pytest.fixture
def job(cluster, tmp_path):
    return Job(cluster, tmp_path)


class Job:
    """A training as a batch job, and what it leaves behind."""

    def __init__(self, cluster, folder):
        self.cluster, self.folder, self.log = cluster, folder, folder / "log"
        self.script = folder / "job.sh"

    def submit(self, script, *options, epochs=EPOCHS):
        """Submit a script of the documentation, with another shape and another training, and return its number."""
        lines = [line for line in script.splitlines(keepends=True) if not line.startswith("#SBATCH")]
        command = "".join(lines).replace("apps/train.py", shlex.join(train_command(epochs, self.folder)))
        self.script.write_text(command.replace("--nproc_per_node=4", "--nproc_per_node=1"))
        shape = ("--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=2")
        return self.cluster.submit(self.script, self.log, *shape, *options, env=TOLD | {"PATH": PROGRAMS})

    def trains(self):
        """Wait until two epochs are saved."""
        self.cluster.wait_for(lambda: len(self.saved()) >= 2, "two epochs")

    def output(self):
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def saved(self):
        """The epochs whose checkpoints count."""
        facts = self.folder.glob("runs/*/checkpoints/[!.]*.json")
        return sorted(json.loads(path.read_text())["epoch"] for path in facts)

    def trained(self, rank):
        """The epochs that a rank has trained to their ends, in the order of the log."""
        lines = [
            line for line in self.output().splitlines() if line.startswith(f"[r{rank}] epoch") and " replica " in line
        ]
        return [int(line.split()[2]) for line in lines]


def train_command(epochs, folder):
    arguments = [argument for argument in ARGUMENTS if not argument.startswith("training.epochs=")]
    arguments += [f"training.epochs={epochs}", f"run.root={folder}/runs", "system.num_workers=0"]
    return [str(APP), *arguments]


@pytest.mark.parametrize("options", [(), ("--export=NONE",)])
def test_check_behind_the_shim_sees_both_nodes(cluster, options):
    seen = cluster.run("srun", "-N2", "-n2", *options, *SHIM, *CHECK)
    assert seen.stdout.splitlines()[-1] == "OK: 2 ranks on 2 hosts."
    rows = [line.split() for line in seen.stdout.splitlines()[1:3]]
    assert [(row[0], row[1], row[5]) for row in rows] == [("0", "node1", "eth0"), ("1", "node2", "eth0")]


def test_two_ranks_of_each_node_take_the_local_ranks_0_and_1(cluster):
    program = "import os; print(os.environ['RANK'], os.environ['LOCAL_RANK'], os.environ['LOCAL_WORLD_SIZE'])"
    seen = cluster.run("srun", "-N2", "-n4", *SHIM, sys.executable, "-c", program)
    assert sorted(seen.stdout.splitlines()) == ["0 0 2", "1 1 2", "2 0 2", "3 1 2"]


def test_without_the_shim_both_tasks_are_refused_with_the_line_that_cures(cluster, tmp_path):
    refused = cluster.run("srun", "-N2", "-n2", sys.executable, *train_command(1, tmp_path), env=TOLD, check=False)
    assert refused.returncode == 1
    assert refused.stderr.count("Put `python -m srforge.distributed shim` before the command") == 2


def test_two_tasks_train_as_one_fleet_of_two_hosts(cluster, job):
    trained = cluster.run("srun", "-N2", "-n2", *SHIM, sys.executable, *train_command(2, job.folder), env=TOLD)
    assert "2 rank(s), strategy ddp" in trained.stdout
    assert job.saved() == [0, 1]
    assert trained.stdout.splitlines()[-1].startswith("psnr_y ")


def test_one_torchrun_per_node_inside_a_batch_script(cluster, job):
    number = job.submit(TORCHRUN_JOB, epochs=2)
    ended = cluster.await_state(number, "COMPLETED", "FAILED")
    assert ended["JobState"] == "COMPLETED", job.output()
    assert job.trained(0) == job.trained(1) == [0, 1]


def test_scancel_ends_every_rank_with_143_and_the_next_job_replays_the_epoch(cluster, job):
    number = job.submit(SHIM_JOB)
    job.trains()
    began = time.monotonic()
    cluster.run("scancel", number)
    cluster.await_state(number, "CANCELLED")
    cluster.wait_for(lambda: cluster.states() == ["idle"] * 2, "all tasks to be gone")
    assert time.monotonic() - began < 10
    for rank in range(2):
        assert f"[rank {rank}] received SIGTERM: leaving with 143" in job.output()
    kept = job.saved()[-1]
    job.log.unlink()
    ended = cluster.await_state(job.submit(SHIM_JOB), "COMPLETED", "FAILED")
    assert ended["JobState"] == "COMPLETED", job.output()
    assert job.trained(0) == job.trained(1) == list(range(kept + 1, EPOCHS))
    assert cluster.job(number)["JobState"] == "CANCELLED", "the script must not put it back"


def requeue(cluster, number):
    cluster.run("scontrol", "requeue", number)


def preempt(cluster, number):
    """Submit a job of a partition that goes before the other's."""
    cluster.run("srun", "--partition=high", "-N2", "--exclusive", "sleep", "1")


@pytest.mark.parametrize("happen", [requeue, preempt])
def test_requeued_job_goes_on_from_its_newest_checkpoint(cluster, job, happen):
    number = job.submit(SHIM_JOB, "--requeue")
    job.trains()
    happen(cluster, number)
    ended = cluster.await_state(number, "COMPLETED", "FAILED", "CANCELLED", seconds=150)
    assert ended["JobState"] == "COMPLETED", job.output()
    assert ended["Restarts"] == "1"
    for rank in range(2):
        assert f"[rank {rank}] received SIGTERM: leaving with 143" in job.output()
        assert sorted(set(job.trained(rank))) == list(range(EPOCHS))
        assert len(job.trained(rank)) <= EPOCHS + 1  # at most the epoch that was cut short is there twice
