"""Law 2, the data side of law 1, and the arithmetic of tails, with real processes."""

import itertools

import pytest

import sharding_cases
from srforge.distributed import ShardedSampler


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_tail_trains_as_one_process_does_at_the_global_batch(fleet, world_size):
    for errors in fleet(sharding_cases.rank_trains, world_size, timeout=100):
        assert len(errors) == len(sharding_cases.TRAININGS)
        for training, error in zip(sharding_cases.TRAININGS, errors, strict=True):
            assert error < 1e-12, training


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_own_batches_train_as_one_process_does_on_all_of_a_step(fleet, world_size):
    for errors in fleet(sharding_cases.rank_trains_on_own_batches, world_size, timeout=100):
        assert len(errors) == 4
        assert max(errors) < 1e-12


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_evaluation_counts_every_sample_once_and_gathers_it_in_order(fleet, world_size):
    for results in fleet(sharding_cases.rank_evaluates, world_size, timeout=100):
        for length, (reduced, gathered) in zip(sharding_cases.EVALUATED, results, strict=True):
            assert gathered == list(map(float, range(length)))
            assert reduced == ({"mean": (length - 1) / 2} if length else {})


@pytest.mark.parametrize("lengths", [[5, 2], [2, 5], [0, 3], [4, 4], [7, 3, 5]])
def test_uneven_data_sets_end_together(fleet, lengths):
    results = fleet(sharding_cases.rank_ends_uneven, len(lengths), lengths)
    for rank, result in enumerate(results):
        assert result["trained"] == 2 * list(range(min(lengths)))
        assert result["shared"] == [len(lengths) * number + rank for number in range(10)]
        assert result["after"] == list(range(len(lengths)))


def test_a_rank_that_cannot_read_ends_the_others_with_its_name(fleet):
    first, second = fleet(sharding_cases.rank_fails_to_read, 2, 1)
    assert second == "OSError: disk gone"
    assert first.startswith("CollectiveError: Making batch 1 must work on every rank, but failed on [1]")


def test_a_seed_is_drawn_once_for_all_ranks(fleet):
    drawn = fleet(sharding_cases.rank_draws_a_seed, 3)
    assert len(set(drawn)) == 1
    assert drawn[0][1] == 5


def test_one_of_a_thousand_ranks_takes_its_slice_of_each_step(fleet):
    alone = ShardedSampler(
        10**9,
        rank=0,
        world_size=1,
        batch_size=16 * 1024,
        shuffle=True,
        training=True,
        seed=sharding_cases.SEED,
    )
    steps = list(itertools.islice(alone, 2 * 16 * 1024))
    share, rest = divmod(10**9, 1024)
    for rank in (0, 511, 1023):
        (result,) = fleet(sharding_cases.rank_of_a_thousand, 1, rank)
        assert result["rank"] == (rank, 1024)
        assert result["first"] == steps[16 * rank :][:16] + steps[16 * (1024 + rank) :][:16]
        assert result["lengths"] == (share + (rank < rest), share + (rank < rest))
        assert result["start"] == share * rank + min(rank, rest)
