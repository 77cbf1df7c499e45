import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader

from srforge.distributed.active import set_active_strategy
from srforge.distributed.epochs import begin_epoch
from srforge.distributed.seeding import preserved_rng, seed_epoch
from srforge.distributed.sharding import ShardedSampler
from srforge.distributed.testing import FakeStrategy


@pytest.fixture(autouse=True)
def _rank_2_of_4():
    set_active_strategy(FakeStrategy(2, 4))
    with preserved_rng():
        yield
    set_active_strategy(None)


class Told:
    def __init__(self, **attributes):
        self.epochs = []
        self.__dict__.update(attributes)

    def set_epoch(self, epoch):
        self.epochs.append(epoch)


def sampler():
    return ShardedSampler(20, batch_size=2, shuffle=True, training=True, seed=0, rank=0, world_size=2)


def test_every_part_of_a_loader_is_told_once():
    inner, dataset = Told(), Told()
    batch_sampler = Told(sampler=inner)
    loader = Told(sampler=inner, batch_sampler=batch_sampler, dataset=dataset)
    begin_epoch(3, 0, loader, None, loader, object())
    assert [part.epochs for part in (loader, inner, batch_sampler, dataset)] == [[3]] * 4


def test_loaders_of_torch_follow_the_epoch():
    plain, wrapped = sampler(), sampler()
    loaders = [
        DataLoader(range(20), 2, sampler=plain),
        DataLoader(range(20), batch_sampler=BatchSampler(wrapped, 2, drop_last=False)),
    ]
    orders = []
    for epoch in range(3):
        begin_epoch(epoch, 0, *loaders)
        assert plain.epoch == wrapped.epoch == epoch
        first, second = ([batch.tolist() for batch in loader] for loader in loaders)
        assert first == second
        orders.append(first)
    assert orders[0] != orders[1] != orders[2]


def test_generators_are_those_of_seed_epoch_and_rank():
    begin_epoch(5, 9)
    drawn = torch.rand(3)
    seed_epoch(9, 5, 2)
    assert torch.equal(torch.rand(3), drawn)
    seed_epoch(9, 5, 1)
    assert not torch.equal(torch.rand(3), drawn)
