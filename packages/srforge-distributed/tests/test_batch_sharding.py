"""Own batch samplers: the oracle cuts the list of all batches with slices and `torch.tensor_split`."""

import itertools
import random
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler

from srforge.distributed.batch_sharding import BatchPlan, ShardedBatchSampler
from srforge.distributed.errors import ConfigurationError
from srforge.distributed.sharding import plan_of

law = settings(database=None, deadline=None, max_examples=80)
all_sizes = st.lists(st.integers(1, 5), min_size=1, max_size=30)


class Batches:
    """Batches of given sizes over consecutive indices; as a user would write it, with or without shuffling."""

    def __init__(self, sizes, shuffle=False):
        starts = itertools.accumulate(sizes, initial=0)
        self.batches = [list(range(start, start + size)) for start, size in zip(starts, sizes, strict=False)]
        self.shuffle = shuffle
        self.epochs = []

    def __len__(self):
        return len(self.batches)

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __iter__(self):
        return iter(random.sample(self.batches, len(self.batches)) if self.shuffle else self.batches)


def fleet(world_size, order, *, training=True, epoch=0, **options):
    samplers = [
        ShardedBatchSampler(order, training=training, seed=1, rank=rank, world_size=world_size, **options)
        for rank in range(world_size)
    ]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return samplers


def real(samplers):
    """Real batches over the fleet, step by step, in order of ranks."""
    shards = [list(sampler) for sampler in samplers]
    plan = samplers[0].plan
    found = []
    for step in range(plan.num_steps):
        for rank, shard in enumerate(shards):
            numbers = [number for number in range(len(shard)) if plan.step_of(number) == step]
            found += [shard[number] for number in numbers if plan.local_count(number, rank)]
    return found


@law
@given(all_sizes, st.integers(1, 6), st.integers(1, 3))
def test_each_batch_comes_once_over_the_fleet_and_in_order(sizes, world_size, accumulate):
    order = Batches(sizes)
    samplers = fleet(world_size, order, accumulate=accumulate)
    assert real(samplers) == order.batches
    assert len({len(list(sampler)) for sampler in samplers}) == 1
    assert all(len(sampler) == len(list(sampler)) == sampler.plan.num_micro_batches for sampler in samplers)


@law
@given(all_sizes, st.integers(1, 6), st.integers(1, 3))
def test_counts_and_scales_make_the_mean_over_each_step(sizes, world_size, accumulate):
    plan = BatchPlan(len(sizes), world_size, accumulate)
    plan.start_epoch(sizes)
    micro_batch = 0
    for step, counts in enumerate(torch.tensor(sizes).split(world_size * accumulate)):
        shares = torch.tensor_split(counts, world_size)
        for row in range(len(shares[0])):
            assert plan.step_of(micro_batch) == step
            assert plan.ends_window(micro_batch) == (row == len(shares[0]) - 1)
            assert plan.window_count(micro_batch) == counts.sum()
            for rank, share in enumerate(shares):
                count = int(share[row]) if row < len(share) else 0
                assert plan.local_count(micro_batch, rank) == count
                assert plan.loss_scale(micro_batch, rank) == float(Fraction(count * world_size, int(counts.sum())))
            micro_batch += 1
    assert micro_batch == plan.num_micro_batches
    assert plan.num_steps == step + 1


@law
@given(all_sizes, st.integers(1, 8))
def test_evaluation_sees_each_batch_once_unpadded(sizes, world_size):
    order = Batches(sizes)
    shards = [list(sampler) for sampler in fleet(world_size, order, training=False)]
    assert list(itertools.chain.from_iterable(shards)) == order.batches
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
    assert [len(sampler) for sampler in fleet(world_size, order, training=False)] == [len(shard) for shard in shards]


