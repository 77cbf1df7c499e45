# ruff: noqa: NPY002 - the legacy generator is the one that global seeding is about
"""Faults reported from the field, as small scenarios: order and augmentation over epochs, workers, ranks and resumes."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from srforge.data import DataLoaderFactory, loader_checks
from srforge.data.resources import MachineLimits
from srforge.distributed.active import set_active_strategy
from srforge.distributed.epochs import begin_epoch
from srforge.distributed.testing import FakeStrategy

WORKERS = [
    {"num_workers": 0},
    {"num_workers": 2, "persistent_workers": True},
    {"num_workers": 2, "persistent_workers": False},
]


class Items(Dataset):
    """Gives the index, and one draw from each of the three global generators; counts what was read."""

    def __init__(self, length):
        self.length = length
        self.reads = torch.zeros(length, dtype=torch.int64).share_memory_()

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.reads[index] += 1
        crop = torch.distributions.Uniform(0.0, 1.0).sample()
        return torch.tensor([index, random.random(), np.random.rand(), float(crop)], dtype=torch.float64)


class Patches(Dataset):
    """Its patch size follows the epoch."""

    def __init__(self):
        self.patch_size = 0

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return self.patch_size

    def set_epoch(self, epoch):
        self.patch_size = 16 * (epoch + 1)


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    monkeypatch.setattr(loader_checks, "read_limits", MachineLimits)
    monkeypatch.setattr(loader_checks, "warn_unsafe_fork", lambda: None)


def make_loader(dataset, batch_size, rank=0, world_size=1, *, shuffle=True, **options):
    set_active_strategy(FakeStrategy(rank, world_size))
    if options.get("num_workers"):
        options = {"multiprocessing_context": "fork", **options}
    return DataLoaderFactory(dataset, batch_size, shuffle=shuffle, seed=11, **options).get_loader()


def read_epochs(loader, epochs):
    found = []
    for epoch in epochs:
        begin_epoch(epoch, 11, loader)
        found.append(torch.cat(list(loader)))
    return found


@pytest.mark.parametrize("workers", WORKERS)
def test_resumed_epochs_have_the_order_and_augmentation_of_uninterrupted_ones(workers):
    """12 items, two ranks, saved after epoch 0."""
    for rank in (0, 1):
        whole = read_epochs(make_loader(Items(12), 2, rank, 2, **workers), range(3))
        resumed = read_epochs(make_loader(Items(12), 2, rank, 2, **workers), range(1, 3))
        assert all(torch.equal(one, other) for one, other in zip(whole[1:], resumed, strict=True))
        assert not torch.equal(whole[0][:, 0], whole[1][:, 0])


def test_broken_epoch_is_replayed_whole_and_the_stream_goes_on():
    """20 items, killed at batch 3 of epoch 1, resumed to epoch 3."""
    whole = read_epochs(make_loader(Items(20), 4), range(4))
    killed = make_loader(Items(20), 4)
    stream = read_epochs(killed, [0])
    begin_epoch(1, 11, killed)
    batches = iter(killed)
    for _ in range(3):
        next(batches)  # of an epoch that does not count
    stream += read_epochs(make_loader(Items(20), 4), [1, 2, 3])
    assert torch.equal(torch.cat(stream), torch.cat(whole))


def test_every_item_comes_once_in_a_replayed_epoch():
    """64 items, broken off at sample 20."""
    broken = make_loader(Items(64), 4, num_workers=2)
    begin_epoch(0, 11, broken)
    batches = iter(broken)
    seen = torch.cat([next(batches) for _ in range(5)])
    (replayed,) = read_epochs(make_loader(Items(64), 4, num_workers=2), [0])
    assert torch.equal(replayed[:20], seen)
    assert sorted(replayed[:, 0].tolist()) == list(range(64))


@pytest.mark.parametrize("workers", WORKERS)
def test_resume_reads_no_sample_of_the_past(workers):
    """1,000 steps, resumed at step 900, an epoch's start."""
    dataset = Items(100)
    (last,) = read_epochs(make_loader(dataset, 1, **workers), [9])
    assert len(last) == 100
    assert int(dataset.reads.sum()) == 100


@pytest.mark.parametrize("workers", WORKERS)
def test_set_epoch_reaches_the_process_that_makes_the_samples(workers):
    """living workers never saw the parent's attribute."""
    loader = make_loader(Patches(), 4, shuffle=False, **workers)
    assert [epoch.unique().tolist() for epoch in read_epochs(loader, range(3))] == [[16], [32], [48]]


@pytest.mark.parametrize("workers", WORKERS)
def test_no_two_samples_of_a_run_draw_the_same_and_a_rerun_draws_them_again(workers):
    """all draws over 3 epochs, 2 ranks and 2 workers, from python, numpy and torch."""
    runs = []
    for _ in range(2):
        draws = [read_epochs(make_loader(Items(12), 2, rank, 2, **workers), range(3)) for rank in (0, 1)]
        runs.append(torch.cat([torch.cat(epochs) for epochs in draws]))
    assert torch.equal(*runs)
    for generator in (1, 2, 3):
        assert len(set(runs[0][:, generator].tolist())) == 3 * 12


@pytest.mark.parametrize("workers", WORKERS)
def test_sample_that_comes_twice_in_an_epoch_is_augmented_twice(workers):
    (epoch,) = read_epochs(make_loader(Items(6), 2, repeat=2, **workers), [0])
    assert sorted(epoch[:, 0].tolist()) == sorted([*range(6), *range(6)])
    assert len(set(epoch[:, 3].tolist())) == 12


def test_dropout_does_not_depend_on_the_number_of_workers():
    masks = []
    for workers in WORKERS:
        loader = make_loader(Items(8), 2, **workers)
        begin_epoch(0, 11, loader)
        dropout = torch.nn.Dropout(0.5)
        masks.append(torch.stack([dropout(torch.ones(32)) for _ in loader]))
    assert torch.equal(masks[0], masks[1])
    assert torch.equal(masks[0], masks[2])


def test_evaluation_gives_the_fleet_the_samples_that_one_process_sees():
    rows = torch.cat([read_epochs(make_loader(Items(5), 1, rank, 4, shuffle=False), [0])[0] for rank in range(4)])
    alone = read_epochs(make_loader(Items(5), 1, shuffle=False), [0])[0]
    assert torch.equal(rows, alone)
