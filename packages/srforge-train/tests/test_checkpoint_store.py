"""The checkpoint store loads what was committed and nothing else."""

import io
import itertools
import json
import os
import random
import shutil
import warnings
from pathlib import Path

import pytest
import torch

from srforge.distributed.errors import ConfigurationError
from srforge.training import checkpoint_files
from srforge.training.checkpoint_files import CheckpointError, DigestingSink
from srforge.training.checkpoint_store import CheckpointStore


def state_of(epoch):
    generator = torch.Generator().manual_seed(epoch)
    return {"model": {"conv.weight": torch.rand(4, 3, generator=generator)}, "epoch": epoch, "name": "run"}


def save(store, epoch, *, is_best=False, finished=False, state=None, metrics=None):
    return store.save(
        state_of(epoch) if state is None else state,
        epoch=epoch,
        metrics={"validation/psnr": 20.0 + epoch} if metrics is None else metrics,
        is_best=is_best,
        finished=finished,
        world_size=2,
    )


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def same(left, right):
    return left["epoch"] == right["epoch"] and torch.equal(left["model"]["conv.weight"], right["model"]["conv.weight"])


def test_a_saved_state_comes_back_bit_for_bit_with_its_record(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints")
    path = save(store, 7, is_best=True, finished=True, metrics={"loss": 0.1, "bad": float("nan"), "low": -float("inf")})
    assert path == tmp_path / "checkpoints" / "epoch-00007.pt"
    record = CheckpointStore(tmp_path / "checkpoints").newest()
    assert (record.epoch, record.is_best, record.finished, record.world_size) == (7, True, True, 2)
    assert record.metrics["loss"] == 0.1
    assert record.metrics["bad"] != record.metrics["bad"]
    assert record.metrics["low"] == -float("inf")
    assert record.size == path.stat().st_size
    assert same(store.load(record), state_of(7))
    assert same(store.load(path), state_of(7))
    assert same(torch.load(path, weights_only=True), state_of(7))


def test_retention_keeps_the_last_and_the_best(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=2)
    for epoch in range(6):
        save(store, epoch, is_best=epoch in {0, 2})
    assert [record.epoch for record in store.records()] == [2, 4, 5]
    assert store.best().epoch == 2
    assert names(tmp_path) == [f"epoch-0000{epoch}.{kind}" for epoch in (2, 4, 5) for kind in ("json", "pt")]


def test_retention_without_best_keeps_the_last_only(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=1, keep_best=False)
    for epoch in range(3):
        save(store, epoch, is_best=epoch == 0)
    assert [record.epoch for record in store.records()] == [2]


def test_foreign_files_are_neither_read_nor_removed(tmp_path):
    foreign = [
        "notes.txt",
        "epoch-1.pt",
        "epoch-00001.pt.bak",
        "best.pt",
        ".hidden",
        ".epoch-x.pt.tmp",
        "epoch-00000.pt",
    ]
    store = CheckpointStore(tmp_path, keep_last=1)
    for name in foreign:
        (tmp_path / name).write_text("mine")
    save(store, 3)
    save(store, 4)
    store.remove_litter()
    assert store.newest().epoch == 4
    assert names(tmp_path) == sorted([*foreign, "epoch-00004.pt", "epoch-00004.json"])


def test_a_file_truncated_at_any_length_is_skipped_by_name_and_never_loads(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 0)
    path = save(store, 1)
    record = store.newest()
    whole = path.read_bytes()
    dice = random.Random(1)
    for length in [0, 1, len(whole) - 1, *(dice.randrange(len(whole)) for _ in range(47))]:
        path.write_bytes(whole[:length])
        with pytest.warns(UserWarning, match=r"epoch-00001\.pt is torn"):
            assert store.newest().epoch == 0
        with pytest.raises(CheckpointError, match=r"epoch-00001\.pt is torn"):
            store.load(record)


def test_a_file_with_any_flipped_bit_is_skipped_by_name_and_never_loads(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 0)
    path = save(store, 1)
    record = store.newest()
    whole = path.read_bytes()
    dice = random.Random(2)
    for bit in [dice.randrange(8 * len(whole)) for _ in range(200)]:
        altered = bytearray(whole)
        altered[bit // 8] ^= 1 << bit % 8
        path.write_bytes(altered)
        with pytest.warns(UserWarning, match=r"epoch-00001\.pt is altered"):
            assert store.newest().epoch == 0
        with pytest.raises(CheckpointError, match="altered"):
            store.load(record)


def test_a_record_with_any_flipped_bit_is_skipped_or_says_the_same(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 0)
    path = save(store, 1)
    truth = store.newest()
    whole = path.with_suffix(".json").read_bytes()
    dice = random.Random(3)
    skipped = 0
    for bit in [dice.randrange(8 * len(whole)) for _ in range(200)]:
        altered = bytearray(whole)
        altered[bit // 8] ^= 1 << bit % 8
        path.with_suffix(".json").write_bytes(altered)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = store.newest()
        if found.epoch == 0:
            skipped += 1
            assert "epoch-00001.json" in str(caught[0].message)
        else:
            assert found == truth  # white space took the hit
    assert skipped > 150


def test_best_falls_back_when_the_best_file_is_altered(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=3)
    save(store, 0, is_best=True)
    path = save(store, 1, is_best=True)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.warns(UserWarning, match="altered"):
        assert store.best().epoch == 0


def test_an_empty_or_absent_folder_has_no_newest(tmp_path):
    assert CheckpointStore(tmp_path).newest() is None
    store = CheckpointStore(tmp_path / "absent")
    store.remove_litter()
    assert store.newest() is None
    assert store.best() is None
    assert store.records() == []


def test_a_state_file_without_its_record_is_refused_with_the_cure(tmp_path):
    store = CheckpointStore(tmp_path)
    path = save(store, 0)
    alone = shutil.copy(path, tmp_path / "copied.pt")
    with pytest.raises(CheckpointError, match=r"copied\.json beside it.*Copy both files"):
        store.load(alone)


def test_a_later_format_is_refused_by_name(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path)
    monkeypatch.setattr("srforge.training.checkpoint_record.FORMAT_VERSION", 2)
    fields = {"format_version": 2}
    monkeypatch.setattr(
        "srforge.training.checkpoint_store.CheckpointRecord",
        lambda **given: __import__("srforge.training.checkpoint_record", fromlist=["x"]).CheckpointRecord(
            **given, **fields
        ),
    )
    path = save(store, 0)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"`format_version` must be 1, but is 2"):
        store.load(path)


class Hostile:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.system, (f"touch {self.target}",)


def test_a_hostile_pickle_is_refused_by_name_and_never_runs(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path / "checkpoints")
    marker = tmp_path / "it-ran"
    monkeypatch.setattr("srforge.training.checkpoint_store.to_plain", lambda state: state)
    path = save(store, 0, state={"model": Hostile(marker)})
    with pytest.raises(CheckpointError, match=r"epoch-00000\.pt must hold only tensors.*posix\.system|nt\.system"):
        store.load(path)
    assert not marker.exists()
    torch.load(path, weights_only=False)
    assert marker.exists()  # the file was live: the refusal is what stopped it


def test_a_value_that_cannot_be_loaded_back_is_refused_before_anything_is_written(tmp_path):
    store = CheckpointStore(tmp_path)
    with pytest.raises(CheckpointError, match=r"state\['hooks'\]\['folder'\] must be .* but is pathlib"):
        save(store, 0, state={"hooks": {"folder": tmp_path}})
    assert names(tmp_path) == []


def test_an_error_of_the_disk_names_path_and_number_and_leaves_the_previous_file_whole(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path)
    save(store, 0)
    monkeypatch.setattr("os.fsync", lambda descriptor: (_ for _ in ()).throw(OSError(5, "Input/output error")))
    with pytest.raises(CheckpointError, match=r"epoch-00001\.pt .*errno 5.*epoch-00000\.pt is whole"):
        save(store, 1)
    monkeypatch.undo()
    assert names(tmp_path) == ["epoch-00000.json", "epoch-00000.pt"]
    assert same(store.load(store.newest()), state_of(0))


def test_going_back_removes_the_branch_that_was_left_and_says_so(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=5)
    for epoch in range(5):
        save(store, epoch, is_best=epoch == 4)
    with pytest.warns(UserWarning, match=r"epoch-00003\.pt, epoch-00004\.pt removed: .*epoch-00002\.pt"):
        save(store, 2)
    assert [record.epoch for record in store.records()] == [0, 1, 2]
    assert store.newest().epoch == 2
    assert store.best() is None


def test_keep_last_below_one_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="`keep_last` must be at least 1, but is 0"):
        CheckpointStore(tmp_path, keep_last=0)


def test_the_record_is_json_that_any_tool_reads(tmp_path):
    path = save(CheckpointStore(tmp_path), 5, metrics={"loss": float("nan")})
    fields = json.loads(path.with_suffix(".json").read_text(), parse_constant=pytest.fail)
    assert fields["path"] == "epoch-00005.pt"
    assert fields["metrics"] == {"loss": "nan"}
    assert len(fields["sha256"]) == 64


@pytest.mark.parametrize("owner", [io.FileIO, DigestingSink])
def test_ctrl_c_inside_a_save_stays_ctrl_c_and_leaves_the_old_file(tmp_path, monkeypatch, owner):
    store = CheckpointStore(tmp_path)
    state = {"weights": [torch.zeros(500) for _ in range(20)]}
    save(store, 0, state=state)
    calls = itertools.count()

    class Interrupting(owner):
        def write(self, chunk, /):
            if next(calls) == 10:
                raise KeyboardInterrupt  # where a signal is handled: between two lines of Python
            return super().write(chunk)

    def opened(path, mode):
        return Interrupting(path, mode)

    if owner is DigestingSink:
        monkeypatch.setattr(checkpoint_files, "DigestingSink", Interrupting)
    else:
        monkeypatch.setattr(Path, "open", opened)
    with pytest.raises(KeyboardInterrupt):
        save(store, 1, state=state)
    monkeypatch.undo()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch-00000.json", "epoch-00000.pt"]
    assert store.newest().epoch == 0
