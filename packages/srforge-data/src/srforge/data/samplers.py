"""Which sampler a loader gets: the strategy's own, or the user's order, sharded and with the epoch attached."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch.utils.data import DistributedSampler

from srforge.distributed.batch_sharding import ShardedBatchSampler
from srforge.distributed.errors import ConfigurationError
from srforge.distributed.index_streams import announce_epoch
from srforge.distributed.sharding import SampleKey, ShardedSampler
from srforge.distributed.strategy import TrainingStrategy


class EpochKeys(DistributedSampler[Any]):
    """A sampler, or batch sampler, that is sharded already, with the epoch attached to what it yields.

    It is a ``DistributedSampler`` itself, for whoever asks whether a loader is sharded.

    Args:
        sampler: A ``DistributedSampler``, or a batch sampler around one.
    """

    def __init__(self, sampler: Any) -> None:
        inner = sampler if isinstance(sampler, DistributedSampler) else sampler.sampler
        super().__init__(inner.dataset, num_replicas=inner.num_replicas, rank=inner.rank)
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        for item in self.sampler:
            if isinstance(item, Iterable):
                yield [SampleKey(index, self.epoch) for index in item]
            else:
                yield SampleKey(item, self.epoch)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration yields.

        Args:
            epoch: 0-based epoch.
        """
        self.epoch = epoch
        announce_epoch(self.sampler, epoch)


def choose_sampler(
    strategy: TrainingStrategy,
    num_samples: int,
    *,
    batch_size: int | None,
    shuffle: bool,
    seed: int,
    plan: Mapping[str, Any],
    given: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the loader's arguments that decide which samples come, and in what batches.

    Args:
        strategy: The active strategy: says which rank this is.
        num_samples: Length of the data set.
        batch_size: Samples per rank and micro-batch; None: the data set's items are batches.
        shuffle: Draw a new permutation each epoch.
        seed: The run's seed.
        plan: ``training`` (by default ``shuffle``, and True for an order of the user's) and options of ``ShardPlan``.
        given: ``sampler``, ``batch_sampler`` and ``drop_last``, where the user gave them.

    Returns:
        ``sampler`` and ``batch_size``, or ``batch_sampler``; and ``drop_last``.

    Raises:
        ConfigurationError: Arguments contradict each other.
    """
    options = dict(plan)
    training, drop_last = options.pop("training", None), bool(given.get("drop_last", False))
    own = _own_order(given, shuffle=shuffle)
    if own and is_sharded(given[own]):
        return _pass_through(own, given[own], batch_size, options, drop_last=drop_last)
    if training is None:
        training = shuffle or own is not None
    if own == "batch_sampler":
        if drop_last:
            raise ConfigurationError("`drop_last` must be left to `batch_sampler`, but is True. Leave it out.")
        ranks = {"rank": strategy.rank, "world_size": strategy.world_size}
        return {own: ShardedBatchSampler(given[own], training=training, seed=seed, **ranks, **options)}
    if drop_last and training:  # the plan drops the tail of the fleet's epoch, the loader would drop each rank's own
        if options.get("tail", "drop") not in ("drop", "exact"):
            raise ConfigurationError(
                f"`drop_last` must not contradict `tail`, but is True beside tail={options['tail']}. Leave it out."
            )
        options["tail"], drop_last = "drop", False
    if own:
        options["order"] = given[own]
    if batch_size is None:  # items of unknown sizes: no plan can count samples, the ranks stop together instead
        training = False
        options.pop("accumulate", None)
        options.pop("filler", None)
    sharded = strategy.make_sampler(
        num_samples, batch_size=batch_size or 1, shuffle=shuffle, training=training, seed=seed, **options
    )
    return {"sampler": sharded, "batch_size": batch_size, "drop_last": drop_last}


def is_sharded(sampler: Any) -> bool:
    """Return whether a sampler, or the one inside a batch sampler, gives this rank's share already."""
    inner = getattr(sampler, "sampler", None)
    return isinstance(sampler, DistributedSampler | ShardedBatchSampler) or isinstance(inner, DistributedSampler)


def _own_order(given: Mapping[str, Any], *, shuffle: bool) -> str | None:
    """Return which of its arguments the user gave an order with, or None."""
    found = [name for name in ("sampler", "batch_sampler") if given.get(name) is not None]
    if len(found) == 2:
        raise ConfigurationError("`sampler` and `batch_sampler` must not both be given, but are. Keep one of them.")
    if found and shuffle:
        raise ConfigurationError(f"`shuffle` must be False beside `{found[0]}`, which gives the order, but is True.")
    return found[0] if found else None


def _pass_through(
    name: str, sampler: Any, batch_size: int | None, options: Mapping[str, Any], *, drop_last: bool
) -> dict[str, Any]:
    if options:
        raise ConfigurationError(
            f"`{'`, `'.join(options)}` must be left to a `{name}` that is sharded already. Leave it out, or give the "
            "order of the whole fleet."
        )
    attaches_epoch = (ShardedSampler, ShardedBatchSampler)
    if not (isinstance(sampler, attaches_epoch) or isinstance(getattr(sampler, "sampler", None), attaches_epoch)):
        sampler = EpochKeys(sampler)  # around one of ours it would hide the plan
    if name == "batch_sampler":
        return {name: sampler}
    return {name: sampler, "batch_size": batch_size, "drop_last": drop_last}
