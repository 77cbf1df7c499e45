import copy
import itertools
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from srforge.distributed.batch_sharding import ShardedBatchSampler
from srforge.distributed.errors import ConfigurationError, LaunchEnvironmentError
from srforge.distributed.shard_plan import ShardPlan
from srforge.distributed.sharding import SampleKey, ShardedSampler, plan_of

law = settings(database=None, deadline=None, max_examples=80)
worlds = st.integers(1, 9)


def fleet(world_size, dataset, *, epoch=0, **options):
    """The samplers of all ranks."""
    options = {"batch_size": 2, "shuffle": True, "training": True, "seed": 1} | options
    samplers = [ShardedSampler(dataset, rank=rank, world_size=world_size, **options) for rank in range(world_size)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return samplers


def steps_of(samplers):
    """Real samples of each step over the fleet, in order of ranks, as a plain DataLoader's batches hold them."""
    steps = {}
    for sampler in samplers:
        plan = sampler.plan
        batches = list(DataLoader(range(10**9), plan.batch_size, sampler=sampler, collate_fn=list))
        assert len(batches) == plan.num_micro_batches
        for number, batch in enumerate(batches):
            real = batch[: plan.local_count(number, sampler.rank)]
            steps.setdefault(plan.step_of(number), []).append((sampler.rank, number, real))
    return [list(itertools.chain.from_iterable(part[2] for part in sorted(steps[step]))) for step in sorted(steps)]


@law
@given(st.integers(1, 60), worlds, st.integers(1, 3), st.integers(1, 3), st.booleans(), st.integers(1, 3))
def test_each_sample_comes_once_over_the_fleet(num_samples, world_size, batch_size, accumulate, shuffle, filler):
    samplers = fleet(
        world_size, num_samples, batch_size=batch_size, accumulate=accumulate, shuffle=shuffle, filler=filler
    )
    seen = list(itertools.chain.from_iterable(steps_of(samplers)))
    assert sorted(seen) == list(range(num_samples))
    if not shuffle:
        assert seen == sorted(seen)


@law
@given(st.integers(1, 60), worlds, st.integers(1, 4))
def test_evaluation_sees_each_sample_once_in_the_order_of_the_data_set(num_samples, world_size, batch_size):
    samplers = fleet(world_size, num_samples, batch_size=batch_size, shuffle=False, training=False)
    shards = [list(sampler) for sampler in samplers]
    assert [len(sampler) for sampler in samplers] == [len(shard) for shard in shards]
    assert list(itertools.chain.from_iterable(shards)) == list(range(num_samples))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
    assert all(sampler.plan is None for sampler in samplers)


@pytest.mark.parametrize("num_samples", [0, 1, 5, 7, 97, 99, 100, 101])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_a_mean_over_evaluation_shards_counts_nothing_twice(num_samples, world_size):
    shards = fleet(world_size, num_samples, batch_size=8, shuffle=False, training=False)
    values = [float(key) for sampler in shards for key in sampler]
    assert len(values) == num_samples
    assert sum(values) == num_samples * (num_samples - 1) / 2


@settings(database=None, deadline=None, max_examples=20)
@given(st.integers(1, 80), st.integers(0, 5), st.sampled_from(["exact", "pad"]), st.integers(1, 3))
def test_the_samples_of_a_step_do_not_depend_on_the_number_of_ranks(num_samples, epoch, tail, repeat):
    options = {"epoch": epoch, "tail": tail, "repeat": repeat}
    alone = steps_of(fleet(1, num_samples, batch_size=12, **options))
    for world_size, batch_size, accumulate in ((2, 6, 1), (3, 2, 2), (4, 3, 1), (6, 1, 2), (12, 1, 1), (1, 3, 4)):
        shared = fleet(world_size, num_samples, batch_size=batch_size, accumulate=accumulate, **options)
        assert steps_of(shared) == alone


@pytest.mark.filterwarnings("ignore:`steps_per_epoch` without `shuffle`")
@law
@given(st.integers(1, 40), st.integers(1, 5), worlds, st.integers(1, 3), st.booleans())
def test_steps_per_epoch_takes_whole_passes_one_after_the_other(num_samples, steps, world_size, batch_size, shuffle):
    samplers = fleet(world_size, num_samples, batch_size=batch_size, steps_per_epoch=steps, shuffle=shuffle)
    stream = list(itertools.chain.from_iterable(steps_of(samplers)))
    assert len(stream) == steps * world_size * batch_size
    for start in range(0, len(stream), num_samples):
        one_pass = stream[start : start + num_samples]
        assert len(set(one_pass)) == len(one_pass)


def test_repeated_passes_are_shuffled_and_drawn_apart():
    keys = list(ShardedSampler(50, batch_size=5, shuffle=True, training=True, seed=1, repeat=3, rank=0, world_size=1))
    passes = [keys[start : start + 50] for start in (0, 50, 100)]
    assert all(sorted(one_pass) == list(range(50)) for one_pass in passes)
    assert passes[0] != passes[1] != passes[2]
    assert len({(int(key), key.draw) for key in keys}) == 150


def test_drop_leaves_out_less_than_a_global_batch_and_pad_adds_less():
    dropped = list(itertools.chain.from_iterable(steps_of(fleet(3, 20, tail="drop"))))
    assert len(dropped) == 18
    assert len(set(dropped)) == 18
    padded = list(itertools.chain.from_iterable(steps_of(fleet(3, 20, tail="pad"))))
    assert len(padded) == 24
    assert set(padded) == set(range(20))


@pytest.mark.parametrize("filler", [1, 2, 5])
def test_a_rank_without_a_real_sample_repeats_one_of_the_same_step(filler):
    samplers = fleet(4, 13, batch_size=3, filler=filler)  # 12 samples in step 0, 1 in step 1
    last = steps_of(samplers)[1]
    for sampler in samplers[1:]:
        row = list(sampler)[3:]
        assert row == last * min(filler, 3)
        assert sampler.plan.local_count(1, sampler.rank) == 0


def test_each_epoch_has_an_order_of_its_own_and_each_rank_other_samples():
    orders = [[list(sampler) for sampler in fleet(2, 12, epoch=epoch)] for epoch in range(3)]
    assert all(sorted(first + second) == list(range(12)) for first, second in orders)
    assert orders[0] != orders[1] != orders[2] != orders[0]


def test_a_new_sampler_continues_the_order_of_an_old_one():
    old = fleet(2, 20)[1]
    epochs = []
    for epoch in range(3):
        old.set_epoch(epoch)
        epochs.append(list(old))
    resumed = fleet(2, 20)[1]
    for epoch in (1, 2):
        resumed.set_epoch(epoch)
        next(iter(resumed))  # a first pass that is left early, as a skipped or killed epoch is
        assert list(resumed) == epochs[epoch]


def test_the_order_depends_on_the_seed_and_on_no_global_generator():
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = list(fleet(1, 5000)[0])
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1)
    assert list(fleet(1, 5000)[0]) == first
    assert list(fleet(1, 5000, seed=2)[0]) != first


