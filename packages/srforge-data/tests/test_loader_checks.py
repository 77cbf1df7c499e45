import random
import threading
import warnings

import cv2
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

from srforge.data import DatasetPicklingError, loader_checks
from srforge.data.loader_checks import (
    check_workers,
    settings_of,
    warn_changed_settings,
    warn_stored_generators,
    warn_unsafe_fork,
)
from srforge.data.resources import MachineLimits
from srforge.distributed.active import set_active_strategy
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
