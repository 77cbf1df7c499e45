import collections
import functools
import multiprocessing
import sqlite3
import sys
import threading
import warnings

import h5py
import lmdb
import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

from srforge.data import DatasetPicklingError
from srforge.data.pickling import check_picklable, find_unpicklable, warn_large_pickle

FORKSERVER = multiprocessing.get_context("spawn")  # locks of both start methods travel the same way


class Holder(Dataset):
    def __init__(self, held):
        self.held = held

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return index


class Slotted:
    __slots__ = ("handle",)

    def __init__(self, handle):
        self.handle = handle


class RefusesState:
    def __getstate__(self):
        raise ValueError("never")


class MakesTensor:
    def __getstate__(self):
        return {"table": torch.arange(5)}


class FancyDict(dict):
    pass


def double(value):
    return 2 * value


def numbers():
    yield 1


def make_local():
    class Local:
        pass

    return Local()


@pytest.fixture
def handles(tmp_path):
    made = {
        "lambda": lambda value: value,
        "local": make_local(),
        "lock": threading.Lock(),
        "file": (tmp_path / "text").open("w"),
        "hdf5": h5py.File(tmp_path / "images.h5", "w"),
        "database": sqlite3.connect(":memory:"),
        "lmdb": lmdb.open(str(tmp_path / "pairs")),
        "generator": numbers(),
        "thread": threading.Thread(target=double),
        "module": np,
        "lock made for fork": multiprocessing.get_context("fork").Lock(),
        "alias": functools.partial(lmdb.open, "pairs"),
        "tensor in a graph": torch.ones(2, requires_grad=True) * 2,
        "refuses": RefusesState(),
        "torch generator": torch.Generator(),
        "state made anew": MakesTensor(),
    }
    yield made
    for name in ("file", "hdf5", "database", "lmdb"):
        made[name].close()


CURES = {
    "lambda": r"dataset\.held \(function .*<lambda>\) cannot be pickled for forkserver workers\. Define it at the top level",
    "local": r"dataset\.held \(make_local\.<locals>\.Local\) cannot be pickled.*Define it at the top level",
    "lock": r"dataset\.held \(lock\) cannot be pickled for forkserver workers\. Open it in __getitem__, keep it in srforge",
    "file": r"dataset\.held \(TextIOWrapper\).*Open it in __getitem__.*OncePerProcess.*multiprocessing_context=\"fork\"",
    "hdf5": r"dataset\.held \(File\).*OncePerProcess.*h5py objects cannot be pickled",
    "database": r"dataset\.held \(Connection\).*OncePerProcess",
    "lmdb": r"dataset\.held \(Environment\).*OncePerProcess",
    "generator": r"dataset\.held \(generator\).*Make the iterator in __getitem__ or __iter__",
    "thread": r"dataset\.held\._started\._cond\._lock \(lock\)",
    "module": r"dataset\.held \(module\).*Import the module where it is used",
    "lock made for fork": r"dataset\.held \(Lock\).*SemLock created in a fork context",
    "alias": r"dataset\.held\.func \(class Environment\).*Call it in a function of your own at the top level",
    "tensor in a graph": r"dataset\.held \(Tensor\).*requires_grad",
    "torch generator": r"dataset\.held \(Generator\).*Draw from torch's global generator in __getitem__",
    "state made anew": r"dataset\.held \(MakesTensor\).*makes a tensor while it is pickled, which is gone when",
    "refuses": r"dataset\.held \(RefusesState\).*ValueError: never",
}


@pytest.mark.parametrize("kind", CURES)
def test_message_names_path_type_and_cure_of_each_kind(handles, kind):
    with pytest.raises(DatasetPicklingError, match=CURES[kind]):
        check_picklable({"dataset": Holder(handles[kind])}, "forkserver")


