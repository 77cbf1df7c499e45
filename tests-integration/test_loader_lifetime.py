"""No worker and no fork server outlives its rank by more than two seconds, however the rank ends."""

import json
import signal
import subprocess
import sys
import time

import psutil
import pytest

if sys.platform != "linux":
    pytest.skip("reads process tables", allow_module_level=True)

LIMIT_SECONDS = 2.0

PROGRAM = """
import itertools, json, os, sys, time

import psutil
import srforge
import torch
from torch.utils.data import Dataset

from srforge.data import DataLoaderFactory


class Numbers(Dataset):
    def __init__(self, state):
        self.state = state

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index >= 4 and self.state == "sleeping":
            time.sleep(3600)
        if index >= 4 and self.state == "in C":  # holds the interpreter's lock and looks at no signal handler
            time.sleep(0.2)  # the queue's thread sends the batch before
            sum(itertools.repeat(1, 10**12))
        return torch.tensor(index)


def main(ending, state, persistent, method):
    srforge.init()
    options = {} if method == "policy" else {"multiprocessing_context": method}
    if persistent == "new":
        options["persistent_workers"] = False
    loader = DataLoaderFactory(Numbers(state), 2, shuffle=False, num_workers=2, seed=0, **options).get_loader()
    batches = iter(loader)
    next(batches)
    if state == "idle":
        list(batches) if persistent == "living" else next(batches)
    time.sleep(0.3)
    children = psutil.Process().children(recursive=True)
    pids = [child.pid for child in children if "resource_tracker" not in " ".join(child.cmdline())]
    print(json.dumps(pids), flush=True)
    if ending == "exception":
        raise ValueError("planted")
    time.sleep(3600)


if __name__ == "__main__":
    main(*sys.argv[1:])
"""

CASES = [
    # ending, what the workers do, workers, start method, processes expected to be there
    ("SIGKILL", "idle", "living", "policy", 3),
    ("SIGKILL", "idle", "new", "policy", 3),
    ("SIGKILL", "sleeping", "living", "policy", 3),
    ("SIGKILL", "in C", "new", "policy", 3),
    ("SIGTERM", "sleeping", "new", "policy", 3),
    ("SIGTERM", "in C", "living", "policy", 3),
    ("exception", "idle", "living", "policy", 3),
    ("exception", "sleeping", "new", "policy", 3),
    ("SIGKILL", "in C", "living", "fork", 3),  # an explicit start method is tied to the rank too
    ("SIGKILL", "sleeping", "living", "spawn", 3),
]


@pytest.mark.parametrize(("ending", "state", "persistent", "method", "expected"), CASES)
def test_every_process_of_the_loader_ends_with_its_rank(tmp_path, ending, state, persistent, method, expected):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    rank = subprocess.Popen(
        [sys.executable, "-W", "ignore", script, ending, state, persistent, method],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        pids = json.loads(rank.stdout.readline())
        assert len(pids) == expected
        assert all(is_running(pid) for pid in pids)
        if ending != "exception":
            rank.send_signal(getattr(signal, ending))
        rank.wait(timeout=20)  # an exception lets torch wait for busy workers first
        assert rank.returncode != 0
        assert seconds_until_gone(pids) <= LIMIT_SECONDS
    finally:
        rank.kill()
        rank.communicate()


@pytest.mark.parametrize("delay", [0.0, 0.1, 0.3, 1.0])
def test_fork_server_ends_with_a_rank_that_dies_while_it_still_imports(tmp_path, delay):
    script = tmp_path / "program.py"
    script.write_text(
        "import srforge, time\n"
        "if __name__ == '__main__':\n"
        "    srforge.init()\n"
        "    from multiprocessing.forkserver import _forkserver\n"
        "    print(_forkserver._forkserver_pid, flush=True)\n"
        "    time.sleep(3600)\n"
    )
    rank = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    try:
        server = int(rank.stdout.readline())
        time.sleep(delay)
        assert is_running(server)
        rank.kill()
        rank.wait(timeout=5)
        assert seconds_until_gone([server]) <= LIMIT_SECONDS
    finally:
        rank.kill()
        rank.communicate()


def seconds_until_gone(pids):
    began = time.monotonic()
    while any(is_running(pid) for pid in pids) and time.monotonic() - began < 3 * LIMIT_SECONDS:
        time.sleep(0.02)
    left = [pid for pid in pids if is_running(pid)]
    for pid in left:
        psutil.Process(pid).kill()
    assert not left
    return time.monotonic() - began


def is_running(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
