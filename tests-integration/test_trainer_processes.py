"""Laws of the trainer over real processes: the number of ranks changes nothing, and every decision is the fleet's."""

import itertools

import pytest
import torch

from harness import RankError
from trainer_cases import channels_last, decisions, parity, slow_main_work, uneven_stream

CASES = [
    {"num_samples": n, "accumulate": a, "optimizer": optimizer, "max_norm": max_norm, "dtype": "float64"}
    for (n, a), (optimizer, max_norm) in itertools.product(
        [(48, 1), (49, 1), (71, 2), (53, 1), (26, 2), (7, 1)], [("SGD", None), ("AdamW", 0.5)]
    )
] + [
    {"num_samples": 53, "accumulate": 1, "optimizer": optimizer, "max_norm": None, "dtype": "float32"}
    for optimizer in ("SGD", "AdamW")
]
TOLERANCES = {
    ("float64", "SGD"): 1e-12,
    ("float64", "AdamW"): 1e-12,
    ("float32", "SGD"): 1e-6,
    ("float32", "AdamW"): 1e-5,
}


@pytest.fixture(scope="module")
def alone(fleet):
    """The same cases by one process at the global batch, without accumulation."""
    return fleet(parity, 1, [{**case, "accumulate": 1} for case in CASES])[0]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_number_of_ranks_does_not_change_what_is_learned(fleet, alone, world_size):
    ranks = fleet(parity, world_size, CASES, timeout=110)
    for index, (case, expected) in enumerate(zip(CASES, alone, strict=True)):
        tolerance = TOLERANCES[case["dtype"], case["optimizer"]]
        for rank in range(world_size):
            found = ranks[rank][index]
            assert found["steps"] == expected["steps"], case
            for kind in ("weights", "averages"):
                for name, value in found[kind].items():
                    torch.testing.assert_close(
                        value, expected[kind][name], rtol=tolerance, atol=tolerance, msg=str(case)
                    )
                    assert torch.equal(value, ranks[0][index][kind][name]), (case, name)
            for section, metrics in expected["metrics"].items():
                for name, value in metrics.items():
                    assert found["metrics"][section][name] == pytest.approx(value, rel=tolerance), (case, name)


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_decision_is_taken_from_reduced_values(fleet, world_size):
    ranks = fleet(decisions, world_size)
    for rank in ranks:
        for name in ("best", "metrics", "norms"):
            assert rank[name] == ranks[0][name], name
    sizes = {2: (8, 8), 3: (6, 5, 5)}[world_size]  # samples of each validation shard
    signed = [
        sum(n * (1 if (epoch + r) % 2 else -1) * (r + 1) * (epoch + 1) for r, n in enumerate(sizes)) / 16
        for epoch in range(4)
    ]
    assert ranks[0]["best"] == (signed.index(max(signed)), pytest.approx(max(signed)))
    assert [bool(rank["saved"]) for rank in ranks] == [True] + [False] * (world_size - 1)
    assert [rank["once"] for rank in ranks] == [4] + [0] * (world_size - 1)
    assert [rank["everywhere"] for rank in ranks] == [4] * world_size


def test_a_stream_ends_for_all_when_it_ends_for_one(fleet):
    results = fleet(uneven_stream, 2)
    assert results[0] == results[1]
    assert results[0] == (4, 0.0), "two batches an epoch: the shorter stream decides"


def test_rank_0_may_work_longer_than_the_groups_timeout(fleet):
    assert fleet(slow_main_work, 2, 4.0, 8.0, 60.0) == [2, 2]


def test_rank_0_may_not_work_longer_than_its_own_limit(fleet):
    with pytest.raises(RankError, match=r"\[r1\] hooks after epoch 0: rank 0 must be done within 3 s"):
        fleet(slow_main_work, 2, 30.0, 15.0, 3.0)


def test_channels_last_before_wrapping_brings_no_warning_about_the_buckets(fleet):
    assert fleet(channels_last, 2, True) == [([], True)] * 2
    late = fleet(channels_last, 2, False)
    assert all(strides and is_last for strides, is_last in late), "else this test would prove nothing"