def nested(lock):
    objects = np.empty(2, dtype=object)
    objects[1] = lock
    fancy = FancyDict()
    fancy.lock = lock
    cyclic = Holder([])
    cyclic.held = [cyclic, lock]
    return {
        "dataset.held[2]": Holder([0, 1, lock]),
        "dataset.held['lr'].held": Holder({"lr": Holder(lock)}),
        "dataset.dataset.datasets[1].held": Subset(ConcatDataset([Holder(0), Holder(lock)]), [0]),
        "dataset.held.handle": Holder(Slotted(lock)),
        "dataset.held.args[0]": Holder(functools.partial(double, lock)),
        "dataset.held.keywords['value']": Holder(functools.partial(double, value=lock)),
        "dataset.held.__self__.held": Holder(Holder(lock).__getitem__),
        "dataset.held[1]": Holder(collections.deque([0, lock])),
        "dataset.held.default_factory": Holder(collections.defaultdict(lambda: 0)),
        "dataset.held.lock": Holder(fancy),
        "dataset.held{...}": Holder({lock}),
        "dataset.held.__getstate__()[1]": Holder(objects),
    }


@pytest.mark.parametrize("path", nested(threading.Lock()))
def test_path_leads_through_containers_transforms_and_wrappers(path):
    dataset = nested(threading.Lock())[path]
    with pytest.raises(DatasetPicklingError) as caught:
        check_picklable({"dataset": dataset}, "forkserver")
    assert str(caught.value).startswith(f"{path} (")


def test_functions_given_to_the_loader_are_checked_under_their_own_names():
    with pytest.raises(DatasetPicklingError, match=r"collate_fn \(function .*<lambda>\) cannot be pickled for spawn"):
        check_picklable({"dataset": Holder(0), "collate_fn": lambda samples: samples}, "spawn")


def test_what_workers_may_share_is_no_error():
    shared = [FORKSERVER.Lock(), FORKSERVER.Value("i", 0), FORKSERVER.Queue(), torch.nn.Parameter(torch.ones(2))]
    shared += [torch.eye(3).to_sparse(), torch.arange(9)[3:5], torch.nn.Linear(2, 2)]
    assert check_picklable({"dataset": Holder(shared)}, "spawn") > 0
    shared[2].close()


def test_size_counts_arrays_but_not_tensors_which_workers_share():
    array = check_picklable({"dataset": Holder(np.zeros(10**6, dtype=np.uint8))}, "forkserver")
    tensor = check_picklable({"dataset": Holder(torch.zeros(10**6, dtype=torch.uint8))}, "forkserver")
    assert 10**6 <= array < 10**6 + 1000
    assert tensor < 1000


def test_more_tensors_than_a_fork_server_takes_are_refused_with_their_number():
    views = torch.zeros(300, 2)
    many = [torch.zeros(2) for _ in range(300)]
    with pytest.raises(
        DatasetPicklingError, match=r"dataset must hold at most 240 tensors.*but holds 300\. Stack them"
    ):
        check_picklable({"dataset": Holder(many)}, "forkserver")
    check_picklable({"dataset": Holder(many)}, "spawn")
    check_picklable({"dataset": Holder(list(views))}, "forkserver")  # views of one tensor


def test_checking_moves_no_tensor_to_shared_memory():
    values = torch.zeros(3)
    check_picklable({"dataset": Holder(values)}, "forkserver")
    assert not values.is_shared()


def test_objects_of_an_interactive_session_are_refused(monkeypatch):
    main = type(sys)("__main__")
    interactive = type("Interactive", (), {"__module__": "__main__"})
    main.Interactive = interactive
    monkeypatch.setitem(sys.modules, "__main__", main)
    with pytest.raises(
        DatasetPicklingError, match=r"dataset \(Interactive\).*interactive session.*move it to a module"
    ):
        check_picklable({"dataset": interactive()}, "forkserver")
    main.__file__ = "train.py"
    assert check_picklable({"dataset": interactive()}, "forkserver") > 0


def test_search_ends_at_the_smallest_object_that_fails():
    lock = threading.Lock()
    path, culprit, error = find_unpicklable({"a": [lock]}, "x", TypeError())
    assert (path, culprit) == ("x['a'][0]", lock)
    assert "lock" in str(error)


def test_large_pickles_warn_with_their_size_and_the_number_of_workers():
    with pytest.warns(UserWarning, match="at most 64 MiB.*but is 100 MiB, sent to each of 8 workers"):
        warn_large_pickle(100 * 2**20, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_large_pickle(64 * 2**20, 8)
