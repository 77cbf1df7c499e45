"""``SkipUnreadable``: one sample per key whatever happens, the same one everywhere, and a count that misses nothing."""

import importlib
import sys

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset

from srforge.data.images import ImageReadError
from srforge.data.seeded import SeededDataset
from srforge.data.skipping import MAX_UNREADABLE_IN_A_ROW, SkipUnreadable, take_skipped
from srforge.distributed.errors import ConfigurationError
from srforge.distributed.metric_tree import MetricSum
from srforge.distributed.reductions import reduce_metrics

SOURCE = '''
import torch
from torch.utils.data import Dataset
from srforge.data.images import ImageReadError


class Numbers(Dataset):
    """Sample ``i`` is ``i``; those in `unreadable` raise as ``read_image`` does."""

    def __init__(self, length, unreadable=()):
        self.length = length
        self.unreadable = frozenset(unreadable)

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index in self.unreadable:
            raise ImageReadError(f"/data/{index}.png must hold an image, but is empty. Replace the file.")
        return torch.tensor([index])
'''


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    """Return the class `Numbers` from a module that worker processes can import too."""
    folder = tmp_path_factory.mktemp("modules")
    (folder / "numbered_samples.py").write_text(SOURCE)
    sys.path.insert(0, str(folder))
    yield importlib.import_module("numbered_samples").Numbers
    sys.path.remove(str(folder))
    del sys.modules["numbered_samples"]


def test_unreadable_samples_become_the_next_readable_ones(numbers):
    dataset = SkipUnreadable(numbers(10, {2, 3, 9}), on_error="skip")
    assert [int(dataset[index]) for index in range(10)] == [0, 1, 4, 4, 4, 5, 6, 7, 8, 0]
    assert len(dataset) == 10
    assert dataset.take_skipped() == [2, 3, 9]
    assert dataset.take_skipped() == []


def test_only_the_sample_that_was_asked_for_counts_as_replaced(numbers):
    dataset = SkipUnreadable(numbers(10, {2, 3, 9}), on_error="skip")
    assert int(dataset[2]) == 4  # past 3, which nobody asked for
    assert dataset.take_skipped() == [2]
    assert int(dataset[-1]) == 0
    assert dataset.take_skipped() == [9]


def test_errors_pass_through_by_default(numbers):
    dataset = SkipUnreadable(numbers(4, {2}))
    with pytest.raises(ImageReadError, match=r"/data/2.png must hold an image, but is empty"):
        dataset[2]
    assert dataset.take_skipped() == []


def test_other_errors_are_never_skipped(numbers):
    class Broken(numbers):
        def __getitem__(self, index):
            raise KeyError("lr")

    with pytest.raises(KeyError, match="lr"):
        SkipUnreadable(Broken(3), on_error="skip")[0]


@pytest.mark.parametrize("length", [3, MAX_UNREADABLE_IN_A_ROW + 50])
def test_a_data_set_that_cannot_be_read_at_all_ends_the_run(length, numbers):
    attempts = min(length, MAX_UNREADABLE_IN_A_ROW)
    with pytest.raises(ImageReadError, match=rf"one of {attempts} samples from 1 on must be readable.*/data/1.png"):
        SkipUnreadable(numbers(length, range(length)), on_error="skip")[1]


def test_unknown_rule_is_refused(numbers):
    with pytest.raises(ConfigurationError, match=r"`on_error` must be raise or skip, but is 'ignore'"):
        SkipUnreadable(numbers(3), on_error="ignore")


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_count_together_and_give_what_one_process_gives(method, numbers):
    dataset = SkipUnreadable(numbers(24, {0, 5, 6, 7, 23}), on_error="skip")
    expected = [int(dataset[index]) for index in range(24)]
    dataset.take_skipped()
    loader = DataLoader(
        SeededDataset(dataset, 3), batch_size=4, num_workers=2, multiprocessing_context=method, persistent_workers=True
    )
    for _ in range(2):  # a living worker counts the second epoch too
        assert torch.cat(list(loader)).flatten().tolist() == expected
        assert take_skipped(loader) == [0, 5, 6, 7, 23]
    assert take_skipped(loader) == []


def test_wrappers_subsets_and_concatenations_are_searched(numbers):
    first = SkipUnreadable(numbers(5, {1}), on_error="skip")
    second = SkipUnreadable(numbers(5, {2}), on_error="skip")
    dataset = SeededDataset(Subset(ConcatDataset([first, second]), range(10)), 0)
    list(DataLoader(dataset, batch_size=5))
    assert take_skipped(DataLoader(dataset)) == [1, 2]
    assert take_skipped(DataLoader(numbers(3))) == []
    first[1]
    first.dataset.datasets = None  # an attribute of the user's own
    assert take_skipped(Subset(first, [0])) == [1]
    own = numbers(3)
    own.dataset, own.datasets = own, None
    assert take_skipped(own) == []


def test_fleet_count_is_the_sum_over_ranks(numbers):
    counts = []  # per rank; one process that sees all samples skips three
    for rank in range(2):
        dataset = SkipUnreadable(numbers(10, {2, 3, 9}), on_error="skip")
        for index in range(rank, 10, 2):
            dataset[index]
        counts.append(len(take_skipped(dataset)))
    assert counts == [1, 2]

    reduced, _ = reduce_metrics({"skipped_samples": MetricSum(2, 1, "sum")}, lambda part: torch.stack([part, part]))
    assert reduced == {"skipped_samples": 4.0}
