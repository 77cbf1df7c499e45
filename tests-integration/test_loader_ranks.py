"""The loader on several ranks under torchrun, each with workers of its own."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from harness import launch

PROGRAM = """
import json, sys, time

import psutil
import srforge
import torch
from torch.utils.data import Dataset

from srforge.data import DataLoaderFactory
from srforge.distributed import begin_epoch, get_active_strategy, setup_device


class Drawing(Dataset):
    def __len__(self):
        return 13

    def __getitem__(self, index):
        if sys.argv[1] == "sleep" and index % 7 > 1:  # not in the first batch of either rank
            time.sleep(3600)
        return torch.tensor([index, float(torch.rand(()))], dtype=torch.float64)


def main(what, num_workers):
    setup_device(torch.nn.Linear(1, 1), "cpu")
    strategy = get_active_strategy()
    loader = DataLoaderFactory(
        Drawing(), 4 // strategy.world_size, shuffle=what == "read", num_workers=num_workers, seed=5
    ).get_loader()
    if what == "sleep":
        next(iter(loader))
        pids = [child.pid for child in psutil.Process().children(recursive=True)]
        print(json.dumps([psutil.Process().pid, *pids]), flush=True)
        time.sleep(3600)
    rows = []
    for epoch in (0, 1):
        begin_epoch(epoch, 5, loader)
        for step, batch in enumerate(loader):
            real = loader.sampler.plan.local_count(step, strategy.rank)
            rows += [[epoch, step, *row] for row in batch[:real].tolist()]
    fleet = sorted(sum(strategy.all_gather_object(rows), []))
    if strategy.is_main:
        print(json.dumps(fleet), flush=True)
    strategy.teardown()


if __name__ == "__main__":
    srforge.init(preload=("psutil",))
    main(sys.argv[1], int(sys.argv[2]))
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def test_two_ranks_with_workers_see_the_samples_of_one_process_in_the_same_steps(script):
    alone = subprocess.run(
        [sys.executable, script, "read", "0"], capture_output=True, text=True, check=True, timeout=100
    ).stdout
    fleet = launch(script, "read", "1", timeout=110)
    assert fleet.returncode == 0, fleet.stderr
    assert json.loads(fleet.stdout) == json.loads(alone)
    assert len(json.loads(alone)) == 2 * 13


@pytest.mark.skipif(sys.platform != "linux", reason="reads process tables")
def test_when_one_rank_is_killed_no_process_of_any_loader_is_left(script, tmp_path):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        script,
        "sleep",
        "1",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    launcher = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        families = [json.loads(launcher.stdout.readline()) for _ in range(2)]
        assert all(len(family) >= 3 for family in families)  # rank, fork server, worker
        os.kill(families[0][0], signal.SIGKILL)
        assert launcher.wait(timeout=60) != 0
        time.sleep(2.0)
        left = [pid for family in families for pid in family if is_running(pid)]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left
    finally:
        launcher.kill()
        launcher.communicate()


def is_running(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
