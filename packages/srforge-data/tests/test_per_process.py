import multiprocessing
import os
import pickle
from functools import partial

import h5py
import lmdb
import numpy as np
import pytest

from srforge.data import OncePerProcess
from srforge.data.pickling import check_picklable


def open_pairs(path):  # lmdb.open is a class that pickle cannot find by its name
    return lmdb.open(str(path), readonly=True, lock=False)


def test_handle_is_opened_once_in_a_process_and_not_before_it_is_asked_for():
    opened = []
    handle = OncePerProcess(lambda: opened.append(len(opened)) or object())
    assert opened == []
    assert handle() is handle()
    assert opened == [0]


def test_only_the_factory_travels(tmp_path):
    path = tmp_path / "text"
    path.write_text("content")
    handle = OncePerProcess(partial(open, path))
    assert handle().read() == "content"
    travelled = pickle.loads(pickle.dumps(handle))
    assert travelled() is not handle()
    assert travelled().read() == "content"
    handle().close()
    travelled().close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_forked_process_opens_its_own_and_leaves_the_inherited_one_open():
    handle = OncePerProcess(lambda: (os.getpid(), object()))
    in_parent = handle()
    queue = multiprocessing.get_context("fork").SimpleQueue()
    child = multiprocessing.get_context("fork").Process(target=lambda: queue.put((handle()[0], os.getpid())))
    child.start()
    opened_by, child_pid = queue.get()
    child.join()
    assert opened_by == child_pid != in_parent[0]
    assert handle() is in_parent


def test_hdf5_files_and_lmdb_environments_travel_as_factories(tmp_path):
    with h5py.File(tmp_path / "images.h5", "w") as file:
        file["images"] = np.arange(4)
    with lmdb.open(str(tmp_path / "pairs")) as environment, environment.begin(write=True) as transaction:
        transaction.put(b"key", b"value")
    hdf5 = OncePerProcess(partial(h5py.File, tmp_path / "images.h5", "r"))
    pairs = OncePerProcess(partial(open_pairs, tmp_path / "pairs"))
    assert hdf5()["images"][3] == 3
    with pairs().begin() as transaction:
        assert transaction.get(b"key") == b"value"
    assert check_picklable({"dataset": [hdf5, pairs]}, "forkserver") < 2000
    hdf5().close()
    pairs().close()
