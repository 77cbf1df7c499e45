"""Cells of the failure matrix; ``failure_matrix.py --all`` runs every one and writes the table of the documentation."""

import itertools
from pathlib import Path

import pytest

from failure_faults import HOWS, PHASES
from failure_matrix import CI_CELLS, findings
from failure_run import LIMIT_SECONDS, STALLS, run_cell
from test_termination_matrix import the_next_launch_replays_the_epoch

WORLDS = (2, 4)


def test_the_cells_pair_deaths_and_silences_with_every_phase_and_both_sizes_with_every_fault_and_phase():
    assert {(how in STALLS, phase) for how, phase, _ in CI_CELLS} == set(itertools.product((False, True), PHASES))
    assert {(how, world_size) for how, _, world_size in CI_CELLS} == set(itertools.product(HOWS, WORLDS))
    assert {(phase, world_size) for _, phase, world_size in CI_CELLS} == set(itertools.product(PHASES, WORLDS))


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_SECONDS + 30)
@pytest.mark.parametrize(("how", "phase", "world_size"), CI_CELLS)
def test_everyone_ends_in_time_and_the_cause_comes_last(tmp_path, how, phase, world_size):
    outcome = run_cell(how, phase, world_size, tmp_path)
    assert findings(outcome) == [], outcome.output[-3000:]
    if (how, phase) == ("SIGKILL", "saving"):
        (run,) = Path(tmp_path, "runs").glob("[!.]*")
        assert list((run / "checkpoints").glob(".*")), "the save must have been killed half-way"
        the_next_launch_replays_the_epoch(tmp_path)
