"""One process here; fleets are checked in tests-integration."""

import json
import os

import pytest
import torch

from srforge.distributed import SingleDeviceStrategy, Topology, check
from srforge.distributed.__main__ import main


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_one_process_passes_and_is_described(capsys):
    assert main(["check", "--device", "cpu", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    (row,) = report["ranks"]
    assert (row["rank"], row["pid"], row["device"], row["torch"]) == (0, os.getpid(), "cpu", torch.__version__)
    assert report["problems"] == []
    assert report["clock_skew_seconds"] == [0.0]
    assert report["all_reduce"] == []


def test_verdict_is_the_last_line(capsys):
    assert main(["check", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("OK: 1 rank on 1 host")


def test_wrong_collective_fails_the_check(capsys, monkeypatch):
    monkeypatch.setattr(SingleDeviceStrategy, "broadcast_object", lambda self, value, source=0: {"rank": 7})
    assert main(["check", "--device", "cpu"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "FAILED: broadcast_object gave a wrong result on rank 0."


def test_report_is_of_the_strategy_that_is_given():
    report = check.examine(SingleDeviceStrategy(Topology.single(), torch.device("cpu")), 4096)
    assert report["collectives"].keys() == {
        "barrier",
        "all_gather",
        "broadcast",
        "all_gather_object",
        "broadcast_object",
    }


def test_shim_s_refusal_is_one_line_and_exit_code_2(capsys, monkeypatch):
    for name in ("OMPI_COMM_WORLD_RANK", "JSM_NAMESPACE_RANK", "MPI_LOCALRANKID", "SLURM_PROCID", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert main(["shim", "--", "true"]) == 2
    assert capsys.readouterr().err.startswith("error: the shim must run in a task of SLURM")
