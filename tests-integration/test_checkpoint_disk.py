"""The checkpoint store against real disks and real kills: the file before is whole, and no litter stays."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from srforge.training.checkpoint_files import CheckpointError
from srforge.training.checkpoint_store import CheckpointStore

KILLS = 20

# Saves epochs without end; each state is a function of its epoch, so that the reader can tell right from wrong.
# Children are forked from a process that has imported everything, so that a kill lands in the saves.
PROGRAM = """
import os, sys
import torch
from srforge.training.checkpoint_store import CheckpointStore
torch.set_num_threads(1)
for line in sys.stdin:
    folder, first = line.split()
    child = os.fork()
    if child:
        print(child, flush=True)
        os.waitpid(child, 0)
        print("gone", flush=True)
        continue
    store = CheckpointStore(folder)
    for epoch in range(int(first), 100_000):
        state = {"weight": torch.full((200_000,), float(epoch)), "epoch": epoch}
        store.save(state, epoch=epoch, metrics={"loss": 1.0 / (epoch + 1)}, is_best=epoch % 5 == 0,
                   finished=False, world_size=1)
"""


def save(store, epoch, numel=1000):
    state = {"weight": torch.full((numel,), float(epoch)), "epoch": epoch}
    return store.save(state, epoch=epoch, metrics={}, is_best=False, finished=False, world_size=1)


def is_right(state):
    return bool((state["weight"] == state["epoch"]).all())


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the writers are forked from one program")
def test_sigkill_at_random_moments_of_saves_leaves_a_whole_file_and_no_litter(tmp_path):
    """Also over many launches on one folder: each goes on where the last committed file ends."""
    seed = random.randrange(2**32)
    print("seed of the delays:", seed)
    dice = random.Random(seed)
    folder = tmp_path / "checkpoints"
    store = CheckpointStore(folder)
    save(store, 0)
    in_save = 0
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as p:
        for _ in range(KILLS):
            before = store.newest().epoch
            p.stdin.write(f"{folder} {before + 1}\n")
            p.stdin.flush()
            writer = int(p.stdout.readline())
            time.sleep(dice.uniform(0.0, 0.15))
            os.kill(writer, signal.SIGKILL)
            assert p.stdout.readline() == "gone\n"
            in_save += any(name.startswith(".") for name in names(folder))
            store.remove_litter()
            record = store.newest()  # a warning would be an error: nothing in the folder is torn
            assert record.epoch >= before
            assert is_right(store.load(record))
            kept = store.records()
            assert names(folder) == sorted(f"epoch-{r.epoch:05d}.{kind}" for r in kept for kind in ("pt", "json"))
            assert kept
        p.stdin.close()
        p.wait(timeout=10)
    save(store, 100_000)  # the next whole save makes up for removals that a kill prevented
    assert len(store.records()) <= 3
    assert in_save >= KILLS // 4, f"only {in_save} kills came in a save"


@pytest.mark.parametrize(
    "point", ["after the state", "after both", "between the renames", "in the removal", "at its end"]
)
def test_a_kill_at_each_step_of_a_save_is_finished_or_undone(tmp_path, point):
    """The same by construction: the folder as each step leaves it."""
    store = CheckpointStore(tmp_path, keep_last=5)
    save(store, 0)
    save(store, 1)
    state, record = tmp_path / "epoch-00001.pt", tmp_path / "epoch-00001.json"
    expected = 1
    if point in {"after the state", "after both", "between the renames"}:
        save(store, 2)
        state, record = tmp_path / "epoch-00002.pt", tmp_path / "epoch-00002.json"
        record.rename(tmp_path / ".epoch-00002.json.tmp")
        if point != "between the renames":
            state.rename(tmp_path / ".epoch-00002.pt.tmp")
        if point == "after the state":
            (tmp_path / ".epoch-00002.json.tmp").write_bytes(b"{")
        expected = 2 if point == "between the renames" else 1
    else:
        (tmp_path / "epoch-00000.json").rename(tmp_path / ".epoch-00000.json.removed")
        if point == "at its end":
            (tmp_path / "epoch-00000.pt").unlink()
    store.remove_litter()
    record = store.newest()
    assert record.epoch == expected
    assert is_right(store.load(record))
    assert not [name for name in names(tmp_path) if name.startswith(".")]
    epochs = {1} if "removal" in point or "end" in point else {0, 1, expected}
    assert {Path(name).stem for name in names(tmp_path)} == {f"epoch-0000{epoch}" for epoch in epochs}


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 2 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if not sys.platform.startswith("linux") or shutil.which("mount") is None:
        pytest.skip("mounting a small file system needs Linux")
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"mounting a small file system is not permitted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_that_fills_in_a_save_is_a_loud_error_and_the_file_before_is_whole(small_disk):
    store = CheckpointStore(small_disk)
    save(store, 0)
    before = names(small_disk)
    for numel in (600_000, 520_000, 5_000_000):  # 2.4, 2.1 and 20 MB
        with pytest.raises(
            CheckpointError,
            match=r"epoch-00001\.pt could not be written: No space left .*errno 28.*epoch-00000\.pt is whole",
        ):
            save(store, 1, numel)
        assert names(small_disk) == before
        assert is_right(store.load(store.newest()))
    save(store, 1)  # room enough again: the run could go on
    assert store.newest().epoch == 1


def test_a_disk_without_room_for_the_record_is_a_loud_error_too(small_disk):
    store = CheckpointStore(small_disk)
    path = save(store, 0)
    size = path.stat().st_size
    (small_disk / "filler").write_bytes(b"x" * 1_500_000)
    free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
    pages = -(-size // 4096) * 4096
    (small_disk / "filler2").write_bytes(b"x" * (free - pages))
    with pytest.raises(CheckpointError, match="errno 28"):
        save(store, 1)
    assert names(small_disk) == ["epoch-00000.json", "epoch-00000.pt", "filler", "filler2"]
    assert is_right(store.load(store.newest()))


def test_a_disk_that_turned_read_only_is_a_loud_error_and_still_loads(small_disk):
    store = CheckpointStore(small_disk)
    save(store, 0)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(CheckpointError, match=r"epoch-00001\.pt could not be written: Read-only .*errno 30"):
        save(store, 1)
    assert is_right(store.load(store.newest()))


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write into any folder")
def test_a_folder_without_permission_is_a_loud_error(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 0)
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(CheckpointError, match="errno 13"):
            save(store, 1)
    finally:
        tmp_path.chmod(0o700)
