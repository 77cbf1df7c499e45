"""The shim under real launchers: Debian's openmpi-bin and mpich, where they are installed."""

import os
import shutil
import subprocess
import sys

import pytest

from harness import free_port

SHIM = (sys.executable, "-m", "srforge.distributed", "shim")
PROGRAM = """
import os, torch, torch.distributed as dist
from srforge.distributed import get_active_strategy, setup_device
setup_device(torch.nn.Linear(1, 1), "cpu")
strategy = get_active_strategy()
ranks = strategy.all_gather_object((strategy.rank, strategy.topology.local_rank))
os.write(1, f"seen {strategy.world_size} {ranks}\\n".encode())  # one write: lines of two tasks do not mix
strategy.teardown()
"""
LAUNCHERS = {
    "Open MPI": ("mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-np", "2"),
    "MPICH": ("mpiexec.hydra", "-n", "2"),
}


def launch(name, command, **env):
    program, *options = LAUNCHERS[name]
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("RANK", "WORLD", "MASTER"))
    }
    environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **env}
    return subprocess.run(
        [program, *options, *command], env=environment, capture_output=True, text=True, timeout=100, check=False
    )


@pytest.mark.parametrize("name", LAUNCHERS)
def test_two_tasks_of_one_host_become_one_fleet(name):
    ended = launch(name, [*SHIM, sys.executable, "-c", PROGRAM], MASTER_PORT=str(free_port()))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == ["seen 2 [(0, 0), (1, 1)]"] * 2


@pytest.mark.parametrize("name", LAUNCHERS)
def test_without_the_shim_they_are_refused(name):
    ended = launch(name, [sys.executable, "-c", PROGRAM])
    assert ended.returncode != 0
    assert "Put `python -m srforge.distributed shim` before the command" in ended.stderr


def test_outside_any_scheduler_the_shim_says_so_and_runs_nothing():
    ended = subprocess.run([*SHIM, "echo", "ran"], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert "error: the shim must run in a task of SLURM, Open MPI, MPICH or LSF" in ended.stderr
