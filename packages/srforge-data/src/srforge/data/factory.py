"""``DataLoaderFactory``: a torch ``DataLoader`` whose defaults cannot deadlock and whose randomness is exact.

The parts live apart: defaults in ``policy``, the sampler in ``samplers``, seeds in ``seeded``, what a worker does first
in ``worker``, checks before workers start in ``loader_checks``.
"""

import itertools
import multiprocessing
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from srforge.data.collation import collate_samples
from srforge.data.environment_variables import keep_opencv_threads
from srforge.data.hang import arm_hang_reports
from srforge.data.loader_checks import (
    check_workers,
    require_length,
    require_same_length,
    settings_of,
    warn_changed_settings,
    warn_stored_generators,
)
from srforge.data.policy import start_method_of, worker_policy
from srforge.data.samplers import choose_sampler
from srforge.data.seeded import SeededCollate, SeededDataset
from srforge.data.start_up import start_fork_server
from srforge.data.worker import WorkerStart
from srforge.distributed.active import get_active_strategy
from srforge.distributed.errors import ConfigurationError
from srforge.distributed.iterable_shards import ShardedIterable
from srforge.distributed.seeding import mix, resolve_seed

_PLAN_OPTIONS = ("training", "accumulate", "tail", "repeat", "steps_per_epoch", "filler")
_SAMPLER_OPTIONS = ("sampler", "batch_sampler", "drop_last")
_LOADER_SEED = 0x6C  # keeps the loader's own generator apart from other uses of the seed

_loader_numbers = itertools.count()


