"""Real offline W&B runs: one per fleet, one axis, nothing lost, no key inside, an end in bounded time."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from srforge.distributed.active import set_active_strategy
from srforge.distributed.errors import ConfigurationError
from srforge.distributed.testing import FakeStrategy
from srforge.tracking import Tracker, TrackingError, WandbTracker

_SPEC = importlib.util.spec_from_file_location("wandb_files", Path(__file__).with_name("wandb_files.py"))
files = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(files)

KEY = "0123456789abcdef0123456789abcdef01234567"
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),  # W&B's own
    pytest.mark.timeout(240),  # six processes, each starting W&B's service
]

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="the cases are forked from one program")


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")


def plain(row):
    return {key: value for key, value in row.items() if not key.startswith("_")}


def test_an_offline_run_keeps_every_epoch_on_one_axis(tmp_path):
    tracker = WandbTracker("project", tmp_path / "run", tags=["a"])
    tracker.log_config({"model": {"scale": 2}, "api_key": KEY})
    for epoch in range(3):
        tracker.log_image("panel", np.zeros((4, 4, 3), np.uint8), epoch=epoch)
        tracker.log_metrics({"training": {"loss": 0.5**epoch}}, epoch=epoch)
        tracker.log_metrics({"late": epoch}, epoch=epoch)
    tracker.set_summary({"best": 7.0})
    (tmp_path / "notes.txt").write_text("hello")
    tracker.save_file(tmp_path / "notes.txt")
    tracker.finish()
    (run,) = files.offline_runs(tmp_path / "run")
    assert run.name.endswith(tracker.run_id)
    rows = [plain(row) for row in files.rows(run)]
    assert [(row["epoch"], row["training/loss"]) for row in rows if "training/loss" in row] == [
        (0, 1.0),
        (1, 0.5),
        (2, 0.25),
    ]
    assert [(row["epoch"], row["late"]) for row in rows if "late" in row] == [(0, 0.0), (1, 1.0), (2, 2.0)]
    assert [row["epoch"] for row in rows if any(key.startswith("panel") for key in row)] == [0, 1, 2]
    assert files.config(run)["model"] == {"scale": 2}
    assert {metric.glob_name: metric.step_metric for metric in files.metrics(run) if metric.glob_name} == {"*": "epoch"}
    assert files.exit_codes(run) == [0]
    assert (run / "files" / "notes.txt").read_text() == "hello"


def test_a_resumed_run_has_the_same_identity_and_loses_nothing(tmp_path):
    first = WandbTracker("project", tmp_path)
    for epoch in range(10):
        first.log_metrics({"value": 1.0}, epoch=epoch)
    first.finish(1)
    second = WandbTracker("project", tmp_path)
    second.rewind(6)
    assert second.is_resumed
    assert second.run_id == first.run_id
    for epoch in range(6, 14):
        second.log_metrics({"value": 2.0}, epoch=epoch)
    second.finish()
    parts = files.offline_runs(tmp_path)
    merged = {row["epoch"]: row["value"] for part in parts for row in files.rows(part)}
    assert merged == {epoch: 1.0 if epoch < 6 else 2.0 for epoch in range(14)}
    # W&B's own step is a function of the epoch, so the second part continues the first one's steps.
    assert [row["_step"] for row in files.rows(parts[1])] == [2 * epoch for epoch in range(6, 14)]


def test_a_server_that_is_further_already_gets_every_row_on_a_new_step(tmp_path):
    """Online, W&B drops rows at steps it has passed."""

    class Server:
        step = 20

        def __init__(self):
            self.rows = []

        def log(self, row, *, step, commit):
            assert step >= self.step, "dropped"
            self.rows.append((step, row))
            self.step = step + commit

    tracker = WandbTracker("project", tmp_path)
    tracker._run = server = Server()
    for epoch in (6, 7, 12):
        tracker._log({"image": 0}, epoch, commit=False)
        tracker.log_metrics({"value": 1}, epoch=epoch)
        tracker._log({"late": 1}, epoch, commit=False)
    assert [row["epoch"] for _, row in server.rows] == [6, 6, 6, 7, 7, 7, 12, 12, 12]
    merged = {}
    for step, row in server.rows:
        merged.setdefault(step, []).append(row["epoch"])
    assert all(len(set(epochs)) == 1 for epochs in merged.values())
    assert list(merged) == [20, 21, 22, 23, 24, 25]


def test_other_ranks_have_rank_0s_identity_and_start_nothing(tmp_path):
    class Fleet(FakeStrategy):
        def broadcast_object(self, value, source=0):
            return "from-rank-0"

    set_active_strategy(Fleet(1, 2))
    try:
        tracker = WandbTracker("project", tmp_path / "run")
        tracker.rewind(2)
        tracker.log_metrics({"a": 1}, epoch=2)
        tracker.log_image("panel", "no image at all", epoch=2)
        tracker.save_file("absent")
        tracker.finish()
    finally:
        set_active_strategy(None)
    assert (tracker.run_id, tracker.run_name, tracker.is_resumed) == ("from-rank-0", "run", True)
    assert not (tmp_path / "run").exists()


def test_several_runs_of_one_process_are_several_runs_each_closed(tmp_path):
    for seed in (1, 2, 3):
        tracker = WandbTracker("project", tmp_path / str(seed))
        tracker.log_metrics({"seed": seed}, epoch=0)
        tracker.finish()
    runs = [files.offline_runs(tmp_path / str(seed)) for seed in (1, 2, 3)]
    assert [len(found) for found in runs] == [1, 1, 1]
    assert len({found[0].name[-12:] for found in runs}) == 3
    assert [plain(files.rows(found[0])[0]) for found in runs] == [{"epoch": 0, "seed": float(s)} for s in (1, 2, 3)]
    assert [files.exit_codes(found[0]) for found in runs] == [[0], [0], [0]]


def test_nothing_is_started_before_something_is_logged_nor_after_the_end(tmp_path):
    tracker = WandbTracker("project", tmp_path / "run")
    tracker.rewind(0)
    tracker.finish()
    tracker.log_metrics({"a": 1}, epoch=0)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("run_id", ["a/b", "a b", "x" * 65])
def test_a_bad_id_is_refused(tmp_path, run_id):
    with pytest.raises(ConfigurationError, match="`run_id` must be 1 to 64 characters"):
        WandbTracker("project", tmp_path, run_id=run_id)


def test_a_bad_mode_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="`mode` must be one of auto, online, offline, disabled, but is 'on'"):
        WandbTracker("project", tmp_path, mode="on")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(TrackingError, match=r"`path` must be a file, but .*absent is none"):
        WandbTracker("project", tmp_path).save_file("absent")


def test_it_fulfils_the_protocol(tmp_path):
    assert isinstance(WandbTracker("project", tmp_path), Tracker)


PROGRAM = """
import json, os, signal, sys, time
from pathlib import Path
import wandb
from srforge.tracking import WandbTracker

