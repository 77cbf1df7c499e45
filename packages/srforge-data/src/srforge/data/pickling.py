"""The test pickle before workers start, which names the attribute that cannot travel, and its size.

Every start method but fork pickles the data set for each worker; the interpreter's own errors name a type, never the
attribute. ``attributes.py`` knows what an object holds.
"""

import io
import sys
import types
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import context
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import torch
import torch.multiprocessing
from torch.multiprocessing.reductions import StorageWeakRef

from srforge.data.attributes import pickled_children
from srforge.distributed.errors import SRForgeError

LARGE_PICKLE_BYTES = 64 * 2**20
_PLAIN = (str, bytes, int, float, bool, type(None))  # a list may hold a million paths
_MOST_STORAGES = 240  # a fork server takes 256 open files with a request, some of them for itself


class DatasetPicklingError(SRForgeError):
    """The data set, or a function given to the loader, holds something that cannot be sent to worker processes."""


def check_picklable(objects: Mapping[str, Any], start_method: str) -> int:
    """Pickle each object as a worker's start would, keeping nothing.

    Args:
        objects: What travels to the workers, under the name that the user gave it: ``dataset``, ``collate_fn``.
        start_method: ``forkserver`` or ``spawn``.

    Returns:
        Size of the pickles in bytes; tensors, which travel through shared memory, are not counted.

    Raises:
        DatasetPicklingError: One cannot be pickled; the message names the attribute path, its type and the cures.
    """
    size = 0
    for name, value in objects.items():
        try:
            pickled = _pickle(value)
        except Exception as error:
            path, culprit, reason = find_unpicklable(value, name, error)
            raise DatasetPicklingError(
                f"{path} ({_describe(culprit)}) cannot be pickled for {start_method} workers. {_cure(culprit)}, "
                f'or pass multiprocessing_context="fork" or num_workers=0. ({type(reason).__name__}: {reason})'
            ) from error
        size += pickled.size
        if start_method == "forkserver" and pickled.num_storages > _MOST_STORAGES and _share_by_descriptor():
            raise DatasetPicklingError(
                f"{name} must hold at most {_MOST_STORAGES} tensors for forkserver workers, each an open file that is sent "
                f"to them, but holds {pickled.num_storages}. Stack them into one tensor, or keep them as NumPy arrays."
            )
    return size


def warn_large_pickle(size: int, num_workers: int) -> None:
    """Warn when every worker gets a large copy of the data set.

    Args:
        size: Size of the pickle in bytes.
        num_workers: Number of workers that get one.
    """
    if size > LARGE_PICKLE_BYTES:
        warnings.warn(
            f"dataset must be small to pickle (at most {LARGE_PICKLE_BYTES / 2**20:.0f} MiB), but is "
            f"{size / 2**20:.0f} MiB, sent to each of {num_workers} workers. Keep paths and open the data in "
            "__getitem__ (numpy.load with mmap_mode, OncePerProcess), or keep it as tensors, which workers share.",
            stacklevel=5,
        )


def find_unpicklable(root: Any, name: str, error: Exception) -> tuple[str, Any, Exception]:
    """Follow a pickling failure down to the smallest object that fails by itself.

    Args:
        root: An object that cannot be pickled.
        name: What to call it.
        error: How its pickling failed.

    Returns:
        Path of the culprit from ``name``, the culprit, and how its own pickling fails.
    """
    path, culprit = name, root
    visited = [root]  # keeps temporary objects alive: their ids must not be used again
    while True:
        for suffix, child in pickled_children(culprit):
            if isinstance(child, _PLAIN) or any(child is seen for seen in visited):
                continue
            failure = _failure(child)
            if failure is not None:
                path, culprit, error = path + suffix, child, failure
                visited.append(child)
                break
        else:
            return path, culprit, error


class _CountingSink(io.RawIOBase):
    """Counts what is written: a large data set must not be held twice."""

    size = 0

    def write(self, data: Any) -> int:
        length = memoryview(data).nbytes
        self.size += length
        return length


class _DryRun:
    """Stands for a process that is being started: locks and shared memory may be pickled only for one."""

    def duplicate_for_child(self, descriptor: int) -> int:
        return descriptor

    def DupFd(self, descriptor: int) -> int:  # noqa: N802 - multiprocessing's name
        return descriptor


class _DryPickler(ForkingPickler):
    def __init__(self, sink: _CountingSink) -> None:
        super().__init__(sink)
        self.storages: dict[int, StorageWeakRef] = {}

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and _travels_shared(obj):
            storage = obj.untyped_storage()
            self.storages[storage.data_ptr()] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            return int, ()  # moving it to shared memory is left to the real start
        if isinstance(obj, type | types.FunctionType) and obj.__module__ == "__main__":
            _refuse_interactive(obj)
        return NotImplemented


def _travels_shared(tensor: torch.Tensor) -> bool:
    return (
        tensor.device.type == "cpu" and tensor.layout == torch.strided and (tensor.is_leaf or not tensor.requires_grad)
    )


def _refuse_interactive(obj: Any) -> None:
    """Refuse what workers could not find: they import the main script, and a notebook or ``python -c`` has none."""
    main = sys.modules["__main__"]
    if getattr(main, "__spec__", None) is None and not hasattr(main, "__file__"):
        raise AttributeError(
            f"{obj.__qualname__} is defined in an interactive session, which workers cannot import: move it to a module"
        )


class _Pickled(NamedTuple):
    size: int
    num_storages: int


def _pickle(value: Any) -> _Pickled:
    sink = _CountingSink()
    pickler = _DryPickler(sink)
    with _as_if_starting():
        pickler.dump(value)
    storages = list(pickler.storages.values())
    del pickler  # it kept what was made while pickling
    if any(storage.expired() for storage in storages):  # type: ignore[no-untyped-call]
        raise TypeError("it makes a tensor while it is pickled, which is gone when the worker opens it")
    return _Pickled(sink.size, len(storages))


def _share_by_descriptor() -> bool:
    return bool(torch.multiprocessing.get_sharing_strategy() == "file_descriptor")  # type: ignore[no-untyped-call]


def _failure(value: Any) -> Exception | None:
    try:
        _pickle(value)
    except Exception as error:  # noqa: BLE001 - whatever __reduce__ and __getstate__ raise is a failure to pickle
        return error
    return None


@contextmanager
def _as_if_starting() -> Iterator[None]:
    before = context.get_spawning_popen()
    context.set_spawning_popen(_DryRun())  # type: ignore[arg-type] # a stand-in
    try:
        yield
    finally:
        context.set_spawning_popen(before)


def _describe(culprit: Any) -> str:
    if isinstance(culprit, types.FunctionType):
        return f"function {culprit.__qualname__}"
    if isinstance(culprit, type):
        return f"class {culprit.__qualname__}"
    return type(culprit).__qualname__


def _cure(culprit: Any) -> str:
    named = culprit if isinstance(culprit, type | types.FunctionType) else type(culprit)
    if "<locals>" in named.__qualname__ or "<lambda>" in named.__qualname__:
        return "Define it at the top level of a module (a function, a class, functools.partial of one)"
    if isinstance(culprit, type | types.FunctionType | types.BuiltinFunctionType):
        return "Call it in a function of your own at the top level of a module, and give that"
    if isinstance(culprit, torch.Generator):
        return "Draw from torch's global generator in __getitem__, which is seeded for each sample"
    if isinstance(culprit, types.GeneratorType):
        return "Make the iterator in __getitem__ or __iter__"
    if isinstance(culprit, types.ModuleType):
        return "Import the module where it is used"
    return "Open it in __getitem__, keep it in srforge.data.OncePerProcess"
