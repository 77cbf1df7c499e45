"""What is checked before workers start, and what is warned about: each once, in words that say what to do."""

import multiprocessing.process
import sys
import threading
import warnings
from collections.abc import Mapping, Sized
from pathlib import Path
from typing import Any

import torch

from srforge.data.attributes import find_generators
from srforge.data.environment_variables import ranks_on_this_machine
from srforge.data.pickling import check_picklable, warn_large_pickle
from srforge.data.resources import read_limits, resource_warnings
from srforge.data.seeded import inner_datasets
from srforge.distributed.active import get_active_strategy
from srforge.distributed.errors import ConfigurationError

_SETTING_TYPES = (bool, int, float, str, bytes, type(None))


def check_workers(travelling: Mapping[str, Any], start_method: str, *, num_workers: int, prefetch_factor: int) -> None:
    """Check that what must travel to the workers can, and that the machine can carry them.

    Args:
        travelling: Data set and functions under the names that the user gave them.
        start_method: How workers are started.
        num_workers: Workers of the loader, > 0.
        prefetch_factor: Batches that each makes ahead.

    Raises:
        DatasetPicklingError: Something cannot be sent to the workers.
        ConfigurationError: Workers would not find the main script.
    """
    size = 0
    if start_method == "fork":
        warn_unsafe_fork()
    else:
        require_main_script(num_workers)
        size = check_picklable(travelling, start_method)
        warn_large_pickle(size, num_workers)
    if get_active_strategy().topology.local_rank != 0:
        return  # the machine's first rank speaks for all of its ranks
    for message in resource_warnings(
        read_limits(),
        num_workers=num_workers,
        prefetch_factor=prefetch_factor,
        pickle_bytes=size,
        local_world_size=ranks_on_this_machine(),
    ):
        warnings.warn(message, stacklevel=4)


def require_length(dataset: Any, *, has_order: bool) -> int | None:
    """Return how many samples a map-style data set has; what torch would iterate as if it were empty is refused.

    Args:
        dataset: The user's data set.
        has_order: Whether the user gave a ``sampler`` or ``batch_sampler``, which needs no length.

    Returns:
        Its length, or None where an order of the user's decides.

    Raises:
        ConfigurationError: Samples cannot be asked for by index, or nobody says how many there are.
    """
    kind = type(dataset)
    if not (hasattr(kind, "__getitem__") or hasattr(kind, "__getitems__")):
        raise ConfigurationError(
            f"`dataset` must give samples by index (__getitem__) or be a torch IterableDataset, but is a {kind.__name__}. "
            "Wrap it in one of the two."
        )
    if has_order:
        return None
    if not isinstance(dataset, Sized):
        raise ConfigurationError(
            f"`dataset` must have a length, but {kind.__name__} has no __len__. Add it, or pass the order as `sampler`."
        )
    return len(dataset)


def require_same_length(dataset: Any, length: int | None) -> None:
    """Refuse a data set whose length changed after its loader was made: the order of the samples was planned for it.

    Args:
        dataset: The user's data set.
        length: What ``require_length`` returned.

    Raises:
        ConfigurationError: It has more or fewer samples now.
    """
    if length is not None and len(dataset) != length:
        raise ConfigurationError(
            f"`dataset` must keep its length, but has {len(dataset)} samples now and had {length} when its loader was "
            "made. Make a new loader."
        )


def require_main_script(num_workers: int) -> None:
    """Refuse workers that would end before their first line: each imports the main script, and it is no file.

    Such are programs that python reads from stdin. One without any ``__file__`` (``python -c``, a notebook) starts
    workers; ``check_picklable`` refuses what they could not find in it.

    Args:
        num_workers: Workers of the loader; for the message only.

    Raises:
        ConfigurationError: The main script does not exist.
    """
    main = sys.modules["__main__"]
    script = getattr(main, "__file__", None)
    if script is None or getattr(main, "__spec__", None) is not None:
        return
    started_in = getattr(multiprocessing.process, "ORIGINAL_DIR", None) or ""  # where workers look for a relative path
    if not Path(started_in, script).exists():
        raise ConfigurationError(
            f"`num_workers` must be 0 where workers cannot import the main script, but is {num_workers}, and {script} "
            'is no file. Save the program to a file, or pass multiprocessing_context="fork".'
        )


def warn_unsafe_fork() -> None:
    """Warn when forked workers would inherit locks of threads that do not exist in them."""
    reasons = []
    names = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if names:
        reasons.append(f"threads run here ({', '.join(sorted(names))})")
    cv2 = sys.modules.get("cv2")
    if cv2 is not None and cv2.getNumThreads() > 1:
        reasons.append(f"OpenCV may use {cv2.getNumThreads()} threads here")
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        reasons.append("CUDA is in use here")
    if reasons:
        warnings.warn(
            f'`multiprocessing_context` must be safe to start workers from this process, but is "fork" and '
            f"{'; '.join(reasons)}: a worker can wait for ever for a lock that was held. Leave it out (forkserver).",
            stacklevel=5,
        )


def warn_stored_generators(dataset: Any) -> None:
    """Warn about random generators that are stored in the data set: they repeat in each worker and each epoch.

    Args:
        dataset: The user's data set.
    """
    for path, generator in find_generators(dataset, "dataset"):
        warnings.warn(
            f"{path} ({type(generator).__name__}) must not be stored in a data set, since it is the same in every "
            "worker and begins anew when a run is resumed. Draw from random, numpy.random or torch in __getitem__: they "
            "are seeded for each sample.",
            stacklevel=3,
        )


def settings_of(dataset: Any, name: str = "dataset") -> dict[str, Any]:
    """Return the plain values among the attributes of a data set and of those inside it.

    A data set with ``set_epoch`` is left out: it has the way that reaches workers.

    Args:
        dataset: The user's data set.
        name: What to call it.

    Returns:
        Attribute path to value.
    """
    if callable(getattr(dataset, "set_epoch", None)):
        return {}
    held = getattr(dataset, "__dict__", {})
    found = {f"{name}.{key}": value for key, value in held.items() if isinstance(value, _SETTING_TYPES)}
    for suffix, inner in inner_datasets(dataset):
        found |= settings_of(inner, name + suffix)
    return found


def warn_changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Warn about attributes that were set after the workers had started.

    Args:
        before: Settings that the living workers got.
        now: Settings of the data set in this process.
    """
    # identity first: NaN is unlike itself
    changed = [
        path
        for path, value in now.items()
        if path not in before or not (before[path] is value or before[path] == value)
    ]
    if changed:
        warnings.warn(
            f"{', '.join(changed)} must be set before workers start, but was changed afterwards: living workers do not "
            "see it. Give the data set a set_epoch(epoch) that sets it, or pass persistent_workers=False.",
            stacklevel=3,
        )