def test_keys_are_indices_that_know_their_epoch():
    keys = list(fleet(2, 40_000, epoch=7)[1])
    assert {key.epoch for key in keys} == {7}
    assert {key.draw for key in keys} == {0}
    key = SampleKey(3, 2, 1)
    assert (key, hash(key), f"{key:03d}", str(key), [0, 1, 2, "x"][key]) == (3, hash(3), "003", "3", "x")
    assert np.arange(5)[key] == torch.arange(5)[key] == 3
    for twin in (copy.copy(key), copy.deepcopy(key), pickle.loads(pickle.dumps(key))):
        assert (type(twin), twin, twin.epoch, twin.draw) == (SampleKey, 3, 2, 1)


class Echo(torch.utils.data.Dataset):
    """Says what it was asked for, as a worker sees it."""

    def __getitem__(self, key):
        return int(key), key.epoch, key.draw


def test_living_workers_are_asked_for_the_epoch_at_hand_also_after_a_resume():
    def loader(num_workers):
        return DataLoader(
            Echo(),
            2,
            sampler=fleet(2, 6, repeat=2)[1],
            collate_fn=list,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            multiprocessing_context="fork" if num_workers else None,
        )

    def epochs(loader, numbers):
        for number in numbers:
            loader.sampler.set_epoch(number)
            yield list(itertools.chain.from_iterable(loader))

    expected = list(epochs(loader(0), range(3)))
    assert [{epoch for _, epoch, _ in asked} for asked in expected] == [{0}, {1}, {2}]
    assert list(epochs(loader(2), range(3))) == expected
    assert list(epochs(loader(2), (1, 2))) == expected[1:]


def test_set_epoch_during_an_iteration_counts_from_the_next_one():
    sampler = fleet(1, 5000)[0]
    iterator = iter(sampler)
    keys = [next(iterator)]
    sampler.set_epoch(1)
    keys += iterator
    assert {key.epoch for key in keys} == {0}
    assert sorted(keys) == list(range(5000))


@pytest.mark.parametrize("rank", [0, 511, 1023])
def test_one_of_a_thousand_ranks_starts_at_once_whatever_the_size(rank):
    for num_samples in (2**30, 2**62):
        sampler = ShardedSampler(
            num_samples, batch_size=16, shuffle=True, training=True, seed=3, rank=rank, world_size=1024
        )
        keys = list(itertools.islice(sampler, 64))
        assert len(set(keys)) == 64
        assert max(keys) > num_samples // 2
        assert sampler.plan.loss_scale(0, rank) == 1
        validation = ShardedSampler(
            num_samples, batch_size=16, shuffle=False, training=False, seed=3, rank=rank, world_size=1024
        )
        assert next(iter(validation)) == num_samples * rank // 1024


def test_a_sampler_is_a_distributed_sampler_whose_attributes_are_true():
    sampler = fleet(4, 13, batch_size=3)[2]
    assert isinstance(sampler, DistributedSampler)
    assert (sampler.num_replicas, sampler.rank, sampler.seed, sampler.epoch) == (4, 2, 1, 0)
    assert sampler.num_samples == len(sampler) == len(list(sampler))
    assert sampler.total_size == 13


