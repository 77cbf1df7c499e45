"""Weighted sampling and own samplers, through the sampler that shards them."""

import itertools
import math
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DistributedSampler, RandomSampler, Sampler, WeightedRandomSampler

from srforge.distributed.errors import ConfigurationError
from srforge.distributed.index_streams import ShuffledStream, WeightedStream
from srforge.distributed.sharding import ShardedSampler


def fleet(world_size, dataset, *, epoch=0, **options):
    options = {"batch_size": 3, "shuffle": True, "training": True, "seed": 1} | options
    samplers = [ShardedSampler(dataset, rank=rank, world_size=world_size, **options) for rank in range(world_size)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return samplers


def real(samplers):
    """Real samples of a fleet without accumulation, in the order of the stream."""
    plan = samplers[0].plan
    shards = [list(sampler) for sampler in samplers]
    stream = []
    for number in range(plan.num_micro_batches):
        for rank, shard in enumerate(shards):
            stream += shard[number * plan.batch_size :][: plan.local_count(number, rank)]
    return stream


class Own(Sampler):
    """Draws its order from whichever generator a user may have chosen, at each step."""

    def __init__(self, length, draw):
        self.length, self.draw, self.epochs = length, draw, []

    def __len__(self):
        return self.length

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __iter__(self):
        left = list(range(self.length))
        while left:
            yield left.pop(int(self.draw() * len(left)))


DRAWS = {
    "python": random.random,
    "numpy": np.random.random,
    "torch": lambda: float(torch.rand(())),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_an_own_sampler_is_sharded_with_an_order_of_its_own_per_epoch(draw, world_size):
    orders = [real(fleet(world_size, 12, order=Own(12, draw), epoch=epoch)) for epoch in range(3)]
    assert all(sorted(order) == list(range(12)) for order in orders)
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert orders == [real(fleet(1, 12, order=Own(12, draw), epoch=epoch)) for epoch in range(3)]


def test_an_own_sampler_moves_no_generator_and_heeds_none():
    orders = []
    for seed in (0, 1):
        random.seed(seed)
        torch.manual_seed(seed)
        expected = random.Random(seed).random()
        state = torch.get_rng_state()
        orders += [list(fleet(2, 12, order=Own(12, draw))[0]) for draw in DRAWS.values()]
        assert torch.equal(torch.get_rng_state(), state)
        assert random.random() == expected
    assert orders[:3] == orders[3:]


def test_a_generator_that_a_sampler_was_given_is_scoped_too():
    generators = [torch.Generator().manual_seed(rank) for rank in range(2)]
    states = [generator.get_state() for generator in generators]
    samplers = [
        ShardedSampler(
            12,
            order=RandomSampler(range(12), generator=generator),
            rank=rank,
            world_size=2,
            batch_size=3,
            shuffle=True,
            training=True,
            seed=1,
        )
        for rank, generator in enumerate(generators)
    ]
    first = real(samplers)
    assert sorted(first) == list(range(12))
    assert real(samplers) == first
    assert all(torch.equal(generator.get_state(), state) for generator, state in zip(generators, states, strict=True))
    for sampler in samplers:
        sampler.set_epoch(1)
    assert real(samplers) != first


def test_an_own_sampler_is_told_the_epoch():
    order = Own(6, random.random)
    sampler = fleet(1, 6, order=order)[0]
    for epoch in (0, 4):
        sampler.set_epoch(epoch)
        list(sampler)
    assert order.epochs == [0, 4]


def test_each_pass_iterates_an_own_sampler_anew():
    keys = list(fleet(1, 12, order=Own(12, random.random), repeat=2)[0])
    assert sorted(keys[:12]) == sorted(keys[12:]) == list(range(12))
    assert keys[:12] != keys[12:]
    assert len({(int(key), key.draw) for key in keys}) == 24


def test_an_own_sampler_in_evaluation_gives_unpadded_shards_of_its_order():
    samplers = fleet(3, 10, order=[9, 7, 5, 3, 1], shuffle=False, training=False)
    assert [list(sampler) for sampler in samplers] == [[9, 7], [5, 3], [1]]


def test_what_an_own_sampler_repeats_is_told_apart_by_its_draw():
    order = WeightedRandomSampler([0.0, 1.0, 1.0], 40)
    keys = real(fleet(2, 3, order=order))
    assert set(keys) == {1, 2}
    for index in (1, 2):
        draws = [key.draw for key in keys if key == index]
        assert draws == list(range(len(draws)))


def test_own_samplers_may_yield_integers_of_numpy_and_torch():
    assert list(fleet(1, 9, order=np.arange(4))[0]) == [0, 1, 2, 3]
    assert list(fleet(1, 9, order=torch.arange(4))[0]) == [0, 1, 2, 3]


class Sized(Sampler):
    def __init__(self, length, indices):
        self.length, self.indices = length, indices

    def __len__(self):
        return self.length

    def __iter__(self):
        return iter(self.indices)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (DistributedSampler(range(6), num_replicas=2, rank=0), "is a DistributedSampler, which is sharded already"),
        (iter([0, 1]), "`order` must have a length, but list_iterator has none"),
        (Sized(3, [0, 1]), "`order` must yield the 3 indices that its length says, but yielded 2 in epoch 0"),
        (Sized(3, itertools.count()), "`order` must yield the 3 indices .* but yielded more in epoch 0"),
        (Sized(2, [0, 0.5]), r"must yield integer indices, but yielded 0.5 \(float\)"),
        (Sized(1, [(0, 48)]), r"must yield integer indices, but yielded \(0, 48\) \(tuple\)"),
    ],
)
def test_orders_that_cannot_be_sharded_are_refused(order, message):
    with pytest.raises(ConfigurationError, match=message):
        list(fleet(2, 6, order=order)[0])


