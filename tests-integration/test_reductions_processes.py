"""Laws 1 and 9 and the cases of metric reduction, with real processes under gloo."""

import math

import pytest

import reduction_cases
from harness import RankError


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_law_1_and_9_fleet_value_is_the_single_process_value_in_two_collectives(fleet, world_size):
    ranks = fleet(reduction_cases.rank_reduces_every_size, world_size, timeout=100)
    assert len(ranks) == world_size
    for results, evaluated in ranks:
        for num_samples, (predictions, mean) in zip(reduction_cases.EVALUATED, evaluated, strict=True):
            assert predictions == list(range(num_samples))  # once each, in dataset order
            assert mean == (num_samples - 1) / 2
        for num_samples, (reduced, collectives) in zip(reduction_cases.SAMPLE_COUNTS, results, strict=True):
            assert collectives == (2 if world_size > 1 else 0)
            if num_samples == 0:
                assert reduced == {"training": {}, "validation": {"psnr": {}}}
                continue
            samples = reduction_cases.samples_of(num_samples)
            assert reduced["training"] == {"low": min(samples["B03"]), "high": max(samples["B03"])}
            assert reduced["validation"]["count"] == num_samples
            assert reduced["validation"]["psnr"].keys() == set(reduction_cases.BANDS)
            for band in reduction_cases.BANDS:
                expected = math.fsum(samples[band]) / num_samples
                assert reduced["validation"]["psnr"][band] == pytest.approx(expected, rel=1e-12)
        assert [reduced for reduced, _ in results] == [
            reduced for reduced, _ in ranks[0][0]
        ]  # the same bits everywhere


def test_ranks_that_differ_neither_hang_nor_mix_keys(fleet):
    first, second = fleet(reduction_cases.rank_meets_every_difference, 2)
    for seen in (first, second):
        assert seen["unequal"] == 13 / 7
        assert seen["one_rank_only"] == {"a": 2.0}
        assert seen["missing"] == {"a": (0,)}
        assert seen["order"] == {"loss": 1.5, "own": {"fid": 2.5}}
        assert seen["integers"] == 2**53 - 1
        assert seen["non_finite"] == {"m": (1,)}
        assert seen["empty"] == {}
        assert "metric `m` must be the same kind of value" in seen["conflict"]
        assert "mean on rank 0, sum on rank 1" in seen["conflict"]
        assert "`m` must be a MetricSum, but is str" in seen["malformed"]
        assert seen["gathered"] == [index / 2 for index in range(101)]
        assert seen["after"] == {"m": 0.5}
    assert "rank 1" in first["malformed"]


def test_best_is_one_decision_and_the_scheduler_counts_steps_once(fleet):
    assert fleet(reduction_cases.rank_decides, 2) == [([0, 2], 1.75, 6)] * 2


def test_reduction_does_not_outlive_a_dead_rank(fleet):
    with pytest.raises(RankError, match="rank 1 has had enough"):
        fleet(reduction_cases.rank_dies_before_reducing, 2, timeout=40)
