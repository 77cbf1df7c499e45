"""A W&B server that answers and then refuses: `auto` goes offline and keeps everything, `online` is an error."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from srforge.tracking import TrackingError, WandbTracker

_SPEC = importlib.util.spec_from_file_location("wandb_files", Path(__file__).with_name("wandb_files.py"))
files = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(files)

PROGRAM = """
import http.server, os, sys, threading, warnings

class Refuse(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_error(404)
    do_POST = do_GET
    def log_message(self, *arguments):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refuse)
threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ["WANDB_BASE_URL"] = f"http://127.0.0.1:{server.server_address[1]}"

from srforge.tracking import TrackingError, WandbTracker
import srforge.tracking.wandb_tracker
srforge.tracking.wandb_tracker._INIT_SECONDS = 5.0

tracker = WandbTracker("project", sys.argv[1], mode="auto")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    tracker.log_metrics({"loss": 0.5}, epoch=0)
assert "W&B goes offline, as it could not start online" in str([w.message for w in caught])
tracker.finish()
try:
    WandbTracker("project", sys.argv[1] + "2", mode="online").log_metrics({"loss": 0.5}, epoch=0)
except TrackingError as error:
    assert "`mode` is online, but W&B did not start" in str(error), error
else:
    raise AssertionError("online was silent")
print("done")
"""


def test_a_server_that_refuses_costs_no_data(tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environment |= {"WANDB_API_KEY": "0" * 40, "no_proxy": "127.0.0.1", "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "run")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "done" in done.stdout.split()
    (run,) = files.offline_runs(tmp_path / "run")
    assert [(row["epoch"], row["loss"]) for row in files.rows(run)] == [(0, 0.5)]
    assert files.exit_codes(run) == [0]


def test_a_host_without_wandb_is_told_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(TrackingError, match="must be able to import wandb"):
        WandbTracker("project", tmp_path, mode="offline").log_metrics({"loss": 0.5}, epoch=0)
