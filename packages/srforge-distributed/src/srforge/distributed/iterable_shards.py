"""Iterable data sets on several ranks and workers: who takes which element, and when all ranks stop.

They have no length, so there is no plan: each batch counts the same (scale 1), and an epoch ends for all ranks when it
ends for the first of them.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from srforge.distributed.errors import CollectiveError, ConfigurationError
from srforge.distributed.seeding import capture_rng, mix, preserved_rng, seed_generators
from srforge.distributed.sharding import resolve_rank

_logger = logging.getLogger(__name__)
_Batch = TypeVar("_Batch")
_ELEMENTS = 0x69  # keeps the seeds of iterable data sets apart from other uses of the seed
_FAILED, _ENDED, _GOES_ON = -1, 0, 1


class _Gathering(Protocol):
    """What ``stop_together`` needs of a training strategy."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def is_main(self) -> bool: ...

    device: torch.device

    def all_gather(self, tensor: Tensor) -> Tensor: ...


class ShardedIterable(IterableDataset[Any]):
    """The elements of an iterable data set that one worker of one rank takes.

    Element i goes to rank ``i % world_size``, and there to worker ``(i // world_size) % num_workers``. Every worker
    iterates the whole data set and drops what is not its own; where making an element is costly, give the data set
    ``set_shard(index, num_shards)``, and it is trusted to yield only that shard. Each epoch is iterated under a seed
    made of (seed, epoch), the same everywhere (with ``set_shard``: and the shard), without moving the generators of the
    process that trains.

    Args:
        dataset: The iterable data set.
        seed: The run's seed, the same on every rank.
        by_worker: Split over a rank's workers too; False where the data set does that itself. None: split, and refuse a
            data set that asks torch for the number of workers, since split twice most of it would be lost.
        rank: This process's rank; None: that of the process group, or of the launcher's environment.
        world_size: Number of ranks; None as for ``rank``.

    Raises:
        ConfigurationError: An argument is out of its range, or the data set is not iterable.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        *,
        seed: int,
        by_worker: bool | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        if not isinstance(dataset, Iterable):
            raise ConfigurationError(
                f"`dataset` must be iterable, but {type(dataset).__name__} has no `__iter__`. "
                "Use a ShardedSampler for a data set with `__getitem__`."
            )
        self.dataset = dataset
        self.seed = seed
        self.by_worker = by_worker
        self.rank, self.world_size = resolve_rank(rank, world_size)
        # shared memory: the only way for a new epoch to reach workers that live on
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    @property
    def epoch(self) -> int:
        """The 0-based epoch, as last set in the process that made the loader."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration yields, in living workers too.

        Args:
            epoch: 0-based epoch.
        """
        self._epoch.fill_(epoch)

    def __iter__(self) -> Iterator[Any]:
        worker: Any = get_worker_info()
        if isinstance(worker, _WatchedWorkerInfo):  # a living worker's next epoch
            worker = worker.watched
        splits = worker is not None and self.by_worker is not False
        number, num_workers = (worker.id, worker.num_workers) if splits else (0, 1)
        shard, num_shards = number * self.world_size + self.rank, num_workers * self.world_size
        _announce_epoch(self.dataset, self.epoch)
        seed = mix(self.seed, _ELEMENTS, self.epoch)
        elements = self.dataset
        set_shard: Callable[[int, int], None] | None = getattr(self.dataset, "set_shard", None)
        if set_shard is not None:
            set_shard(shard, num_shards)
            seed = mix(seed, shard)
            shard, num_shards = 0, 1
        elif num_workers > 1 and self.by_worker is None:
            torch_worker._worker_info = _WatchedWorkerInfo(worker, type(self.dataset).__name__)  # type: ignore[assignment] # noqa: SLF001 - what get_worker_info returns
        if worker is not None:  # a worker's generators serve nothing but its data set
            seed_generators(seed)
            return islice(elements, shard, None, num_shards)
        return _draw_apart(lambda: islice(elements, shard, None, num_shards), seed)


def _announce_epoch(dataset: Any, epoch: int) -> None:
    """Call ``set_epoch`` on a data set, or on those inside a wrapper (``dataset``) or a chain (``datasets``)."""
    set_epoch = getattr(dataset, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)
        return
    several = getattr(dataset, "datasets", None)
    for inner in (getattr(dataset, "dataset", None), *(several if isinstance(several, list | tuple) else ())):
        if inner is not None and inner is not dataset:
            _announce_epoch(inner, epoch)


class _WatchedWorkerInfo:
    """Torch's facts about this worker, for a data set that must not split itself over workers.

    Args:
        watched: The facts.
        dataset_name: Type of the data set, for the message.
    """

    def __init__(self, watched: Any, dataset_name: str) -> None:
        self.watched = watched
        self._dataset_name = dataset_name

    def __getattr__(self, name: str) -> Any:
        if name == "num_workers":
            raise ConfigurationError(
                f"`by_worker` must be False for a data set that splits itself over workers, but is not set, and "
                f"{self._dataset_name} asks for the number of workers: split twice, most elements would be lost. Give "
                "by_worker=False, or by_worker=True if it asks for another reason."
            )
        return getattr(self.watched, name)


def stop_together(batches: Iterable[_Batch], strategy: _Gathering) -> Iterator[_Batch]:
    """Yield this rank's batches until the first rank has none left; batches that others still have are not used.

    One small gather per batch, started a batch ahead: it also keeps the device fed, since reading its result waits for
    no step that was launched after it.

    Args:
        batches: This rank's batches, of any number; each rank may have another number.
        strategy: The active training strategy.

    Yields:
        The batches: equally many on every rank.

    Raises:
        CollectiveError: Another rank failed to make its next batch; that rank raises its own error.

    Collective: every rank must iterate it, and leave it after the same number of batches.
    """
    if strategy.world_size == 1:
        yield from batches
        return
    iterator = iter(batches)
    batch, votes = _fetch_and_vote(iterator, strategy)
    count = 0
    while True:
        answers = votes.flatten().tolist()
        if _FAILED in answers:
            failed = [rank for rank, answer in enumerate(answers) if answer == _FAILED]
            raise CollectiveError(
                f"Making batch {count} must work on every rank, but failed on {failed}. See its error."
            )
        if _ENDED in answers:
            ended = [rank for rank, answer in enumerate(answers) if answer == _ENDED]
            if strategy.is_main and len(ended) < strategy.world_size:
                _logger.warning("Ranks %s had no batch after the first %d: every rank stops there.", ended, count)
            return
        current = batch
        batch, votes = _fetch_and_vote(iterator, strategy)
        yield current[0]
        count += 1


def _fetch_and_vote(iterator: Iterator[_Batch], strategy: _Gathering) -> tuple[list[_Batch], Tensor]:
    """Return the next batch in a list (empty at the end), and what every rank has to say about its own."""
    try:
        batch = list(islice(iterator, 1))
    except BaseException:
        strategy.all_gather(torch.tensor([_FAILED], device=strategy.device))
        raise
    vote = torch.tensor([_GOES_ON if batch else _ENDED], device=strategy.device)
    return batch, strategy.all_gather(vote)


def _draw_apart(make_elements: Callable[[], Iterator[Any]], seed: int) -> Iterator[Any]:
    """Iterate elements under generators of their own, swapped in for each element, since others draw in between."""
    with preserved_rng():
        seed_generators(seed)
        elements = make_elements()
        swap_in = capture_rng()
    while True:
        with preserved_rng():
            swap_in()
            found = list(islice(elements, 1))
            swap_in = capture_rng()
        if not found:
            return
        yield found[0]
