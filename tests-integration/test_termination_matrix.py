"""SIGTERM in every phase; ``termination_matrix.py --all`` sends it to every process of each."""

import json
from pathlib import Path

import pytest

from failure_faults import PHASES
from failure_run import LIMIT_SECONDS, kill_session, start
from termination_matrix import CI_CELLS, SECONDS_ALLOWED, TARGETS, findings, run_cell


def test_the_cells_cover_every_phase_and_everyone_who_can_get_the_signal():
    targets, phases = (set(values) for values in zip(*CI_CELLS, strict=True))
    assert targets == set(TARGETS)
    assert phases == set(PHASES)


#: Five seconds are what a machine without other work is held to, when the table is written.
BESIDE_OTHER_TESTS = 2 * SECONDS_ALLOWED


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_SECONDS + 30)
@pytest.mark.parametrize(("target", "phase"), CI_CELLS)
def test_ranks_leave_with_143_and_the_launcher_with_a_failure_soon(tmp_path, target, phase):
    ending = run_cell(target, phase, tmp_path)
    assert findings(ending, BESIDE_OTHER_TESTS) == [], ending.output[-3000:]
    if (target, phase) == ("waiting rank", "validation"):
        the_next_launch_replays_the_epoch(tmp_path)


def the_next_launch_replays_the_epoch(folder):
    process = start("", 2, folder)
    try:
        assert process.wait(LIMIT_SECONDS) == 0, Path(folder, "log").read_text()[-3000:]
    finally:
        kill_session(process)
    (run,) = Path(folder, "runs").glob("[!.]*")
    files = {path.name for path in (run / "checkpoints").iterdir()}
    assert not any(name.startswith(".") for name in files)
    facts = [json.loads((run / "checkpoints" / name).read_text()) for name in files if name.endswith(".json")]
    assert sorted(fact["epoch"] for fact in facts) == [0, 1]  # the epoch that was cut short is whole
