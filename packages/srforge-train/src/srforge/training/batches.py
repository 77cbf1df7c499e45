"""From a loader to micro-batches: each with its place in the optimizer step and the exact scale of its loss."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from srforge.distributed import ConfigurationError, MetricSum, TrainingStrategy, plan_of, stop_together

# Integer images leave workers as they were stored; the full range of their type stands for [0, 1].
_IMAGE_RANGES = {torch.uint8: 255.0, torch.uint16: 65535.0}


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward and backward pass.

    Attributes:
        index: Position in the epoch, 0-based.
        data: The batch as the loader gave it.
        ends_window: An optimizer step follows this micro-batch.
        loss_scale: Factor of the micro-batch's mean loss that makes the window's gradient the exact mean over the real
            samples of all ranks, once ranks are averaged and micro-batches summed.
        count: Real samples of this rank in the micro-batch; 0 if it only repeats samples of another rank.
    """

    index: int
    data: Any
    ends_window: bool
    loss_scale: float
    count: int


def micro_batches(
    loader: Iterable[Any], strategy: TrainingStrategy, accumulate: int = 1, max_windows: int | None = None
) -> Iterator[MicroBatch]:
    """Yield the micro-batches of one epoch of this rank.

    A loader with a plan says exactly which samples each optimizer step has over the fleet. One without (an iterable
    data set) is read one window of ``accumulate`` batches ahead, so that a short last window is scaled right too; all
    ranks stop with the first one that has no window left.

    Args:
        loader: Yields this rank's batches.
        strategy: The active one.
        accumulate: Micro-batches a window of a loader without a plan.
        max_windows: Stop after so many windows; None: at the end of the loader.

    Raises:
        ConfigurationError: The loader yields nothing, or less than its plan says.

    Collective: every rank must iterate it, if the loader has no plan.
    """
    num_windows = 0
    for micro in (
        _unplanned(loader, strategy, accumulate) if plan_of(loader) is None else _planned(loader, strategy.rank)
    ):
        if num_windows == max_windows:
            return
        yield micro
        num_windows += micro.ends_window
    if num_windows == 0 and max_windows != 0:
        raise ConfigurationError(
            "The training loader must yield a batch in every epoch, but has none: a rank's share of a stream is empty, or "
            "a generator or an iterator was given, which can be run through only once. Give more shards than ranks and "
            "workers, and a list, a DataLoader, or an object whose __iter__ begins anew."
        )


def _planned(loader: Iterable[Any], rank: int) -> Iterator[MicroBatch]:
    plan = plan_of(loader)
    assert plan is not None
    for index, data in enumerate(loader):
        count = plan.local_count(index, rank)
        sizes = [leaf.shape[0] for leaf in _tensors(data) if leaf.ndim > 0][:1]
        if sizes and sizes[0] < count:
            raise ConfigurationError(
                f"Batch {index} must hold the {count} samples that the plan gives it, but holds {sizes[0]}: its collate_fn "
                "left some out, and means would be wrong. Leave bad samples out of the data set, or replace them there."
            )
        yield MicroBatch(index, data, plan.ends_window(index), plan.loss_scale(index, rank), count)


def _unplanned(loader: Iterable[Any], strategy: TrainingStrategy, accumulate: int) -> Iterator[MicroBatch]:
    for start, window in stop_together(_windows(loader, accumulate), strategy):
        for offset, data in enumerate(window):
            is_last = offset == len(window) - 1
            yield MicroBatch(start + offset, data, is_last, 1.0 / len(window), num_samples_of(data))


def _windows(loader: Iterable[Any], accumulate: int) -> Iterator[tuple[int, list[Any]]]:
    iterator, start = iter(loader), 0
    while window := list(itertools.islice(iterator, accumulate)):
        yield start, window
        start += len(window)


def inputs_of(batch: Any, keys: Sequence[Any]) -> list[Any]:
    """Return the entries of a batch that the model is called with.

    Raises:
        ConfigurationError: The batch has no such entry, or is no mapping.
    """
    try:
        return [batch[key] for key in keys]
    except (KeyError, IndexError, TypeError) as error:
        found = f"has {sorted(map(str, batch))}" if isinstance(batch, Mapping) else f"is a {type(batch).__name__}"
        raise ConfigurationError(
            f"`inputs` (of an adversarial term: `real`) must name entries of the batch, but is {tuple(keys)}, and the batch "
            f"{found}. Set RunnerOptions(inputs=...) or AdversarialTerm(real=...), return mappings from the data set, or "
            "override `forward_batch`."
        ) from error


