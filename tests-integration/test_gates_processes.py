"""Gates with real processes: side effects once per fleet, and no hang from a collective inside a gate."""

import pytest

import gate_cases


@pytest.mark.parametrize("world_size", [1, 2])
def test_side_effects_counted_over_the_fleet_are_one(fleet, tmp_path, world_size):
    assert fleet(gate_cases.rank_has_side_effects, world_size, str(tmp_path)) == [
        rank == 0 for rank in range(world_size)
    ]
    once = {f"{what}-0" for what in ("method", "static", "of_class", "inherited", "upload", "function")}
    assert {path.name for path in tmp_path.iterdir()} == once | {f"ungated-{rank}" for rank in range(world_size)}


def test_collective_inside_a_gate_is_refused_instead_of_hanging(fleet):
    (refused, after), (of_other_rank, _) = fleet(gate_cases.rank_calls_a_collective_inside_a_gate, 2, timeout=40)
    assert refused.keys() == {
        "reduce_metrics",
        "check_replicas",
        "sync_buffers",
        "barrier",
        "all_gather_object",
        "broadcast_object",
    }
    for message in refused.values():
        assert "save_preview`, which main_process_only runs on rank 0 alone" in message
    assert of_other_rank == {}
    assert after == [0, 1]  # still in step
