"""The training script itself, on real photographs: the promises that a newcomer reads first."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from harness import kill_session, launch
from srforge.data import DataLoaderFactory
from srforge.sr import EDSR, demo_photographs, psnr, psnr_y, ssim
from srforge.training import CheckpointStore, Metrics, Term, ValidationRunner

APP = Path(__file__).parents[1] / "apps" / "train.py"
SHORT = ("training.epochs=3", "training.steps_per_epoch=4", "training.batch_size=4", "system.num_workers=0")
DIGEST = re.compile(r"\[r(\d)\] epoch (\d+) replica (\w+)")


def run_alone(*arguments: str, cwd: Path, timeout: float = 100) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(APP), *arguments]
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )


def only_run(folder: Path) -> Path:
    runs = [path for path in (folder / "runs").iterdir() if path.is_dir()]
    assert len(runs) == 1, runs
    return runs[0]


def state_of(run: Path, epoch: int) -> dict:
    return CheckpointStore(run / "checkpoints").load(run / "checkpoints" / f"epoch-{epoch:05d}.pt")


def assert_same_bits(left: object, right: object, where: str = "state") -> None:
    assert type(left) is type(right), where
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype, where
        assert torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8)), where
    elif isinstance(left, dict):
        assert list(left) == list(right), where
        for key in left:
            assert_same_bits(left[key], right[key], f"{where}.{key}")
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right), where
        for index, (one, other) in enumerate(zip(left, right, strict=True)):
            assert_same_bits(one, other, f"{where}[{index}]")
    else:
        assert left == right, where


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> "tuple[Path, subprocess.CompletedProcess[str]]":
    """A finished run of two ranks."""
    folder = tmp_path_factory.mktemp("fleet")
    root = f"run.root={folder / 'runs'}"
    done = launch(APP, root, *SHORT, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    return only_run(folder), done


def test_replicas_are_equal_on_both_ranks_after_every_epoch(fleet):
    digests = DIGEST.findall(fleet[1].stderr)
    by_epoch = {epoch: {rank: digest for rank, e, digest in digests if e == epoch} for _, epoch, _ in digests}
    assert sorted(by_epoch) == ["0", "1", "2"]
    for ranks in by_epoch.values():
        assert sorted(ranks) == ["0", "1"]
        assert len(set(ranks.values())) == 1
    assert len({ranks["0"] for ranks in by_epoch.values()}) == 3, "training must change the weights"


def test_fleet_metrics_equal_those_of_one_process_with_the_saved_weights(fleet):
    run, _ = fleet
    torch.set_num_threads(1)
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    model = EDSR(scale=2, in_channels=3, num_features=16, num_blocks=3)
    model.load_state_dict(state_of(run, 2)["model"])
    terms = {
        name: Term(function=lambda p, t, f=f: f(p, t, scale=2)) for name, f in (("psnr_y", psnr_y), ("psnr", psnr))
    }
    terms["ssim"] = Term(function=lambda p, t: ssim(p, t, scale=2))
    loader = DataLoaderFactory(demo_photographs("validation", scale=2), 1, shuffle=False).get_loader()
    for name, leaf in ValidationRunner(model, Metrics(terms)).run_epoch(loader, 0).items():
        assert logged[2][f"validation/{name}"] == pytest.approx(float(leaf.total) / leaf.count, rel=1e-9)


def test_two_ranks_write_one_folder_one_history_and_one_series(fleet):
    run, _ = fleet
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [0, 1, 2]
    assert [line["training/num_samples"] for line in lines] == [32.0, 32.0, 32.0]
    files = {path.name for path in (run / "checkpoints").iterdir()}
    committed = {name.partition(".")[0] for name in files}
    assert files == {f"{name}.{kind}" for name in committed for kind in ("pt", "json")}
    assert {"epoch-00001", "epoch-00002"} <= committed
    assert len(list((run / "images").rglob("*.png"))) == 3
    assert not list(run.rglob(".hydra"))


def test_a_finished_run_says_so_and_is_left_as_it_is(fleet):
    run, _ = fleet
    before = {path: path.stat().st_mtime_ns for path in (run / "checkpoints").iterdir()}
    again = launch(APP, f"run.root={run.parent}", *SHORT, timeout=100)
    assert again.returncode == 0, again.stderr
    assert again.stderr.count("This run is finished after 3 epochs") == 1
    assert again.stdout.splitlines()[-1].startswith("psnr_y ")
    assert {path: path.stat().st_mtime_ns for path in (run / "checkpoints").iterdir()} == before


def test_the_global_batch_finds_the_same_run_from_one_process(fleet):
    run, _ = fleet
    arguments = (
        "training.epochs=3",
        "training.steps_per_epoch=4",
        "training.global_batch_size=8",
        "system.num_workers=0",
    )
    alone = run_alone(f"run.root={run.parent}", *arguments, cwd=run.parent)
    assert alone.returncode == 0, alone.stderr
    assert "This run is finished" in alone.stderr


@pytest.mark.slow
def test_a_killed_fleet_ends_on_the_bits_of_one_that_was_not(tmp_path):
    long = ("training.epochs=3", "training.steps_per_epoch=12", "training.batch_size=4", "system.num_workers=2")
    whole = launch(APP, f"run.root={tmp_path / 'whole'}", *long, timeout=110)
    assert whole.returncode == 0, whole.stderr
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(APP)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    process = subprocess.Popen(
        [*command, f"run.root={tmp_path / 'killed'}", *long],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline and not list(tmp_path.glob("killed/*/checkpoints/epoch-00000.json")):
        time.sleep(0.05)
    time.sleep(0.2)
    os.killpg(process.pid, signal.SIGSTOP)  # nothing more is written while we look
    assert not list(tmp_path.glob("killed/*/checkpoints/epoch-00001.json")), "the kill must hit the second epoch"
    kill_session(process)
    process.communicate()
    again = launch(APP, f"run.root={tmp_path / 'killed'}", *long, timeout=110)
    assert again.returncode == 0, again.stderr
    assert "epoch 1/3" not in again.stdout, "the first epoch is finished and not repeated"
    (left,), (right,) = (list((tmp_path / name).glob("[!.]*")) for name in ("whole", "killed"))
    states = [state_of(run, 2) for run in (left, right)]
    for state in states:
        state.pop("config")  # it names the folder
    assert_same_bits(*states)
    assert (left / "metrics.jsonl").read_text() == (right / "metrics.jsonl").read_text()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_sweep_gives_each_job_one_folder_and_one_closed_run(tmp_path, ranks):
    tiny = ("training.epochs=1", "training.steps_per_epoch=2", "training.batch_size=2", "system.num_workers=0")
    sweep = ("-m", "run.seed=1,2", "tracking=wandb", f"run.root={tmp_path / 'runs'}", *tiny)
    done = run_alone(*sweep, cwd=tmp_path, timeout=200) if ranks == 1 else launch(APP, *sweep, timeout=200)
    assert done.returncode == 0, done.stderr
    folders = [path for path in (tmp_path / "runs").iterdir() if path.is_dir()]
    assert len(folders) == 2
    for folder in folders:
        assert len((folder / "metrics.jsonl").read_text().splitlines()) == 1
        assert len(list(folder.glob("wandb/offline-run-*"))) == 1
    assert not list(tmp_path.rglob(".hydra"))


def test_relative_paths_mean_the_same_when_hydra_changes_the_folder(tmp_path):
    for chdir in ("true", "false"):
        done = run_alone(
            *("run.root=runs", "run.name=same", f"hydra.job.chdir={chdir}", f"hydra.run.dir={tmp_path / 'elsewhere'}"),
            *("training.epochs=1", "training.steps_per_epoch=1", "training.batch_size=1", "system.num_workers=0"),
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "same" / "metrics.jsonl").exists()
    assert not (tmp_path / "elsewhere" / "runs").exists()
    assert "This run is finished" in done.stderr, "the second launch found the folder of the first"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [0, 1])
def test_150_steps_beat_bicubic_on_photographs_by_half_a_decibel(tmp_path, seed):
    arguments = ("training.epochs=1", "training.steps_per_epoch=150", "system.num_workers=0", f"run.seed={seed}")
    done = run_alone(*arguments, cwd=tmp_path, timeout=280)
    assert done.returncode == 0, done.stderr
    found = re.fullmatch(r"psnr_y ([\d.]+) dB \(bicubic ([\d.]+), \+([\d.]+)\)", done.stdout.splitlines()[-1])
    assert found, done.stdout
    assert float(found[3]) >= 0.5
    assert float(found[1]) - float(found[2]) == pytest.approx(float(found[3]), abs=0.011)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("system.device=cuda:0",), "`device` must be a device of this host"),
        (("training.epocs=3",), "Key 'epocs' not in 'TrainingConfig'"),
        (
            ("data=folders", "data.train.hr_folder=/nowhere", "data.validation.hr_folder=/nowhere"),
            "`hr_folder`.*/nowhere",
        ),
        (("strategy=fsdp",), "`strategy`.*fsdp"),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_mistake_in_the_configuration_is_one_clear_error(tmp_path, arguments, message, ranks):
    if torch.cuda.is_available() and "device" in message:
        pytest.skip("this host has the device")
    root = f"run.root={tmp_path}"
    done = run_alone(root, *arguments, cwd=tmp_path) if ranks == 1 else launch(APP, root, *arguments, timeout=100)
    assert done.returncode != 0
    # torchrun's own log lines and its report of the failure, which repeats our line, come besides.
    own = [line for line in done.stderr.splitlines() if re.match(r"\[rank|error:|Could not| *Key", line)]
    assert sum(bool(re.search(message, line)) for line in own) == 1, done.stderr
    assert not any("train.py" in line and line.lstrip().startswith("File") for line in done.stderr.splitlines())