def num_samples_of(batch: Any) -> int:
    """Return the length of the first dimension of the first tensor in a batch.

    Raises:
        ConfigurationError: The batch holds no tensor with a dimension.
    """
    for leaf in _tensors(batch):
        if leaf.ndim > 0:
            return int(leaf.shape[0])
    raise ConfigurationError(f"A batch must hold at least one tensor of shape (N, ...), but is {type(batch).__name__}.")


def skipped_samples(loader: Any) -> dict[str, MetricSum]:
    """Return how many samples the loader's data sets replaced since the last call, as a sum over the fleet.

    Empty if none of them counts (a data set that does has ``take_skipped() -> list``).
    """
    waiting, lists = [getattr(loader, "dataset", None)], []
    while waiting:
        dataset = waiting.pop()
        if callable(take := getattr(dataset, "take_skipped", None)):
            lists.append(take())
        elif dataset is not None:
            waiting += [getattr(dataset, "dataset", None), *getattr(dataset, "datasets", ())]
    return {"skipped_samples": MetricSum(sum(map(len, lists)), 1, "sum")} if lists else {}


def to_device(batch: Any, device: torch.device, *, channels_last: bool = False) -> Any:
    """Copy a batch to the device without waiting; integer images become float32 in [0, 1] there.

    Args:
        batch: A tensor, or nested mappings, lists and tuples of tensors and other values (kept as they are).
        device: Where to.
        channels_last: Give 4-D float tensors the channels-last memory format.
    """
    if isinstance(batch, Tensor):
        moved = batch.to(device, non_blocking=True)
        if moved.dtype in _IMAGE_RANGES:
            moved = moved.to(torch.float32) / _IMAGE_RANGES[moved.dtype]
        if channels_last and moved.ndim == 4 and moved.is_floating_point():
            moved = moved.contiguous(memory_format=torch.channels_last)
        return moved
    if isinstance(batch, Mapping):
        return {key: to_device(value, device, channels_last=channels_last) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        moved_items = [to_device(value, device, channels_last=channels_last) for value in batch]
        return type(batch)(*moved_items) if hasattr(batch, "_fields") else type(batch)(moved_items)
    return batch


class FirstBatchKept:
    """An iterable loader whose first batch can be looked at; the next pass yields it again, once.

    A stream cannot be asked for its first samples by key, and reading them may use them up.

    Args:
        loader: The loader to stand for.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._started: Iterator[Any] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def peek(self) -> Any:
        """Return the first batch of the next pass, or None if there is none."""
        iterator = iter(self)
        first = list(itertools.islice(iterator, 1))
        self._started = itertools.chain(first, iterator)
        return first[0] if first else None

    def __iter__(self) -> Iterator[Any]:
        iterator, self._started = self._started or iter(self._loader), None
        return iterator


def refuse_unsharded(loader: Any, strategy: TrainingStrategy) -> None:
    """Refuse a training loader that would give every rank the same samples.

    Raises:
        ConfigurationError: There are several ranks, and a map-style loader has neither a plan nor a distributed sampler.
    """
    if strategy.world_size == 1 or plan_of(loader) is not None or not isinstance(loader, DataLoader):
        return
    samplers = (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    is_shared = any(isinstance(sampler, DistributedSampler) for sampler in samplers)
    if not isinstance(loader.dataset, IterableDataset) and not is_shared:
        raise ConfigurationError(
            f"The training loader must give each of the {strategy.world_size} ranks its own share, but its sampler is "
            f"{type(loader.sampler).__name__}, which gives all of them the same. Build it with DataLoaderFactory."
        )


def first_batch(loader: Any) -> Any:
    """Return the first batch that this rank will see, without starting workers; None if it will see none.

    Of a map-style loader it is collated here from the first keys of the rank's shard, so no sample is used up. An
    iterable one must be wrapped in ``FirstBatchKept``; any other iterable is simply started once.
    """
    if isinstance(loader, FirstBatchKept):
        return loader.peek()
    dataset = getattr(loader, "dataset", None)
    if dataset is None or isinstance(dataset, IterableDataset):
        return next(iter(loader), None)
    if loader.batch_sampler is not None:
        keys = next(iter(loader.batch_sampler), None)
        return None if not keys else loader.collate_fn([dataset[key] for key in keys])
    key = next(iter(loader.sampler), None)
    return None if key is None else loader.collate_fn(dataset[key])


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from _tensors(value)