def test_rank_and_world_size_come_from_the_launcher_when_they_are_left_out(monkeypatch):
    options = {"batch_size": 1, "shuffle": False, "training": False, "seed": 0}
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert list(ShardedSampler("abcd", **options)) == [0, 1, 2, 3]
    for name, value in {
        "WORLD_SIZE": "2",
        "RANK": "1",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "x",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    assert list(ShardedSampler("abcd", **options)) == [2, 3]
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(LaunchEnvironmentError, match="RANK"):
        ShardedSampler("abcd", **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"world_size": None}, "`rank` and `world_size` must be given together, but are 0 and None"),
        ({"rank": 2}, r"`rank` must be in \[0, world_size=2\), but is 2"),
        ({"rank": -1}, r"`rank` must be in \[0, world_size=2\), but is -1"),
        ({"world_size": 0}, "`world_size` must be an integer >= 1, but is 0"),
        ({"dataset": -1}, "`dataset` must hold >= 0 samples, but holds -1"),
        ({"dataset": 0}, "`num_samples` must be an integer >= 1, but is 0"),
        ({"batch_size": 0}, "`batch_size` must be an integer >= 1, but is 0"),
        ({"training": False, "batch_size": 0}, "`batch_size` must be an integer >= 1, but is 0"),
        ({"acumulate": 2}, r"`acumulate` is no option of a ShardedSampler\. Did you mean `accumulate`\?"),
        ({"training": False, "repeats": 1}, r"`repeats` is no option of a ShardedSampler\. Did you mean `repeat`\?"),
        ({"training": False, "repeat": 2}, "`repeat` must be left out in evaluation"),
        ({"training": False, "tail": "drop"}, "`tail` must be left out in evaluation"),
        ({"order": [0, 1], "weights": [1, 1]}, "`order` and `weights` must not both be given"),
        ({"weights": [1] * 6, "shuffle": False}, "`weights` must come with shuffle=True and training=True"),
        (
            {"weights": [1] * 6, "training": False},
            "`weights` must come with shuffle=True and training=True, but they are True and False",
        ),
    ],
)
def test_arguments_that_cannot_work_are_refused(change, message):
    arguments = {
        "dataset": 6,
        "batch_size": 2,
        "shuffle": True,
        "training": True,
        "seed": 0,
        "rank": 0,
        "world_size": 2,
    }
    with pytest.raises(ConfigurationError, match=message):
        ShardedSampler(**arguments | change)


def test_an_unshuffled_epoch_that_never_reaches_the_rest_of_the_data_is_told():
    with pytest.warns(UserWarning, match="on the first 4 of 10 samples only"):
        fleet(1, 10, steps_per_epoch=2, shuffle=False)


def test_plan_of_finds_the_plan_behind_any_loader():
    training, evaluation = fleet(2, 10)[0], fleet(2, 10, training=False, shuffle=False)[0]
    assert plan_of(DataLoader(range(10), 2, sampler=training)) is training.plan
    assert plan_of(DataLoader(range(10), batch_sampler=BatchSampler(training, 2, drop_last=False))) is training.plan
    assert plan_of(DataLoader(range(10), 2, sampler=evaluation)) is None
    assert plan_of(DataLoader(range(10), 2)) is None
    one_by_one = fleet(2, 10, batch_size=1)[0]
    assert plan_of(DataLoader(range(10), None, sampler=one_by_one)) is one_by_one.plan
    assert plan_of(None) is None
    assert plan_of([1, 2]) is None
    assert isinstance(training.plan, ShardPlan)


def test_plan_of_refuses_batches_out_of_order():
    plan = fleet(2, 10)[0]
    own = ShardedBatchSampler([[0], [1, 2]], training=True, seed=3, rank=0, world_size=1)
    for order in ({"sampler": plan, "batch_size": 2}, {"batch_sampler": own}):
        assert plan_of(DataLoader(range(10), num_workers=1, in_order=False, **order)) is not None  # has one order
        with pytest.raises(ConfigurationError, match="`in_order` must be True in training, but is False"):
            plan_of(DataLoader(range(10), num_workers=2, in_order=False, **order))


def test_plan_of_refuses_a_loader_that_cuts_otherwise():
    sampler = fleet(2, 10)[0]
    with pytest.raises(ConfigurationError, match=r"`batch_size` must be 2, .* but is 3 in the loader"):
        plan_of(DataLoader(range(10), 3, sampler=sampler))
    with pytest.raises(ConfigurationError, match="`drop_last` must be False beside a ShardedSampler"):
        plan_of(DataLoader(range(10), 2, sampler=sampler, drop_last=True))
    with pytest.raises(ConfigurationError, match=r"`batch_size` must be 2, .* but is 1"):
        plan_of(DataLoader(range(10), batch_sampler=BatchSampler(sampler, 1, drop_last=False)))