class DataLoaderFactory:
    """Makes the ``DataLoader`` of this rank; build it after ``setup_device``.

    Args:
        dataset: Map-style or iterable data set.
        batch_size: Samples per rank and micro-batch; None: the data set's items are batches already.
        shuffle: Draw a new permutation each epoch.
        num_workers: Worker processes of this rank.
        seed: The run's seed, the same on every rank; None: rank 0 draws one.
        device: Where batches go; None: the active strategy's device. Decides about pinned memory only.
        **options: Options of the epoch: ``training`` (by default ``shuffle``; True beside an own order), ``accumulate``,
            ``tail``, ``repeat``, ``steps_per_epoch``, ``filler``, see ``ShardPlan``. For iterable data sets ``by_worker``
            (False: the data set splits itself over workers). And any argument of torch's ``DataLoader``, which beats the
            policy; ``sampler`` and ``batch_sampler`` give the order of the whole fleet and are sharded, unless they are
            sharded already. ``batch_size`` means nothing beside ``batch_sampler``.

    Raises:
        ConfigurationError: An argument has a value that cannot work.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None,
        *,
        shuffle: bool,
        num_workers: int = 0,
        seed: int | None = None,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> None:
        if isinstance(num_workers, bool) or not isinstance(num_workers, int) or num_workers < 0:
            raise ConfigurationError(f"`num_workers` must be an integer >= 0, but is {num_workers!r}. Use 0 for none.")
        self.dataset = dataset
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.num_workers = num_workers
        self.seed = seed
        self.device = device
        self.options = options

    def get_loader(self) -> "DataLoader[Any]":
        """Return a new loader.

        Raises:
            ConfigurationError: Arguments contradict each other.
            DatasetPicklingError: Workers are asked for, and the data set cannot be sent to them.

        Collective: every rank must call when no seed was given.
        """
        strategy = get_active_strategy()
        seed = resolve_seed(self.seed, strategy)
        options = dict(self.options)
        plan = {name: options.pop(name) for name in _PLAN_OPTIONS if name in options}
        given = {name: options.pop(name) for name in _SAMPLER_OPTIONS if name in options}
        by_worker = options.pop("by_worker", None)
        warn_stored_generators(self.dataset)
        device = strategy.device if self.device is None else torch.device(self.device)
        arguments = worker_policy(
            num_workers=self.num_workers,
            device_type=device.type,
            start_methods=multiprocessing.get_all_start_methods(),
            given=options,
        )
        dataset: Any
        length: int | None = None
        if isinstance(self.dataset, IterableDataset):
            self._refuse_for_iterables(plan, given)
            dataset = self.dataset
            if not isinstance(dataset, ShardedIterable):
                dataset = ShardedIterable(
                    dataset, seed=seed, by_worker=by_worker, rank=strategy.rank, world_size=strategy.world_size
                )
            arguments |= {"batch_size": self.batch_size, "drop_last": given.get("drop_last", False)}
        else:
            has_order = given.get("sampler") is not None or given.get("batch_sampler") is not None
            length = require_length(self.dataset, has_order=has_order)
            dataset = SeededDataset(self.dataset, seed, rank=strategy.rank)
            arguments |= choose_sampler(
                strategy,
                length or 0,  # an own order needs no length
                batch_size=self.batch_size,
                shuffle=self.shuffle,
                seed=seed,
                plan=plan,
                given=given,
            )
            if arguments.get("collate_fn") is not None:
                arguments["collate_fn"] = SeededCollate(arguments["collate_fn"], dataset)
        if arguments.get("collate_fn") is None and _makes_batches(arguments):
            arguments["collate_fn"] = collate_samples
        if arguments.get("generator") is None:  # torch would draw the workers' base seed from the global one
            arguments["generator"] = torch.Generator().manual_seed(mix(seed, _LOADER_SEED, strategy.rank) >> 1)
        if self.num_workers:
            self._prepare_workers(arguments)
        return CheckedDataLoader(dataset, user_dataset=self.dataset, length=length, **arguments)

    def _prepare_workers(self, arguments: dict[str, Any]) -> None:
        """Check that the data set can travel, start the fork server, and put our start before the user's own."""
        user_init = arguments.get("worker_init_fn")
        travelling = {"dataset": self.dataset, "collate_fn": arguments.get("collate_fn"), "worker_init_fn": user_init}
        start_method = start_method_of(arguments)
        check_workers(
            travelling,
            start_method,
            num_workers=self.num_workers,
            prefetch_factor=arguments.get("prefetch_factor") or 2,
        )
        arguments["worker_init_fn"] = WorkerStart(
            loader=next(_loader_numbers),
            keep_opencv_threads=keep_opencv_threads(),
            hang=arm_hang_reports(),
            then=user_init,
        )
        if start_method == "forkserver":
            start_fork_server()

    def _refuse_for_iterables(self, plan: dict[str, Any], given: dict[str, Any]) -> None:
        wrong = [name for name in (*plan, *given) if name not in ("training", "drop_last")]
        if self.shuffle:
            wrong.insert(0, "shuffle")
        if wrong:
            raise ConfigurationError(
                f"`{wrong[0]}` must be left out for an iterable data set, which has no indices. Remove it."
            )


def _makes_batches(arguments: dict[str, Any]) -> bool:
    """Whether a loader of these arguments collates samples, rather than passing on what its data set makes."""
    return arguments.get("batch_size", 1) is not None or arguments.get("batch_sampler") is not None


class CheckedDataLoader(DataLoader[Any]):
    """A ``DataLoader`` that tells when the data set was changed where its sampler or its living workers cannot see it.

    Args:
        dataset: The wrapped data set.
        user_dataset: The data set that the user may change.
        length: Its number of samples, for which the sampler was made; None: a sampler of the user's needs none.
        **arguments: Of ``torch.utils.data.DataLoader``.
    """

    def __init__(self, dataset: Any, *, user_dataset: Any, length: int | None = None, **arguments: Any) -> None:
        super().__init__(dataset, **arguments)
        self._user_dataset = user_dataset
        self._length = length
        self._settings: dict[str, Any] = {}

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override] # torch's own type is a private class
        require_same_length(self._user_dataset, self._length)
        if self.num_workers:
            now = settings_of(self._user_dataset)
            if self._iterator is not None:
                warn_changed_settings(self._settings, now)
            self._settings = now
        return super().__iter__()
