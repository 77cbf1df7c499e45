"""Resume, warm start and export through the training script and torchrun, as people use them."""

import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from harness import kill_session
from kill_matrix import PROGRAM, Case, Launcher, run_to_end
from run_comparison import compare_runs
from srforge.training import CheckpointStore

APP = Path(__file__).parents[1] / "apps" / "train.py"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]  # each test starts the script a few times
SHORT = (
    "training.epochs=2",
    "training.steps_per_epoch=2",
    "training.batch_size=2",
    "training.ema_decay=0.5",
    "system.num_workers=0",
)


def train(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(APP), f"run.root={folder}", *SHORT, *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100, check=False
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run."""
    folder = tmp_path_factory.mktemp("finished")
    done = train(folder, "run.name=first")
    assert done.returncode == 0, done.stderr
    return folder / "first"


class Hostile:
    def __reduce__(self):
        return os.mkdir, (os.environ["HOSTILE_MARK"],)


def test_the_best_averaged_weights_are_exported_under_plain_names(finished):
    store = CheckpointStore(finished / "checkpoints")
    best = store.best()
    expected = store.load(best)["ema"]["model"]
    with safetensors.safe_open(finished / "weights.safetensors", "pt") as file:
        assert sorted(file.keys()) == sorted(expected)
        assert all(torch.equal(file.get_tensor(name), value) for name, value in expected.items())
        assert file.metadata()["epoch"] == str(best.epoch)
        assert float(file.metadata()["validation/psnr_y"]) == best.metrics["validation/psnr_y"]


def test_a_warm_start_begins_a_run_of_its_own_and_is_not_repeated_at_a_resume(finished):
    weights = finished.parent / "mine.safetensors"
    weights.write_bytes((finished / "weights.safetensors").read_bytes())
    chosen = (f"run.warm_start.path={weights.name}", "run.name=second")
    done = train(finished.parent, *chosen)
    assert done.returncode == 0, done.stderr
    assert re.search(r"weights from mine.safetensors: \d+ matched, 0 missing, 0 unexpected", done.stdout)
    weights.unlink()
    again = train(finished.parent, *chosen)
    assert again.returncode == 0, again.stderr
    assert "This run is finished" in again.stderr
    other = train(finished.parent, "run.name=second")
    assert other.returncode != 0
    assert "was made with another run.warm_start" in other.stderr


@pytest.mark.parametrize("key", ["run.resume", "run.warm_start.path"])
def test_a_hostile_pickle_is_refused_and_never_runs(finished, tmp_path, monkeypatch, key):
    monkeypatch.setenv("HOSTILE_MARK", str(tmp_path / "ran"))
    store = CheckpointStore(finished / "checkpoints")
    record = store.newest()
    path = tmp_path / record.path.name
    path.write_bytes(pickle.dumps({"model": Hostile()}))
    # Whoever can write the file can write a fitting record beside it: the digest is no protection against intent.
    import hashlib
    from dataclasses import replace

    from srforge.training.checkpoint_record import encode_record

    content = path.read_bytes()
    forged = replace(record, path=path, size=len(content), sha256=hashlib.sha256(content).hexdigest())
    path.with_suffix(".json").write_bytes(encode_record(forged))
    done = train(tmp_path, f"{key}={path}", "run.name=third")
    assert done.returncode != 0
    assert re.search(
        r"error: .*must hold only tensors and plain values, but was refused.*Nothing in it was run", done.stderr
    )
    assert not (tmp_path / "ran").exists()


def test_torchrun_restarts_resume_by_themselves_also_after_a_death_in_the_save(tmp_path):
    """Three SIGKILLs in one job: in training, in the write of a state, and between the two renames of a save."""
    deaths = [("training", 1, 1), ("save: writing the state", 2, 0), ("save: between the renames", 3, 0)]
    targets = [
        {"phase": phase, "epoch": epoch, "index": 1 if phase == "training" else 0, "rank": rank, "action": "self"}
        for phase, epoch, rank in deaths
    ]
    reference, run, notes = tmp_path / "whole", tmp_path / "restarted", tmp_path / "notes"
    launcher = Launcher(forks=True, hash_seed=1)
    run_to_end(launcher, Case(world_size=2, workers=0), reference, "cpu")
    launcher.close()
    notes.mkdir()
    case = {"folder": str(run), "notes": str(notes), "workers": 0, "persistent": False, "accumulate": 2, "gan": False}
    task = {"environment": {}, "case": {**case, "pause": 0.0, "device": "cpu"}, "target": [*targets, None]}
    options = ["--standalone", "--nproc_per_node=2", f"--max-restarts={len(deaths)}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *options, str(PROGRAM), json.dumps(task)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=240)
    finally:
        kill_session(process)
    assert process.returncode == 0, output[-4000:]
    assert re.findall(r"Resuming from epoch-(\d+)", output) == ["00000", "00001", "00003"]
    assert compare_runs(reference, run) == []
