"""Cells of the failure matrix; ``failure_matrix.py --all`` runs every one and writes the table of the documentation."""

import json
from pathlib import Path

import pytest

from failure_matrix import CI_CELLS, HOWS, LIMIT_SECONDS, PHASES, findings, kill_session, run_cell, start


def test_the_cells_cover_every_way_to_fail_every_phase_and_both_sizes():
    hows, phases, worlds = (set(values) for values in zip(*CI_CELLS, strict=True))
    assert hows == set(HOWS)
    assert phases == set(PHASES)
    assert worlds == {2, 4}


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_SECONDS + 30)
@pytest.mark.parametrize(("how", "phase", "world_size"), CI_CELLS)
def test_everyone_ends_in_time_and_the_cause_comes_last(tmp_path, how, phase, world_size):
    outcome = run_cell(how, phase, world_size, tmp_path)
    assert findings(outcome) == [], outcome.output[-3000:]
    if phase == "saving":
        the_next_launch_clears_what_a_killed_save_left(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_SECONDS + 30)
@pytest.mark.parametrize("phase", ["rehearsal", "between steps", "validation"])
def test_preemption_of_one_rank_ends_all_and_the_next_launch_replays_the_epoch(tmp_path, phase):
    outcome = run_cell("SIGTERM", phase, 2, tmp_path)
    assert findings(outcome) == [], outcome.output[-3000:]
    assert f"[rank {outcome.rank}] received SIGTERM: leaving with 143" in outcome.output
    if phase == "validation":
        the_next_launch_finishes(tmp_path)


def the_next_launch_clears_what_a_killed_save_left(folder):
    (run,) = Path(folder, "runs").glob("[!.]*")
    assert list((run / "checkpoints").glob(".*")), "the save must have been killed half-way"
    the_next_launch_finishes(folder)


def the_next_launch_finishes(folder):
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
