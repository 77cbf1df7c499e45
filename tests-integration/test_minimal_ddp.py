"""The hand-written loop of ``apps/minimal_ddp.py``, alone and under torchrun."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness import launch

SCRIPT = Path(__file__).resolve().parents[1] / "apps" / "minimal_ddp.py"


def parsed(output):
    """Per epoch: the losses and the replicas' fingerprints."""
    lines = re.findall(r"epoch \d+: training (\S+) validation (\S+) replicas \[(.*)\]", output)
    return [(float(training), float(validation), replicas.split(", ")) for training, validation, replicas in lines]


def test_script_is_short_and_needs_this_package_only():
    text = SCRIPT.read_text()
    assert len(text.splitlines()) < 100
    imported = {line.split()[1].split(".")[0] for line in text.splitlines() if re.match(r"(import|from) \w", line)}
    assert imported == {"time", "torch", "srforge"}
    assert set(re.findall(r"from srforge\.(\w+)", text)) == {"distributed"}


def test_two_ranks_train_as_one_process_does():
    alone = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    fleet = launch(SCRIPT, nproc=2, timeout=100)
    assert fleet.returncode == 0, fleet.stderr
    one, two = parsed(alone.stdout), parsed(fleet.stdout)
    assert len(one) == len(two) == 5  # printed once per fleet
    assert two[-1][0] < two[0][0] / 2
    for (training, validation, _), (fleet_training, fleet_validation, replicas) in zip(one, two, strict=True):
        assert len(replicas) == 2
        assert len(set(replicas)) == 1
        assert fleet_training == pytest.approx(training, abs=2e-4)
        assert fleet_validation == pytest.approx(validation, abs=2e-4)
