"""The sampler that gives each rank its share of an epoch, and the keys that it yields.

How an epoch is cut lives in ``shard_plan``, which sample stands where in ``index_streams``, whole batches of a user's
own batch sampler in ``batch_sharding``, data sets without a length in ``iterable_shards``.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from difflib import get_close_matches
from itertools import repeat
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DistributedSampler

from srforge.distributed.errors import ConfigurationError
from srforge.distributed.index_streams import (
    IndexStream,
    OrderStream,
    SequentialStream,
    ShuffledStream,
    WeightedStream,
)
from srforge.distributed.shard_plan import ShardPlan, check_positive, even_share
from srforge.distributed.topology import Topology

# options of ``ShardPlan`` that a sampler passes on, with the values that change nothing
_PLAN_OPTIONS = {"accumulate": 1, "tail": "exact", "repeat": 1, "steps_per_epoch": None, "filler": 1}
_FIRST_BLOCK, _LARGEST_BLOCK = 512, 32768  # indices made at a time: the first batch soon, later ones cheaply


class SampleKey(int):
    """The index of a sample that also says in which epoch it is asked for.

    Attributes:
        epoch: 0-based epoch.
        draw: Tells apart the times that a sample comes within one epoch; 0 where it comes once.
    """

    epoch: int
    draw: int = 0

    def __new__(cls, index: int, epoch: int = 0, draw: int = 0) -> "SampleKey":  # noqa: PYI034 - `Self` needs python 3.11
        """Make a key of an index, an epoch and a draw."""
        key = super().__new__(cls, index)
        key.epoch = epoch
        if draw:  # most samples come once: they share the class's 0
            key.draw = draw
        return key

    def __reduce__(self) -> tuple[type["SampleKey"], tuple[int, int, int]]:
        return SampleKey, (int(self), self.epoch, self.draw)


class ShardedSampler(DistributedSampler[SampleKey]):
    """One rank's share of each epoch, made of nothing but (seed, epoch, rank), in constant memory.

    In training the fleet's samples are exactly the epoch's stream, as ``ShardPlan`` cuts it; use it with a plain
    ``DataLoader(dataset, batch_size=batch_size, sampler=sampler)``. In evaluation each rank takes a contiguous part of
    the data set, unpadded: every sample once over the fleet, possibly none on some ranks.

    Args:
        dataset: The data set, or its length.
        batch_size: Samples per rank and micro-batch.
        shuffle: Draw a new permutation each epoch.
        training: Cut the stream into equal numbers of micro-batches per rank; otherwise into unpadded shards.
        seed: The run's seed, the same on every rank.
        rank: This process's rank; None: that of the process group, or of the launcher's environment.
        world_size: Number of ranks; None as for ``rank``.
        **options: ``accumulate``, ``tail``, ``repeat``, ``steps_per_epoch`` and ``filler`` of ``ShardPlan``; ``order``,
            a sampler of the user's whose order is sharded; ``weights``, one per sample, to draw with replacement.

    Attributes:
        plan: The epoch's arithmetic in training; None in evaluation.
        rank: This process's rank.
        epoch: 0-based epoch, set by ``set_epoch``.
        seed: The run's seed.

    Raises:
        ConfigurationError: An argument is out of its range or contradicts another one.
    """

    plan: ShardPlan | None

    def __init__(
        self,
        dataset: int | Sized,
        *,
        batch_size: int,
        shuffle: bool,
        training: bool,
        seed: int,
        rank: int | None = None,
        world_size: int | None = None,
        **options: Any,
    ) -> None:
        rank, world_size = resolve_rank(rank, world_size)
        num_samples = dataset if isinstance(dataset, int) else len(dataset)
        if num_samples < 0:
            raise ConfigurationError(f"`dataset` must hold >= 0 samples, but holds {num_samples}. Give its length.")
        if options.get("weights") is not None and not (shuffle and training):
            raise ConfigurationError(
                f"`weights` must come with shuffle=True and training=True, but they are {shuffle} and {training}. Samples "
                "are drawn at random, some never: leave the weights out."
            )
        self._stream = _make_stream(
            num_samples,
            shuffle=shuffle,
            seed=seed,
            order=options.pop("order", None),
            weights=options.pop("weights", None),
        )
        _check_options(options, training=training)
        length = len(self._stream)
        # the parent checks nothing but the rank; its own state stands for those who read it
        super().__init__(range(length), num_replicas=world_size, rank=rank, shuffle=shuffle, seed=seed)  # type: ignore[arg-type]
        self.plan = None
        if training:
            self.plan = ShardPlan(num_samples=length, world_size=world_size, batch_size=batch_size, **options)
            is_cut = options.get("steps_per_epoch") is not None and self.plan.stream_length < length
            if is_cut and isinstance(self._stream, SequentialStream):
                warnings.warn(
                    f"`steps_per_epoch` without `shuffle` trains each epoch on the first {self.plan.stream_length} of "
                    f"{length} samples only.",
                    stacklevel=2,
                )
        else:
            check_positive("batch_size", batch_size)
        self.world_size = world_size
        self.num_samples = len(self)
        self.total_size = length if self.plan is None else self.plan.stream_length

    def __len__(self) -> int:
        if self.plan is None:
            return len(even_share(len(self._stream), self.rank, self.world_size))
        return self.plan.local_length(self.rank)

    def __iter__(self) -> Iterator[SampleKey]:
        epoch, length = self.epoch, len(self)
        if isinstance(self._stream, OrderStream):
            self._stream.start_epoch()
        start, block = 0, _FIRST_BLOCK
        while start < length:
            numbers = torch.arange(start, min(start + block, length))
            indices, draws = self._stream.take(self._positions(numbers), epoch)
            yield from map(SampleKey, indices.tolist(), repeat(epoch), draws.tolist())
            start, block = start + block, min(2 * block, _LARGEST_BLOCK)

    def _positions(self, numbers: Tensor) -> Tensor:
        """Map this rank's samples, counted from 0, to positions of the epoch's stream."""
        if self.plan is None:
            return numbers + even_share(len(self._stream), self.rank, self.world_size).start
        return self.plan.local_positions(self.rank, numbers)


def plan_of(loader: Any) -> Any:
    """Return the plan of a loader's sampler or batch sampler: ``ShardPlan``, or the like of it for own batch samplers.

    Args:
        loader: A ``DataLoader``, or anything with ``sampler`` or ``batch_sampler``.

    Returns:
        The plan, or None where the loader has none (evaluation, iterable data sets, foreign samplers).

    Raises:
        ConfigurationError: The loader cuts the samples differently than its plan, or gives batches out of order, so loss
            scales would be wrong.
    """
    cutter = getattr(loader, "batch_sampler", None)
    own = plan = getattr(cutter, "plan", None)
    if own is None:
        plan = getattr(getattr(cutter, "sampler", getattr(loader, "sampler", None)), "plan", None)
    if plan is not None and getattr(loader, "num_workers", 0) > 1 and not getattr(loader, "in_order", True):
        raise ConfigurationError(
            "`in_order` must be True in training, but is False: batches would come out of step with the plan, which "
            "says how many real samples each holds. Leave it out."
        )
    if own is not None:
        return own
    if isinstance(plan, ShardPlan):
        cutter = loader if cutter is None else cutter
        batch_size = getattr(cutter, "batch_size", plan.batch_size)
        if (batch_size or 1) != plan.batch_size:  # None: one by one
            raise ConfigurationError(
                f"`batch_size` must be {plan.batch_size}, as the loader's ShardedSampler was told, but is "
                f"{batch_size} in the loader. Give both the same."
            )
        if getattr(cutter, "drop_last", False):
            raise ConfigurationError(
                "`drop_last` must be False beside a ShardedSampler, but is True. Use tail=drop instead."
            )
    return plan


def resolve_rank(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return this process's rank and the number of ranks: as given, or of the process group, or of the launcher.

    Args:
        rank: Rank, or None.
        world_size: Number of ranks, or None.

    Returns:
        ``(rank, world_size)``.

    Raises:
        ConfigurationError: Only one of them is given, or they are out of range.
        LaunchEnvironmentError: The launcher's environment is incomplete.
    """
    if rank is None and world_size is None:
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
        topology = Topology.from_environment()
        return topology.rank, topology.world_size
    if rank is None or world_size is None:
        raise ConfigurationError(
            f"`rank` and `world_size` must be given together, but are {rank} and {world_size}. Give both or none."
        )
    check_positive("world_size", world_size)
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < world_size:
        raise ConfigurationError(f"`rank` must be in [0, world_size={world_size}), but is {rank!r}. Count from 0.")
    return rank, world_size


def _make_stream(
    num_samples: int,
    *,
    shuffle: bool,
    seed: int,
    order: Iterable[int] | None,
    weights: Sequence[float] | Tensor | None,
) -> IndexStream:
    if order is not None and weights is not None:
        raise ConfigurationError("`order` and `weights` must not both be given. Choose who decides the order.")
    if order is not None:
        return OrderStream(order, seed)
    if weights is not None:
        return WeightedStream(weights, num_samples, seed)
    return ShuffledStream(num_samples, seed) if shuffle else SequentialStream(num_samples)


def _check_options(options: Mapping[str, Any], *, training: bool) -> None:
    """Refuse what ``ShardPlan`` does not know, and in evaluation what would change that every sample comes once."""
    for name, value in options.items():
        if name not in _PLAN_OPTIONS:
            nearest = get_close_matches(name, [*_PLAN_OPTIONS, "order", "weights"], n=1, cutoff=0)[0]
            raise ConfigurationError(f"`{name}` is no option of a ShardedSampler. Did you mean `{nearest}`?")
        if not training and name != "filler" and value != _PLAN_OPTIONS[name]:
            raise ConfigurationError(
                f"`{name}` must be left out in evaluation, which sees every sample once, but is {value!r}. Remove it."
            )
