# ruff: noqa: NPY002 - the legacy generator is the one that global seeding is about
import random

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, default_collate

from srforge.data import SampleError, SeededDataset
from srforge.data.seeded import SeededCollate
from srforge.distributed.seeding import preserved_rng, seed_sample
from srforge.distributed.sharding import SampleKey


def draw():
    return random.random(), float(np.random.rand()), float(torch.rand(()))


class Drawing(Dataset):
    def __init__(self):
        self.epochs = []

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 7:
            raise ValueError("broken file")
        return index, *draw()

    def set_epoch(self, epoch):
        self.epochs.append(epoch)


class Batches(Drawing):
    accepts_sample_keys = True

    def __getitems__(self, keys):
        return [(int(key), key.epoch) for key in keys]


class OnlyBatches(Dataset):
    def __len__(self):
        return 8

    def __getitems__(self, indices):
        return [(index, type(index)) for index in indices]


def test_sample_is_a_function_of_seed_epoch_and_index_alone():
    dataset = SeededDataset(Drawing(), seed=5)
    first = dataset[SampleKey(3, 2)]
    with preserved_rng():
        seed_sample(5, 2, 3)
        assert first == (3, *draw())
    random.random(), np.random.rand(), torch.rand(())
    dataset[SampleKey(1, 2)]
    assert dataset[SampleKey(3, 2)] == first
    others = [dataset[SampleKey(3, 1)], dataset[SampleKey(2, 2)], SeededDataset(Drawing(), seed=6)[SampleKey(3, 2)]]
    assert all(other[1:] != first[1:] for other in others)


def test_main_process_keeps_its_generators():
    dataset = SeededDataset(Drawing(), seed=5)
    with preserved_rng():
        torch.manual_seed(1), random.seed(1), np.random.seed(1)
        expected = draw()
        torch.manual_seed(1), random.seed(1), np.random.seed(1)
        dataset[SampleKey(0, 0)]
        with pytest.raises(SampleError):
            dataset[SampleKey(7, 0)]
        assert draw() == expected


def test_data_set_is_told_each_new_epoch_once_also_inside_subsets_and_concatenations():
    inner = [Drawing(), Drawing()]
    dataset = SeededDataset(Subset(ConcatDataset(inner), range(12)), seed=0)
    for epoch in (0, 0, 2, 2, 3):
        dataset[SampleKey(1, epoch)]
    assert [one.epochs for one in inner] == [[0, 2, 3], [0, 2, 3]]
    dataset.set_epoch(3)
    dataset.set_epoch(4)
    dataset[SampleKey(1, 4)]
    assert inner[0].epochs == [0, 2, 3, 4]


def test_failing_sample_is_named_with_its_epoch_rank_and_process():
    dataset = SeededDataset(Drawing(), seed=0, rank=3)
    with pytest.raises(
        SampleError,
        match=r"sample 7 \(epoch 2\) must be readable.* failed on rank 3, main process: ValueError: broken file",
    ) as caught:
        dataset[SampleKey(7, 2)]
    assert isinstance(caught.value.__cause__, ValueError)


def test_asking_by_hand_gives_the_data_sets_own_error_and_iterates_to_its_end():
    with pytest.raises(ValueError, match="broken file"):
        SeededDataset(Drawing(), seed=0)[7]
    assert len(list(SeededDataset([1, 2, 3], seed=0))) == 3


def test_whole_batches_are_fetched_one_by_one_unless_the_data_set_opts_in():
    assert SeededDataset(OnlyBatches(), seed=0).__getitems__ is None
    assert SeededDataset(OnlyBatches(), seed=0)[SampleKey(2, 1)] == (2, int)
    assert SeededDataset(Subset(Drawing(), [4, 5]), seed=0)[SampleKey(1, 0)][0] == 5
    keys = [SampleKey(2, 1), SampleKey(3, 1)]
    dataset = Batches()
    assert SeededDataset(dataset, seed=0).__getitems__(keys) == [(2, 1), (3, 1)]
    assert dataset.epochs == [1]


def test_key_of_several_indices_reaches_the_data_set_whole():
    class Rows(Dataset):
        def __getitem__(self, indices):
            return torch.arange(10)[indices], torch.rand(())

    rows, drawn = SeededDataset(Rows(), seed=3)[[SampleKey(4, 1), SampleKey(2, 1)]]
    assert rows.tolist() == [4, 2]
    with preserved_rng():
        seed_sample(3, 1, 4)
        assert drawn == torch.rand(())


def test_random_collate_function_is_seeded_and_leaves_the_generators_alone():
    dataset = SeededDataset(Drawing(), seed=5)
    collate = SeededCollate(lambda samples: (default_collate(samples), draw()), dataset)

    def batch(*keys):
        return collate([dataset[key] for key in keys])[1]

    with preserved_rng():
        before = torch.get_rng_state()
        drawn = batch(SampleKey(0, 1), SampleKey(1, 1))
        assert torch.equal(before, torch.get_rng_state())
    torch.rand(())
    assert batch(SampleKey(0, 1), SampleKey(1, 1)) == drawn
    assert batch(SampleKey(0, 2), SampleKey(1, 2)) != drawn
    assert dataset[SampleKey(1, 1)][1:] != drawn  # not the last sample's own numbers


class Leaving(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        raise SystemExit(3)


def test_exit_in_a_worker_is_an_error_that_names_its_sample():
    """Torch loses it: its rank sees a closed pipe (FileNotFoundError, EOFError) and nothing of the reason."""
    loader = DataLoader(
        SeededDataset(Leaving(), 0), sampler=[SampleKey(1, 0)], num_workers=1, multiprocessing_context="fork"
    )
    with pytest.raises(SampleError, match=r"sample 1 \(epoch 0\) must be readable, .*worker 0: SystemExit: 3"):
        list(loader)


def test_exit_in_the_main_process_is_one():
    with pytest.raises(SystemExit):
        SeededDataset(Leaving(), 0)[SampleKey(1, 0)]
