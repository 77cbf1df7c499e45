import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import run_lock
from run_folder import identity_of, open_run_folder
from srforge.distributed import ConfigurationError
from srforge.distributed.testing import FakeStrategy

CONFIG = {
    "model": {"num_features": 16},
    "training": {"epochs": 3, "batch_size": 4, "accumulate": 1, "max_minutes": None},
    "system": {"device": "auto", "num_workers": 2, "distributed": {"backend": "gloo", "sync_batchnorm": False}},
    "tracking": {"local": {}},
    "run": {"name": None, "preset": "demo", "root": "runs", "seed": 0, "fresh": False, "resume": "auto"},
    "dry_run": False,
}


def changed(path, value):
    config = copy.deepcopy(CONFIG)
    *sections, key = path.split(".")
    node = config
    for section in sections:
        node = node[section]
    node[key] = value
    return config


def opened(config, tmp_path, global_batch=8, rank=0):
    return open_run_folder(config, global_batch, tmp_path, FakeStrategy(rank, 1))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("system.device", "cuda:1"),
        ("system.num_workers", 8),
        ("system.distributed.backend", "nccl"),
        ("tracking.local", {"name": "x"}),
        ("run.resume", "never"),
        ("training.max_minutes", 5.0),
        ("training.batch_size", 2),
        ("dry_run", True),
    ],
)
def test_what_does_not_shape_the_result_does_not_change_the_folder(tmp_path, path, value):
    assert opened(CONFIG, tmp_path) == opened(changed(path, value), tmp_path)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model.num_features", 32),
        ("training.epochs", 4),
        ("run.seed", 1),
        ("system.distributed.sync_batchnorm", True),
    ],
)
def test_what_shapes_the_result_has_a_folder_of_its_own(tmp_path, path, value):
    assert opened(CONFIG, tmp_path)[0] != opened(changed(path, value), tmp_path)[0]


def test_the_global_batch_is_part_of_the_identity_and_the_ranks_are_not():
    assert identity_of(CONFIG, 8) != identity_of(CONFIG, 16)
    assert identity_of(CONFIG, 8)["training.global_batch_size"] == 8


def test_a_fixed_name_with_another_configuration_is_an_error_that_names_the_keys(tmp_path):
    config = changed("run.name", "mine")
    folder, _ = opened(config, tmp_path)
    assert folder == tmp_path / "runs" / "mine"
    assert opened(config, tmp_path)[0] == folder
    other = copy.deepcopy(config)
    other["model"]["num_features"] = 99
    other["training"]["epochs"] = 4
    with pytest.raises(ConfigurationError, match=r"another model.num_features, training.epochs"):
        opened(other, tmp_path)


def test_fresh_starts_over_and_leaves_foreign_folders_alone(tmp_path):
    config = changed("run.name", "mine")
    folder, _ = opened(config, tmp_path)
    (folder / "metrics.jsonl").write_text("old")
    config["run"]["fresh"] = True
    opened(config, tmp_path)
    assert not (folder / "metrics.jsonl").exists()
    foreign = tmp_path / "runs" / "thesis"
    foreign.mkdir()
    (foreign / "chapter.tex").write_text("years of work")
    config["run"]["name"] = "thesis"
    with pytest.raises(ConfigurationError, match="left as it is"):
        opened(config, tmp_path)
    assert (foreign / "chapter.tex").exists()


def test_a_second_launch_is_kept_out_while_the_first_one_lives(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "_PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(run_lock, "_held", {})
    program = """
import sys, time
from pathlib import Path
from run_lock import lock_run
lock_run(Path(sys.argv[1]))
print("locked", flush=True)
time.sleep(100)
"""
    command = [sys.executable, "-c", program, str(tmp_path / "runs" / "mine")]
    apps = str(Path(run_lock.__file__).parent)
    first = subprocess.Popen(
        command, cwd=apps, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": apps}
    )
    try:
        assert first.stdout.readline() == "locked\n"
        with pytest.raises(ConfigurationError, match=rf"process {first.pid} on \S+ does in .*mine"):
            opened(changed("run.name", "mine"), tmp_path)
    finally:
        first.kill()
        first.communicate()
    opened(changed("run.name", "mine"), tmp_path)
    opened(changed("run.name", "mine"), tmp_path)


@pytest.mark.parametrize("fresh", [False, True])
def test_a_plan_touches_nothing(tmp_path, fresh):
    folder, _ = opened(CONFIG, tmp_path)
    (folder / "metrics.jsonl").write_text("old")
    config = changed("dry_run", True)
    config["run"]["fresh"] = fresh
    assert opened(config, tmp_path)[0] == folder
    assert (folder / "metrics.jsonl").read_text() == "old"
    config["model"]["num_features"] = 99
    assert not opened(config, tmp_path)[0].exists()


def test_a_drawn_seed_is_kept_for_the_next_launch(tmp_path):
    config = changed("run.seed", None)
    folder, seed = opened(config, tmp_path)
    assert opened(config, tmp_path) == (folder, seed)
    assert json.loads((folder / "identity.json").read_text())["seed"] == seed


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path):
    (tmp_path / "runs").write_text("a file where a folder should be")
    with pytest.raises(ConfigurationError, match="runs"):
        opened(CONFIG, tmp_path)


@pytest.mark.parametrize("name", ["..", ".", "a/../b", "/elsewhere/run", "a//b", "a/"])
def test_a_name_that_leads_out_of_the_root_is_refused(tmp_path, name):
    with pytest.raises(ConfigurationError, match=r"`run.name` must be a folder below run.root"):
        opened(changed("run.name", name), tmp_path)


@pytest.mark.parametrize("name", ["a/b", "x=1 y", "..a", "v1.0", "\u00fc"])
def test_other_names_are_folders(tmp_path, name):
    assert opened(changed("run.name", name), tmp_path)[0] == tmp_path / "runs" / name


def test_starting_over_behind_a_link_empties_what_it_leads_to(tmp_path):
    elsewhere = tmp_path / "disk" / "run"
    elsewhere.mkdir(parents=True)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mine").symlink_to(elsewhere)
    config = changed("run.name", "mine")
    folder, _ = opened(config, tmp_path)
    (folder / "metrics.jsonl").touch()
    config["run"]["fresh"] = True
    assert opened(config, tmp_path)[0] == folder
    assert folder.is_symlink()
    assert [path.name for path in elsewhere.iterdir()] == ["identity.json"]
    assert [path.name for path in elsewhere.parent.iterdir()] == ["run"]


def test_a_job_starts_over_once_and_its_restarts_continue(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "first")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    config = changed("run.fresh", True)
    folder, _ = opened(config, tmp_path)
    (folder / "progress").touch()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert opened(config, tmp_path)[0] == folder
    assert (folder / "progress").exists()
    assert "restart 1 continues the run" in capsys.readouterr().out
    # Another job, whose first attempt died before it came to start over.
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "second")
    opened(config, tmp_path)
    assert not (folder / "progress").exists()


def test_the_same_command_again_starts_over_again(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # what torchrun says of every launch without a rendezvous
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    config = changed("run.fresh", True)
    folder, _ = opened(config, tmp_path)
    (folder / "progress").touch()
    opened(config, tmp_path)
    assert not (folder / "progress").exists()