folder = Path(sys.argv[1])
cases = json.loads(sys.argv[2])
ended = {}
ending = None
for name, case in cases.items():
    child = os.fork()
    if child == 0:
        os.dup2(os.open(folder / f"{name}.txt", os.O_WRONLY | os.O_CREAT), 1)
        os.dup2(1, 2)
        ending = case
        break
    started = time.monotonic()
    status = os.waitpid(child, 0)[1]
    ended[name] = [os.waitstatus_to_exitcode(status), time.monotonic() - started]
if ending is None:
    (folder / "ended.json").write_text(json.dumps(ended))
    os._exit(0)

def service():
    return wandb.setup()._connection._proc._process.pid

tracker = WandbTracker("project", folder / name, finish_timeout_seconds=2.0 if name == "stopped" else 60.0)
tracker.log_config({"optimizer": {"lr": 0.1}, "wandb": {"api_key": os.environ["WANDB_API_KEY"]}})
tracker.log_metrics({"loss": 0.5}, epoch=0)
exec(ending)
"""

ENDINGS = {
    "forgotten": ("", 0),
    "raised": ("raise ValueError('broken')", 1),
    "exited": ("sys.exit(3)", 3),
    "aborted": ("tracker.finish(1); os._exit(1)", 1),
    "stopped": ("os.kill(service(), signal.SIGSTOP); raise ValueError('broken')", 1),
    "killed": ("print(service(), flush=True); time.sleep(3); os.kill(os.getpid(), signal.SIGKILL)", -9),
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Every way out of a process, each in a child of one program that has imported everything once."""
    folder = tmp_path_factory.mktemp("ended")
    environment = os.environ | {"WANDB_API_KEY": KEY, "WANDB_MODE": "offline", "WANDB_SILENT": "false"}
    environment.pop("WANDB_SERVICE", None)  # else the children share the service of this process
    cases = json.dumps({name: ending for name, (ending, _) in ENDINGS.items()})
    subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), cases, f"--note={KEY}"],
        env=environment,
        timeout=200,
        check=True,
        cwd=folder,
    )
    return folder, json.loads((folder / "ended.json").read_text())


@needs_fork
@pytest.mark.parametrize("name", ["forgotten", "raised", "exited", "aborted"])
def test_every_way_out_ends_the_process_and_marks_the_run(ended, name):
    folder, codes = ended
    expected = ENDINGS[name][1]
    (run,) = files.offline_runs(folder / name)
    assert codes[name][0] == expected, (folder / f"{name}.txt").read_text()
    assert files.exit_codes(run) == [expected]
    assert [plain(row) for row in files.rows(run)] == [{"epoch": 0, "loss": 0.5}]


@needs_fork
def test_no_key_is_in_anything_that_was_written(ended):
    folder, _ = ended
    written = [path for path in folder.rglob("*") if path.is_file()]
    assert len(written) > 20
    assert [path for path in written if KEY.encode() in path.read_bytes()] == []
    (run,) = files.offline_runs(folder / "forgotten")
    assert files.config(run)["wandb"] == {"api_key": "[redacted]"}
    assert files.config(run)["optimizer"] == {"lr": 0.1}


@needs_fork
def test_a_service_that_stands_still_is_let_go_in_time(ended):
    folder, codes = ended
    code, seconds = codes["stopped"]
    said = (folder / "stopped.txt").read_text()
    assert "did not finish within 2 s and was let go" in said
    assert "wandb sync" in said
    assert code == 1
    assert seconds < 20


@needs_fork
def test_a_killed_run_leaves_its_epochs_and_no_process(ended):
    folder, codes = ended
    assert codes["killed"][0] == -signal.SIGKILL
    (run,) = files.offline_runs(folder / "killed")
    assert [plain(row) for row in files.rows(run)] == [{"epoch": 0, "loss": 0.5}]
    service = int((folder / "killed.txt").read_text().split()[-1])
    deadline = time.monotonic() + 10
    while Path(f"/proc/{service}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not Path(f"/proc/{service}").exists()