def test_samples_are_drawn_in_proportion_to_their_weights():
    weights = torch.tensor([0.0, 1.0, 2.0, 0.0, 5.0, 0.5, 0.0])
    stream = WeightedStream(weights, 7, seed=3)
    indices, draws = stream.take(torch.arange(170_000), epoch=2)
    counts = torch.bincount(indices, minlength=7).double()
    assert counts[weights == 0].sum() == 0
    drawn = weights > 0
    expected = 170_000 * weights[drawn].double() / weights.sum()
    chi_square = float(((counts[drawn] - expected) ** 2 / expected).sum())
    assert abs(chi_square - 3) / math.sqrt(6) < 4.5
    assert len(draws.unique()) == len(draws)
    neighbours = torch.stack([indices[:-1], indices[1:]]).double()
    assert abs(float(torch.corrcoef(neighbours)[0, 1])) * math.sqrt(170_000) < 4.5


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_weighted_steps_do_not_depend_on_the_number_of_ranks(world_size):
    weights = [index % 4 for index in range(50)]
    alone = real(fleet(1, 50, weights=weights, batch_size=30, epoch=1))
    shared = real(fleet(world_size, 50, weights=weights, batch_size=30 // world_size, epoch=1))
    assert [(int(key), key.draw) for key in shared] == [(int(key), key.draw) for key in alone]
    assert len(alone) == 50
    assert all(key % 4 for key in alone)
    assert alone != real(fleet(1, 50, weights=weights, batch_size=30, epoch=2))


@pytest.mark.parametrize(("number", "index"), [(0.0, 1), (0.25, 3), (1 - 2**-53, 3)])
def test_a_number_on_a_boundary_never_draws_a_weight_of_zero(monkeypatch, number, index):
    monkeypatch.setattr(
        "srforge.distributed.index_streams.uniforms",
        lambda key, positions, num: torch.full((len(positions), num), number, dtype=torch.float64),
    )
    stream = WeightedStream([0.0, 1.0, 0.0, 3.0, 0.0], 5, seed=0)
    assert stream.take(torch.arange(2), 0)[0].tolist() == [index, index]


def test_one_weight_alone_is_always_drawn_and_rounding_never_leaves_the_range():
    assert set(fleet(1, 4, weights=[0, 0, 7e-300, 0])[0]) == {2}
    stream = WeightedStream(torch.full((1000,), 0.1), 1000, seed=0)
    assert int(stream.take(torch.arange(10**5), 0)[0].max()) == 999


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0, 2.0], r"`weights` must hold one number for each of 4 samples, but has shape \(2,\)"),
        ([[1.0]] * 4, r"but has shape \(4, 1\)"),
        ([1.0, -2.0, 0.0, 1.0], r"`weights` must be finite and >= 0, but weights\[1\] is -2.0"),
        ([1.0, 1.0, math.nan, 1.0], r"weights\[2\] is nan"),
        ([1.0, 1.0, 1.0, math.inf], r"weights\[3\] is inf"),
        ([1e308] * 4, r"`weights` must have a finite sum"),
        ([0.0] * 4, "`weights` must hold a number > 0, but all are 0"),
    ],
)
def test_weights_that_cannot_work_are_refused(weights, message):
    with pytest.raises(ConfigurationError, match=message):
        fleet(1, 4, weights=weights)


def test_streams_answer_any_positions_in_any_order():
    stream = ShuffledStream(7, seed=5)
    whole = stream.take(torch.arange(40), 1)[0]
    scattered = torch.tensor([39, 0, 8, 8, 21, 6, 7])
    assert torch.equal(stream.take(scattered, 1)[0], whole[scattered])
