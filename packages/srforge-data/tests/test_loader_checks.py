import random
import sys
import threading
import warnings

import cv2
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from srforge.data import DataLoaderFactory, DatasetPicklingError, loader_checks
from srforge.data.loader_checks import (
    check_workers,
    settings_of,
    warn_changed_settings,
    warn_stored_generators,
    warn_unsafe_fork,
)
from srforge.data.resources import MachineLimits
from srforge.distributed.active import set_active_strategy
from srforge.distributed.errors import ConfigurationError
from srforge.distributed.testing import FakeStrategy


class Images(Dataset):
    def __init__(self, patch=48):
        self.patch = patch
        self.files = ["a.png"]
        self.mean = torch.zeros(3)

    def __len__(self):
        return 1


class Announced(Images):
    def set_epoch(self, epoch):
        self.patch += 1


@pytest.fixture
def _few_files(monkeypatch):
    monkeypatch.setattr(loader_checks, "read_limits", lambda: MachineLimits(open_files=64))


@pytest.mark.usefixtures("_few_files")
def test_resources_are_said_once_per_machine():
    with pytest.warns(UserWarning, match=r"ulimit -n.*but is 64"):
        check_workers({"dataset": Images()}, "spawn", num_workers=2, prefetch_factor=2)
    set_active_strategy(FakeStrategy(1, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_workers({"dataset": Images()}, "spawn", num_workers=2, prefetch_factor=2)


def test_forked_workers_need_no_pickle(monkeypatch):
    monkeypatch.setattr(loader_checks, "read_limits", MachineLimits)
    monkeypatch.setattr(loader_checks, "warn_unsafe_fork", lambda: None)
    check_workers({"dataset": threading.Lock()}, "fork", num_workers=2, prefetch_factor=2)
    with pytest.raises(DatasetPicklingError, match=r"dataset \(lock\)"):
        check_workers({"dataset": threading.Lock()}, "spawn", num_workers=2, prefetch_factor=2)


@pytest.fixture
def _calm(monkeypatch):
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.main_thread()])
    before = cv2.getNumThreads()
    cv2.setNumThreads(0)
    yield
    cv2.setNumThreads(before)


@pytest.mark.usefixtures("_calm")
def test_fork_from_a_calm_process_is_silent_and_each_danger_is_named(monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_unsafe_fork()
    cv2.setNumThreads(2)
    with pytest.warns(UserWarning, match=r"OpenCV may use 2 threads here: a worker can wait for ever"):
        warn_unsafe_fork()
    cv2.setNumThreads(0)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.warns(UserWarning, match="CUDA is in use here"):
        warn_unsafe_fork()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    other = threading.Thread(name="reader")
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.main_thread(), other])
    with pytest.warns(UserWarning, match=r'is "fork" and threads run here \(reader\)'):
        warn_unsafe_fork()


def test_stored_generator_is_named_with_the_cure():
    dataset = Images()
    dataset.rng = random.Random(0)
    with pytest.warns(
        UserWarning, match=r"dataset\.rng \(Random\) must not be stored.*Draw from random, numpy.random or torch"
    ):
        warn_stored_generators(Subset(dataset, [0]).dataset)


def test_settings_are_the_plain_values_of_all_data_sets_without_set_epoch():
    both = ConcatDataset([Images(24), Announced()])
    both.scale = 4
    assert settings_of(both) == {"dataset.scale": 4, "dataset.datasets[0].patch": 24}


def test_setting_that_is_not_a_number_has_not_changed():
    dataset = Images()
    dataset.no_data = float("nan")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_changed_settings(settings_of(dataset), settings_of(dataset))


def test_setting_that_changed_after_the_workers_started_is_named():
    dataset = Images()
    before = settings_of(dataset)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_changed_settings(before, settings_of(dataset))
    dataset.patch = 64
    with pytest.warns(UserWarning, match=r"dataset\.patch must be set before workers start.*set_epoch\(epoch\)"):
        warn_changed_settings(before, settings_of(dataset))


class Endless(Dataset):
    def __getitem__(self, index):
        return index


@pytest.mark.parametrize("shuffle", [False, True])
def test_data_set_that_torch_would_take_for_an_empty_one_is_refused(shuffle):
    for dataset in ((index for index in range(3)), {1, 2}, iter([1])):
        with pytest.raises(ConfigurationError, match=r"`dataset` must give samples by index .*, but is a \w+"):
            DataLoaderFactory(dataset, 2, shuffle=shuffle, seed=0).get_loader()
    with pytest.raises(ConfigurationError, match=r"`dataset` must have a length, but Endless has no __len__"):
        DataLoaderFactory(Endless(), 2, shuffle=shuffle, seed=0).get_loader()


def test_order_of_the_users_needs_no_length():
    for order in ({"sampler": [4, 7, 5]}, {"batch_sampler": [[4, 7], [5]]}):
        loader = DataLoaderFactory(Endless(), 2, shuffle=False, seed=0, **order).get_loader()
        assert [batch.tolist() for batch in loader] == [[4, 7], [5]]


@pytest.mark.parametrize(
    "dataset",
    [[1, 2, 3], (1, 2, 3), {0: 1, 1: 2, 2: 3}, torch.tensor([1, 2, 3]), TensorDataset(torch.tensor([1, 2, 3]))],
)
def test_whatever_has_indices_and_a_length_is_a_data_set(dataset):
    (batch,) = DataLoaderFactory(dataset, 3, shuffle=False, seed=0).get_loader()
    assert torch.as_tensor(batch[0] if isinstance(batch, list) else batch).tolist() == [1, 2, 3]


@pytest.mark.parametrize("length", [2, 5])
def test_length_that_changes_under_a_loader_is_refused(length):
    """Its order was planned: of a longer data set it would leave samples out, of a shorter one ask for some too many."""
    samples = [1, 2, 3]
    loader = DataLoaderFactory(samples, 2, shuffle=True, seed=0).get_loader()
    assert sum(map(len, loader)) == 3
    samples[:] = range(length)
    with pytest.raises(ConfigurationError, match=rf"must keep its length, but has {length} samples now and had 3"):
        iter(loader)
    loader = DataLoaderFactory(samples, 2, shuffle=True, seed=0, sampler=None).get_loader()
    assert sum(map(len, loader)) == length


def test_workers_of_a_program_that_is_no_file_are_refused(monkeypatch, tmp_path):
    """``python < train.py``: each worker would look for a script called <stdin>, and end."""
    monkeypatch.setattr(loader_checks, "read_limits", MachineLimits)
    monkeypatch.setattr(loader_checks, "warn_unsafe_fork", lambda: None)
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__spec__", None)
    for missing in ("<stdin>", str(tmp_path / "removed.py")):
        monkeypatch.setattr(main, "__file__", missing, raising=False)
        with pytest.raises(
            ConfigurationError, match=rf"`num_workers` must be 0 .*, but is 3, and {missing} is no file"
        ):
            check_workers({"dataset": [1]}, "spawn", num_workers=3, prefetch_factor=2)
        check_workers({"dataset": [1]}, "fork", num_workers=3, prefetch_factor=2)
    (tmp_path / "removed.py").touch()
    check_workers({"dataset": [1]}, "spawn", num_workers=3, prefetch_factor=2)
    monkeypatch.delattr(main, "__file__")
    check_workers({"dataset": [1]}, "spawn", num_workers=3, prefetch_factor=2)
