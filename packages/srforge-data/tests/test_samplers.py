import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from srforge.data.samplers import EpochKeys, choose_sampler, is_sharded
from srforge.distributed.batch_sharding import ShardedBatchSampler
from srforge.distributed.errors import ConfigurationError
from srforge.distributed.sharding import ShardedSampler, plan_of
from srforge.distributed.testing import FakeStrategy


def choose(rank=0, world_size=1, *, num_samples=12, batch_size=2, shuffle=False, plan=None, **given):
    return choose_sampler(
        FakeStrategy(rank, world_size),
        num_samples,
        batch_size=batch_size,
        shuffle=shuffle,
        seed=1,
        plan=plan or {},
        given=given,
    )


def test_default_is_the_strategys_sampler_and_shuffling_means_training():
    chosen = choose(1, 3, shuffle=True)
    assert isinstance(chosen["sampler"], ShardedSampler)
    assert chosen["sampler"].plan.global_batch_size == 6
    assert (chosen["batch_size"], chosen["drop_last"]) == (2, False)
    assert choose(shuffle=False)["sampler"].plan is None
    assert choose(shuffle=False, plan={"training": True})["sampler"].plan is not None


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_own_order_is_sharded_each_index_once_with_the_epoch_attached(world_size):
    order = [5, 3, 1, 0, 2, 4, 11, 10, 9, 8, 7, 6]
    keys = []
    for rank in range(world_size):
        sampler = choose(rank, world_size, batch_size=1, sampler=order, plan={"training": True})["sampler"]
        sampler.set_epoch(4)
        keys.append(list(sampler))
    assert {key.epoch for share in keys for key in share} == {4}
    assert [share[step] for step in range(len(keys[0])) for share in keys] == order


def test_own_random_order_is_the_same_on_all_ranks_and_new_each_epoch():
    orders = []
    for epoch in (0, 1):
        seen = []
        for rank in (0, 1):
            own = WeightedRandomSampler([1.0] * 12, 12, replacement=False, generator=torch.Generator())
            sampler = choose(rank, 2, sampler=own, plan={"training": True})["sampler"]
            sampler.set_epoch(epoch)
            seen.append(list(sampler))
        assert sorted(seen[0] + seen[1]) == list(range(12))
        orders.append(seen[0])
    assert orders[0] != orders[1]


def test_own_batches_are_sharded_whole():
    batches = [[0, 1, 2], [3], [4, 5], [6, 7]]
    shares = []
    for rank in (0, 1):
        chosen = choose(rank, 2, batch_sampler=batches, plan={"training": True})
        assert set(chosen) == {"batch_sampler"}
        assert isinstance(chosen["batch_sampler"], ShardedBatchSampler)
        shares.append(list(chosen["batch_sampler"]))
    assert [shares[0][0], shares[1][0], shares[0][1], shares[1][1]] == batches


@pytest.mark.parametrize("own", [DistributedSampler(range(12), num_replicas=2, rank=1, seed=7)])
def test_sharded_sampler_keeps_its_order_and_gets_the_epoch(own):
    reference = DistributedSampler(range(12), num_replicas=2, rank=1, seed=7)
    sampler = choose(1, 2, sampler=own)["sampler"]
    assert isinstance(sampler, DistributedSampler)
    assert (sampler.rank, sampler.num_replicas) == (1, 2)
    for epoch in (0, 3):
        sampler.set_epoch(epoch)
        reference.set_epoch(epoch)
        keys = list(sampler)
        assert keys == list(reference)
        assert {key.epoch for key in keys} == {epoch}
    assert len(sampler) == len(reference)


def test_batch_sampler_around_a_sharded_sampler_passes_too():
    own = BatchSampler(DistributedSampler(range(12), num_replicas=2, rank=0, shuffle=False), 4, drop_last=False)
    sampler = choose(0, 2, batch_sampler=own)["batch_sampler"]
    assert isinstance(sampler, EpochKeys)
    sampler.set_epoch(2)
    assert list(sampler) == [[0, 2, 4, 6], [8, 10]]
    assert sampler.sampler.sampler.epoch == 2
    assert next(iter(sampler))[0].epoch == 2


def test_our_own_samplers_pass_as_they_are():
    own = ShardedSampler(12, batch_size=2, shuffle=True, training=True, seed=3, rank=0, world_size=2)
    assert choose(0, 2, sampler=own)["sampler"] is own
    batches = ShardedBatchSampler([[0], [1]], training=False, seed=3, rank=0, world_size=1)
    assert choose(batch_sampler=batches)["batch_sampler"] is batches


def test_batch_sampler_around_our_sampler_keeps_its_plan():
    own = ShardedSampler(10, batch_size=4, shuffle=True, training=True, seed=3, rank=0, world_size=2)
    batches = BatchSampler(own, 4, drop_last=False)
    assert plan_of(DataLoader(range(10), **choose(0, 2, batch_sampler=batches))) is own.plan


def test_own_order_is_for_training_unless_evaluation_is_said():
    assert choose(sampler=[0, 1, 2])["sampler"].plan is not None
    assert choose(batch_sampler=[[0], [1, 2]])["batch_sampler"].plan is not None
    shares = [list(choose(rank, 2, sampler=[4, 2, 0], plan={"training": False})["sampler"]) for rank in (0, 1)]
    assert shares == [[4, 2], [0]]


def test_plain_samplers_are_not_sharded():
    assert not is_sharded(RandomSampler(range(4)))
    assert not is_sharded(BatchSampler(SequentialSampler(range(4)), 2, drop_last=False))


def test_items_that_are_batches_are_shared_out_whole_and_have_no_plan():
    """A plan would count each of them as one sample."""
    shares = []
    for rank in (0, 1):
        chosen = choose(rank, 2, num_samples=5, batch_size=None, shuffle=True, plan={"accumulate": 2})
        assert chosen["batch_size"] is None
        assert chosen["sampler"].plan is None
        shares.append(list(chosen["sampler"]))
    assert sorted(shares[0] + shares[1]) == list(range(5))
    assert shares[0] + shares[1] != list(range(5))


def test_dropping_the_last_batch_drops_the_tail_of_the_fleet():
    chosen = choose(0, 2, num_samples=11, shuffle=True, drop_last=True)
    assert (chosen["sampler"].plan.tail, chosen["drop_last"]) == ("drop", False)
    assert len(chosen["sampler"]) == 4
    assert choose(shuffle=False, drop_last=True)["drop_last"] is True


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampler": [0], "batch_sampler": [[0]]}, "`sampler` and `batch_sampler` must not both be given"),
        ({"sampler": [0], "shuffle": True}, "`shuffle` must be False beside `sampler`"),
        (
            {"batch_sampler": [[0]], "plan": {"training": True}, "drop_last": True},
            "`drop_last` must be left to `batch_sampler`",
        ),
        (
            {"shuffle": True, "drop_last": True, "plan": {"tail": "pad"}},
            "`drop_last` must not contradict `tail`, but is True beside tail=pad",
        ),
        (
            {"sampler": DistributedSampler(range(4), num_replicas=1, rank=0), "plan": {"repeat": 2}},
            "`repeat` must be left to a `sampler` that is sharded already",
        ),
    ],
)
def test_contradictions_are_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        choose(**options)