def test_steps_do_not_depend_on_the_number_of_ranks():
    order = Batches([3, 1, 4, 1, 5, 2, 2], shuffle=True)
    alone = real(fleet(1, order, accumulate=4, epoch=2))
    for world_size, accumulate in ((2, 2), (4, 1)):
        assert real(fleet(world_size, order, accumulate=accumulate, epoch=2)) == alone


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_orders_differ_per_epoch_and_are_disjoint_per_rank(world_size):
    def batch_sampler():
        return BatchSampler(RandomSampler(range(12)), 2, drop_last=False)

    epochs = []
    for epoch in range(3):
        batches = real(fleet(world_size, batch_sampler(), epoch=epoch))
        assert sorted(itertools.chain.from_iterable(batches)) == list(range(12))
        epochs.append(batches)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    resumed = fleet(world_size, batch_sampler(), epoch=2)
    assert real(resumed) == epochs[2]


def test_generators_are_neither_moved_nor_heeded():
    orders = []
    for seed in (0, 1):
        generator = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        states = generator.get_state(), torch.get_rng_state()
        for given_generator in (None, generator):
            inner = RandomSampler(range(12), generator=given_generator)
            orders.append(list(fleet(2, BatchSampler(inner, 2, drop_last=False))[1]))
        assert torch.equal(generator.get_state(), states[0])
        assert torch.equal(torch.get_rng_state(), states[1])
    assert orders[:2] == orders[2:]


@pytest.mark.parametrize("filler", [1, 2])
def test_a_rank_without_a_real_batch_repeats_samples_of_the_same_step(filler):
    samplers = fleet(3, Batches([3, 3, 3, 3]), filler=filler)
    assert [list(sampler)[1] for sampler in samplers] == [[9, 10, 11], [9, 10, 11][:filler], [9, 10, 11][:filler]]
    assert [samplers[0].plan.local_count(1, rank) for rank in range(3)] == [3, 0, 0]


def test_the_plan_knows_an_epoch_as_soon_as_its_loader_begins():
    sampler = fleet(2, Batches([2, 3, 1]))[0]
    loader = DataLoader(range(6), batch_sampler=sampler)
    plan = plan_of(loader)
    assert (plan.num_micro_batches, plan.ends_window(0)) == (2, True)
    with pytest.raises(ConfigurationError, match=r"sizes of an epoch's batches must be read before .* Call iter"):
        plan.loss_scale(0, 0)
    iter(loader)
    assert plan_of(loader) is plan
    assert [plan.window_count(number) for number in range(2)] == [5, 1]


def test_the_number_of_batches_may_differ_by_epoch():
    order = Batches([2, 2, 2])
    sampler = fleet(2, order)[0]
    assert len(sampler) == 2
    order.batches = order.batches[:2]
    assert len(list(sampler)) == len(sampler) == sampler.plan.num_micro_batches == 1


def test_a_batch_sampler_is_told_the_epoch_and_its_keys_know_it():
    order = Batches([2, 1])
    sampler = fleet(1, order, epoch=5)[0]
    assert {key.epoch for batch in sampler for key in batch} == {5}
    assert order.epochs == [5]
    order.batches = [[0, 1], [1, 1]]
    assert [[key.draw for key in batch] for batch in sampler] == [[0, 0], [1, 2]]


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (DistributedSampler(range(6), num_replicas=2, rank=0), "holds a DistributedSampler, which is sharded already"),
        (BatchSampler(DistributedSampler(range(6), 2, 0), 2, drop_last=False), "holds a DistributedSampler"),
        (iter([[0]]), "`order` must have a length, but list_iterator has none"),
        ([0, 1], "must yield batches of at least one index, but yielded 0 in epoch 0"),
        ([[0], []], r"must yield batches of at least one index, but yielded \[\] in epoch 0"),
        ([[0, "a"]], r"must yield integer indices, but yielded 'a' \(str\)"),
    ],
)
def test_orders_that_cannot_be_sharded_are_refused(order, message):
    with pytest.raises(ConfigurationError, match=message):
        list(fleet(2, order)[0])


@pytest.mark.parametrize("name", ["accumulate", "filler"])
def test_numbers_below_one_are_refused(name):
    with pytest.raises(ConfigurationError, match=f"`{name}` must be an integer >= 1, but is 0"):
        fleet(1, [[0]], **{name: 0})


def test_a_micro_batch_outside_the_epoch_is_refused():
    with pytest.raises(ConfigurationError, match=r"`micro_batch` must be in \[0, 2\), .* but is 2"):
        BatchPlan(3, 2, 1).ends_window(2)
