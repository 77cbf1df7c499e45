# ruff: noqa: NPY002 - the legacy generator is the one that global seeding is about
import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset

from srforge.data import DataLoaderFactory, DatasetPicklingError, SampleError, factory, loader_checks
from srforge.data.resources import MachineLimits
from srforge.distributed.active import set_active_strategy
from srforge.distributed.epochs import begin_epoch
from srforge.distributed.errors import ConfigurationError
from srforge.distributed.iterable_shards import ShardedIterable
from srforge.distributed.sharding import plan_of
from srforge.distributed.testing import FakeStrategy


class Drawing(Dataset):
    """Sample i: its index and one draw of numpy's and of torch's generator."""

    def __init__(self, length=12):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index < 0:
            raise AssertionError
        return torch.tensor([float(index), np.random.rand(), float(torch.rand(()))], dtype=torch.float64)


class Bands(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return {"lr": {"B02": torch.full((1, 2, 2), index), "B08": torch.zeros(1, 4, 4)}, "hr": torch.zeros(3)}


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


@pytest.fixture(autouse=True)
def _roomy(monkeypatch):
    monkeypatch.setattr(loader_checks, "read_limits", MachineLimits)
    monkeypatch.setattr(loader_checks, "warn_unsafe_fork", lambda: None)


def epoch_of(rank, world_size, epoch, dataset=None, batch_size=2, **options):
    """Return the rows that one rank of a fleet gets in one epoch."""
    set_active_strategy(FakeStrategy(rank, world_size))
    options = {"shuffle": True, "seed": 7, **options}
    loader = DataLoaderFactory(dataset or Drawing(), batch_size, **options).get_loader()
    begin_epoch(epoch, 7, loader)
    return torch.cat(list(loader))


def test_every_world_size_sees_the_same_augmented_samples():
    expected = {tuple(row) for row in epoch_of(0, 1, 3, batch_size=12).tolist()}
    assert {row[0] for row in expected} == set(range(12))
    for world_size in (2, 3, 4):
        rows = torch.cat([epoch_of(rank, world_size, 3, batch_size=12 // world_size) for rank in range(world_size)])
        assert len(rows) == 12
        assert {tuple(row) for row in rows.tolist()} == expected


def test_each_epoch_draws_anew_and_a_new_process_draws_the_same():
    first = epoch_of(0, 1, 0)
    second = epoch_of(0, 1, 1)
    assert set(first[:, 1].tolist()).isdisjoint(second[:, 1].tolist())
    assert torch.equal(epoch_of(0, 1, 1), second)  # a resumed run begins here


def test_ranks_draw_differently():
    draws = [value for rank in (0, 1) for value in epoch_of(rank, 2, 0)[:, 2].tolist()]
    assert len(set(draws)) == 12


def test_forked_workers_give_the_same_batches_as_none_living_or_not():
    expected = [epoch_of(0, 1, epoch) for epoch in (0, 1)]
    for persistent in (True, False):
        loader = DataLoaderFactory(
            Drawing(),
            2,
            shuffle=True,
            seed=7,
            num_workers=2,
            multiprocessing_context="fork",
            persistent_workers=persistent,
        ).get_loader()
        for epoch in (0, 1):
            begin_epoch(epoch, 7, loader)
            assert torch.equal(torch.cat(list(loader)), expected[epoch])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_building_and_iterating_never_moves_the_global_generators(num_workers):
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    options = {"multiprocessing_context": "fork"} if num_workers else {}
    loader = DataLoaderFactory(Drawing(), 2, shuffle=True, seed=7, num_workers=num_workers, **options).get_loader()
    list(loader)
    list(loader)
    assert torch.equal(torch.get_rng_state(), before)
    assert (np.random.get_state()[1] == numpy_before).all()


def test_subsets_concatenations_and_nested_samples_pass():
    dataset = ConcatDataset([Subset(Drawing(), [3, 4]), Drawing(2)])
    assert sorted(epoch_of(0, 1, 0, dataset)[:, 0].tolist()) == [0, 1, 3, 4]
    batch = next(iter(DataLoaderFactory(Bands(), 2, shuffle=False, seed=0).get_loader()))
    assert batch["lr"]["B02"].shape == (2, 1, 2, 2)
    assert batch["lr"]["B02"][:, 0, 0, 0].tolist() == [0, 1]


def test_loader_without_batch_size_yields_the_data_sets_own_batches():
    loader = DataLoaderFactory(Bands(), None, shuffle=False, seed=0).get_loader()
    assert [int(batch["lr"]["B02"][0, 0, 0]) for batch in loader] == [0, 1, 2, 3]


def test_training_loader_has_the_plan_of_its_options():
    set_active_strategy(FakeStrategy(0, 2))
    loader = DataLoaderFactory(Drawing(100), 4, shuffle=True, seed=0, accumulate=2, tail="drop", repeat=2).get_loader()
    plan = plan_of(loader)
    assert (plan.accumulate, plan.tail, plan.repeat, plan.world_size) == (2, "drop", 2, 2)
    assert len(loader) == plan.num_micro_batches == 24
    assert plan_of(DataLoaderFactory(Drawing(), 4, shuffle=False, seed=0).get_loader()) is None
    assert plan_of(DataLoaderFactory(Drawing(), 4, shuffle=False, seed=0, training=True).get_loader()) is not None


def test_iterable_data_sets_are_sharded_over_ranks():
    seen = []
    for rank in (0, 1):
        set_active_strategy(FakeStrategy(rank, 2))
        loader = DataLoaderFactory(Stream(), 2, shuffle=False, seed=0, drop_last=True).get_loader()
        assert isinstance(loader.dataset, ShardedIterable)
        seen.append(torch.cat(list(loader)).tolist())
    assert seen == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_own_sharding_of_an_iterable_passes_through():
    own = ShardedIterable(Stream(), seed=3, rank=0, world_size=1)
    assert DataLoaderFactory(own, 2, shuffle=False, seed=0).get_loader().dataset is own


@pytest.mark.parametrize(
    "options", [{"shuffle": True}, {"shuffle": False, "repeat": 2}, {"shuffle": False, "sampler": [0]}]
)
def test_options_that_need_indices_are_refused_for_iterables(options):
    wrong = "shuffle" if options["shuffle"] else list(options)[1]
    with pytest.raises(ConfigurationError, match=f"`{wrong}` must be left out for an iterable data set"):
        DataLoaderFactory(Stream(), 2, seed=0, **options).get_loader()


def collate_pairs(samples):
    return list(samples)


@pytest.mark.parametrize(
    ("name", "value"),
    [("generator", torch.Generator()), ("timeout", 0), ("prefetch_factor", 5), ("persistent_workers", False)],
)
def test_explicit_arguments_reach_the_loader(name, value):
    loader = DataLoaderFactory(
        Drawing(), 2, shuffle=True, seed=0, num_workers=1, multiprocessing_context="fork", **{name: value}
    ).get_loader()
    assert isinstance(loader, DataLoader)
    assert getattr(loader, name) is value


def test_explicit_functions_are_called_inside_ours():
    loader = DataLoaderFactory(
        Drawing(),
        2,
        shuffle=True,
        seed=0,
        num_workers=1,
        multiprocessing_context="fork",
        worker_init_fn=print,
        collate_fn=collate_pairs,
    ).get_loader()
    assert loader.worker_init_fn.then is print
    assert loader.collate_fn.collate is collate_pairs
    assert loader.multiprocessing_context.get_start_method() == "fork"


def test_pinning_follows_the_strategys_device_or_the_given_one(monkeypatch):
    set_active_strategy(FakeStrategy(0, 1, device="cuda"))
    assert DataLoaderFactory(Drawing(), 2, shuffle=False, seed=0).get_loader().pin_memory
    assert (
        not DataLoaderFactory(Drawing(), 2, shuffle=False, seed=0, device="cpu", pin_memory=True)
        .get_loader()
        .pin_memory
    )


def test_default_workers_come_from_the_fork_server_which_is_started(monkeypatch):
    started = []
    monkeypatch.setattr(factory, "start_fork_server", lambda: started.append(True))
    monkeypatch.setattr(factory, "check_workers", lambda *arguments, **options: None)
    loader = DataLoaderFactory(Drawing(), 2, shuffle=True, seed=0, num_workers=1).get_loader()
    assert loader.multiprocessing_context.get_start_method() == "forkserver"
    assert loader.persistent_workers
    assert started == [True]


def test_data_set_that_cannot_travel_is_refused_when_the_loader_is_made():
    dataset = Drawing()
    dataset.transform = lambda sample: sample
    with pytest.raises(DatasetPicklingError, match=r"dataset\.transform \(function .*<lambda>\)"):
        DataLoaderFactory(dataset, 2, shuffle=True, seed=0, num_workers=1).get_loader()
    DataLoaderFactory(dataset, 2, shuffle=True, seed=0).get_loader()


def test_sample_that_fails_in_a_worker_is_named_with_rank_worker_and_index():
    set_active_strategy(FakeStrategy(1, 2))
    dataset = Subset(Drawing(), [0, 1, -1, 3])
    loader = DataLoaderFactory(
        dataset, 1, shuffle=False, seed=0, num_workers=1, multiprocessing_context="fork"
    ).get_loader()
    with pytest.raises(SampleError, match=r"sample 2 \(epoch 0\).*rank 1, worker 0: AssertionError"):
        list(loader)


def test_attribute_set_while_workers_live_warns_with_the_way_that_reaches_them():
    dataset = Drawing()
    loader = DataLoaderFactory(
        dataset, 2, shuffle=False, seed=0, num_workers=1, multiprocessing_context="fork"
    ).get_loader()
    list(loader)
    list(loader)
    dataset.patch_size = 64
    with pytest.warns(UserWarning, match=r"dataset\.patch_size must be set before workers start"):
        list(loader)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(loader)  # said once per change


@pytest.mark.parametrize("num_workers", [-1, 1.5, True, "2"])
def test_number_of_workers_is_a_count(num_workers):
    with pytest.raises(ConfigurationError, match="`num_workers` must be an integer >= 0, but is"):
        DataLoaderFactory(Drawing(), 2, shuffle=True, num_workers=num_workers)


def test_seed_that_nobody_gave_is_rank_0s():
    set_active_strategy(FakeStrategy(1, 2, peers=[1234]))
    loader = DataLoaderFactory(Drawing(), 2, shuffle=True).get_loader()
    assert loader.dataset.seed == loader.sampler.seed


def test_data_set_without_a_length_works_with_an_order_that_has_one():
    class Endless(Dataset):
        def __getitem__(self, index):
            return index

    loader = DataLoaderFactory(Endless(), 2, shuffle=False, seed=0, sampler=[10**9, 5, 7], training=True).get_loader()
    assert torch.cat(list(loader)).tolist() == [10**9, 5, 7]


def test_stored_generator_is_warned_about_without_workers_too():
    dataset = Drawing()
    dataset.rng = np.random.default_rng(0)
    with pytest.warns(UserWarning, match=r"dataset\.rng \(Generator\) must not be stored in a data set"):
        DataLoaderFactory(dataset, 2, shuffle=True, seed=0).get_loader()
