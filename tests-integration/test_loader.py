"""The loader with real workers from the fork server, in scripts of their own, as a user runs it."""

import os
import re
import subprocess
import sys
import textwrap
import time

import pytest

HEAD = """
import itertools, json, os, random, sys, threading, time, warnings

import numpy as np
import srforge
import torch
from torch.utils.data import Dataset

from srforge.data import DataLoaderFactory, OncePerProcess
from srforge.distributed import begin_epoch

warnings.filterwarnings("ignore", message="num_workers x ranks")
"""

TAIL = """

if __name__ == "__main__":
    srforge.init(preload=("colorsys",))
    main()
"""


def run(tmp_path, body, *, timeout=100, env=None, before=(), until=lambda: False):
    """Run a script and return its result; one that does not end in time, or before ``until``, is killed."""
    script = tmp_path / "program.py"
    script.write_text(HEAD + textwrap.dedent(body) + TAIL)
    process = subprocess.Popen(
        [*before, sys.executable, str(script)],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline and not until():
        try:
            out, err = process.communicate(timeout=0.5)
        except subprocess.TimeoutExpired:
            continue
        return subprocess.CompletedProcess([], process.returncode, out, err)
    process.kill()  # its workers and server end with it
    out, err = process.communicate()
    return subprocess.CompletedProcess([], None, out, err)


def test_samples_are_the_same_for_any_number_of_workers_living_or_not(tmp_path):
    result = run(
        tmp_path,
        """
        class Drawing(Dataset):
            epoch = None

            def __len__(self):
                return 12

            def set_epoch(self, epoch):
                self.epoch = epoch

            def __getitem__(self, index):
                if torch.utils.data.get_worker_info() is not None:
                    assert "colorsys" in sys.modules and "cv2" in sys.modules  # the server imported them
                draws = [random.random(), np.random.rand(), float(torch.rand(()))]
                return torch.tensor([index, self.epoch, *draws], dtype=torch.float64)

        def main():
            runs = []
            for options in ({}, {"num_workers": 2}, {"num_workers": 1, "persistent_workers": False}):
                loader = DataLoaderFactory(Drawing(), 4, shuffle=True, seed=3, **options).get_loader()
                rows = []
                for epoch in range(3):
                    begin_epoch(epoch, 3, loader)
                    state = torch.get_rng_state(), random.getstate()
                    rows += [row for batch in loader for row in batch]
                    assert torch.equal(state[0], torch.get_rng_state()) and state[1] == random.getstate()
                runs.append(torch.stack(rows))
            assert torch.equal(runs[0], runs[1]) and torch.equal(runs[0], runs[2])
            assert runs[0][:, 1].tolist() == [0.0] * 12 + [1.0] * 12 + [2.0] * 12
            assert len(set(runs[0][:, 4].tolist())) == 36
            print("equal")
        """,
    )
    assert result.stdout == "equal\n", result.stderr


LOCKED = """
    lock = threading.Lock()

    class Locked(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            with lock:  # a log handler's, an allocator's, a thread pool's
                return index

    def main():
        threading.Thread(target=hold, daemon=True).start()
        time.sleep(0.2)
        loader = DataLoaderFactory(Locked(), 2, shuffle=False, num_workers=1, seed=0, **OPTIONS).get_loader()
        print(torch.cat(list(loader)).tolist(), flush=True)

    def hold():
        with lock:
            time.sleep(3600)
"""


def test_lock_that_was_held_at_fork_hangs_forked_workers_and_not_ours(tmp_path):
    ours = run(tmp_path, LOCKED.replace("**OPTIONS", ""))
    assert ours.stdout == "[0, 1, 2, 3]\n", ours.stderr
    forked = run(tmp_path, LOCKED.replace("**OPTIONS", 'multiprocessing_context="fork"'), timeout=15)
    assert forked.returncode is None
    assert forked.stdout == ""
    assert re.search(r'is "fork" and threads run here \(Thread-1', forked.stderr)


def test_hang_reports_name_the_line_of_main_and_workers(tmp_path):
    """One worker sleeps, the other one holds the interpreter's lock in a C call."""

    def all_dumped_twice():
        files = [tmp_path / "hang" / f"{name}.txt" for name in ("r0", "r0-w0", "r0-w1")]
        return all(file.exists() and file.read_text().count("Timeout (0:00:02)!") >= 2 for file in files)

    result = run(
        tmp_path,
        """
        class Sleeping(Dataset):
            def __len__(self):
                return 2

            def __getitem__(self, index):
                time.sleep(3600) if index == 0 else sum(itertools.repeat(1, 10**12))  # line that hangs

        def main():
            print("begins", flush=True)
            list(DataLoaderFactory(Sleeping(), 1, shuffle=False, num_workers=2, seed=0).get_loader())
        """,
        env={"DEBUG_HANG": "2"},
        until=all_dumped_twice,
    )
    assert result.returncode is None
    source = (tmp_path / "program.py").read_text().splitlines()
    hangs = next(number for number, line in enumerate(source, 1) if "line that hangs" in line)
    waits = next(number for number, line in enumerate(source, 1) if "list(DataLoaderFactory" in line)
    for name, line, function in (
        ("r0", waits, "main"),
        ("r0-w0", hangs, "__getitem__"),
        ("r0-w1", hangs, "__getitem__"),
    ):
        expected = f'program.py", line {line} in {function}'
        assert expected in (tmp_path / "hang" / f"{name}.txt").read_text()
        assert re.search(rf"^\[{name}\] .*{re.escape(expected)}$", result.stderr, re.MULTILINE)


RESIZING = """
    import cv2

    class Resizing(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return torch.from_numpy(cv2.resize(np.full((2000, 2000, 3), index, np.uint8), (500, 500))[0, 0])

    def main():
        cv2.resize(np.zeros((2000, 2000, 3), np.uint8), (500, 500))
        loader = DataLoaderFactory(Resizing(), 1, shuffle=False, num_workers=2, seed=0, **OPTIONS).get_loader()
        print([int(batch[0, 0]) for batch in loader], flush=True)
"""


def test_a_plain_fork_server_serves_our_data_sets_too(tmp_path):
    program = """
    import srforge.data
    from torch.utils.data import DataLoader

    if __name__ == "__main__":
        data = srforge.data.SkipUnreadable([1, 2])
        print([int(batch) for batch in DataLoader(data, num_workers=1, multiprocessing_context="forkserver")])
    """
    script = tmp_path / "plain.py"
    script.write_text(textwrap.dedent(program))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout == "[1, 2]\n", done.stderr


@pytest.mark.parametrize(("options", "threads"), [("", "1"), ("", "0"), ('multiprocessing_context="fork"', "0")])
def test_opencv_in_the_rank_does_not_hang_its_workers(tmp_path, options, threads):
    result = run(tmp_path, RESIZING.replace("**OPTIONS", options), env={"SRFORGE_CV2_THREADS": threads})
    assert result.stdout == "[0, 1, 2, 3]\n", result.stderr


def test_fork_after_opencv_made_threads_warns(tmp_path):
    body = RESIZING.replace("**OPTIONS", 'multiprocessing_context="fork"').replace("print(", "return  # ")
    body = body.replace("def main():\n", "def main():\n        cv2.setNumThreads(4)\n")
    result = run(tmp_path, body, env={"SRFORGE_CV2_THREADS": "1"})
    assert result.returncode == 0, result.stderr
    assert "OpenCV may use 4 threads here" in result.stderr


def test_lmdb_and_hdf5_data_sets_open_lazily_in_each_worker(tmp_path):
    result = run(
        tmp_path,
        """
        from functools import partial
        import h5py, lmdb

        def open_pairs(path):
            return lmdb.open(path, readonly=True, lock=False)

        class Stored(Dataset):
            def __init__(self):
                self.pairs = OncePerProcess(partial(open_pairs, "pairs"))
                self.images = OncePerProcess(partial(h5py.File, "images.h5", "r"))

            def __len__(self):
                return 4

            def __getitem__(self, index):
                with self.pairs().begin() as transaction:
                    return int(transaction.get(str(index).encode())), int(self.images()["images"][index])

        def main():
            with h5py.File("images.h5", "w") as file:
                file["images"] = np.arange(4) * 10
            with lmdb.open("pairs") as environment, environment.begin(write=True) as transaction:
                for index in range(4):
                    transaction.put(str(index).encode(), str(index * 100).encode())
            dataset = Stored()
            assert dataset[1] == (100, 10)  # open in the rank too
            loader = DataLoaderFactory(dataset, 4, shuffle=False, num_workers=2, seed=0).get_loader()
            print([part.tolist() for part in next(iter(loader))])
        """,
    )
    assert result.stdout == "[[0, 100, 200, 300], [0, 10, 20, 30]]\n", result.stderr


def test_failing_sample_is_named_with_rank_worker_and_index(tmp_path):
    result = run(
        tmp_path,
        """
        class Broken(Dataset):
            def __len__(self):
                return 4

            def __getitem__(self, index):
                return index if index != 3 else int("none")

        def main():
            list(DataLoaderFactory(Broken(), 2, shuffle=False, num_workers=2, seed=0).get_loader())
        """,
    )
    assert result.returncode == 1
    assert re.search(
        r"sample 3 \(epoch 0\) must be readable.* rank 0, worker 1: ValueError: invalid literal", result.stderr
    )


KEEPING = """
    class Images(Dataset):
        def __len__(self):
            return 600

        def __getitem__(self, index):
            return torch.zeros(3, SIZE, SIZE)

    def main():
        loader = DataLoaderFactory(Images(), 2, shuffle=False, num_workers=2, seed=0).get_loader()
        print(len([batch for batch in loader]))
"""


def test_low_limit_of_open_files_is_said_before_the_first_batch_and_nothing_hangs(tmp_path):
    result = run(tmp_path, KEEPING.replace("SIZE", "4"), before=["sh", "-c", 'ulimit -n 256; exec "$0" "$@"'])
    assert result.returncode is not None
    warning = result.stderr.find("The limit of open files (ulimit -n) must be about")
    assert warning >= 0
    failure = result.stderr.find("Traceback")
    assert result.returncode == 0 or warning < failure


@pytest.mark.skipif(sys.platform != "linux" or os.getuid() != 0, reason="mounts a small /dev/shm")
def test_small_shared_memory_is_said_before_the_first_batch_and_nothing_hangs(tmp_path):
    mount = "mount -t tmpfs -o size=16m tmpfs /dev/shm"
    allowed = subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True, check=False)
    if allowed.returncode != 0:
        pytest.skip("this container may not mount")
    result = run(
        tmp_path, KEEPING.replace("SIZE", "1024"), before=["unshare", "-m", "sh", "-c", f'{mount}; exec "$0" "$@"']
    )
    assert result.returncode not in (0, None)  # 24 MiB a batch cannot work
    warning = result.stderr.find("/dev/shm must hold the 4 batches that 2 workers make ahead, but has 16 MiB free")
    assert 0 <= warning < result.stderr.find("Traceback")
    assert "Bus error" in result.stderr or "shared memory" in result.stderr
