"""Trackers with real processes: one run for the fleet, with the same identity on every rank."""

import json

import pytest

import tracking_cases


@pytest.mark.timeout(240)  # four starts of W&B's service
@pytest.mark.parametrize("own_file_system", [False, True])
def test_two_ranks_leave_one_run_and_answer_alike(fleet, tmp_path, own_file_system):
    left, right = fleet(tracking_cases.rank_tracks, 2, str(tmp_path), own_file_system, timeout=200)
    assert left == right
    first, second = left
    assert first[:2] == ("run", False)
    assert second[:2] == ("run", True)
    assert first[2] == second[2]  # the relaunch continues the same W&B run
    assert (first[3], second[3]) == (False, True)
    assert [path.name for path in tmp_path.iterdir()] == ["node-0"]
    run = tmp_path / "node-0" / "run"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"epoch": epoch, "training/loss": 1.0, "validation/psnr": 30.0} for epoch in (0, 1)]
    parts = sorted((run / "wandb").glob("offline-run-*"))
    assert len(parts) == 2  # one for each launch, none for rank 1
    assert {part.name.rpartition("-")[2] for part in parts} == {first[2]}
