"""Sharding of a user's own batch sampler: whole batches go to ranks, of whatever sizes they are.

Batches that the loader cuts itself are the business of ``shard_plan`` and ``sharding``.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence, Sized
from itertools import accumulate as running_sum

from torch.utils.data import DistributedSampler, Sampler

from srforge.distributed.errors import ConfigurationError
from srforge.distributed.index_streams import announce_epoch, plain_index, seeded_order
from srforge.distributed.seeding import mix
from srforge.distributed.shard_plan import check_positive, even_share
from srforge.distributed.sharding import SampleKey, resolve_rank

_BATCHES = 0x62  # keeps the order of batches apart from other uses of the seed


class BatchPlan:
    """``ShardPlan`` for batches of any size: the same questions, answered once an epoch's order has been read.

    Optimizer step k takes the batches ``[k * world_size * accumulate, (k + 1) * world_size * accumulate)`` of the
    order, each rank a contiguous slice of them (``even_share`` of a short last step). Every rank reads the whole order,
    so every rank knows every count.

    Args:
        num_batches: Batches in the order, over all ranks.
        world_size: Number of ranks.
        accumulate: Micro-batches per optimizer step.
    """

    def __init__(self, num_batches: int, world_size: int, accumulate: int) -> None:
        self.world_size = world_size
        self.accumulate = accumulate
        self._num_batches = num_batches
        self._sizes = array("q")
        self._samples_before = array("q", [0])

    def start_epoch(self, sizes: Sequence[int]) -> None:
        """Take the sizes of all batches of the epoch that begins.

        Args:
            sizes: Samples in each batch of the order.
        """
        self._num_batches = len(sizes)
        self._sizes = array("q", sizes)
        self._samples_before = array("q", running_sum(sizes, initial=0))

    @property
    def num_steps(self) -> int:
        """Optimizer steps per epoch."""
        return -(-self._num_batches // (self.world_size * self.accumulate))

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches per epoch, the same on every rank."""
        full_steps, rest = divmod(self._num_batches, self.world_size * self.accumulate)
        return full_steps * self.accumulate + -(-rest // self.world_size)

    def step_of(self, micro_batch: int) -> int:
        """Return the optimizer step, counted from 0 in each epoch, that a micro-batch belongs to."""
        if not 0 <= micro_batch < self.num_micro_batches:
            raise ConfigurationError(
                f"`micro_batch` must be in [0, {self.num_micro_batches}), the epoch's micro-batches, but is "
                f"{micro_batch}. Iterate the loader that this plan belongs to."
            )
        return micro_batch // self.accumulate

    def ends_window(self, micro_batch: int) -> bool:
        """Say whether an optimizer step follows this micro-batch."""
        self.step_of(micro_batch)
        return (micro_batch + 1) % self.accumulate == 0 or micro_batch + 1 == self.num_micro_batches

    def window_count(self, micro_batch: int) -> int:
        """Return how many samples the fleet has in the optimizer step that a micro-batch belongs to."""
        window = self._window(micro_batch)
        return self._samples_before[window.stop] - self._samples_before[window.start]

    def local_count(self, micro_batch: int, rank: int) -> int:
        """Return how many real samples a rank has in a micro-batch; 0: it holds a filler."""
        window = self._window(micro_batch)
        share = even_share(len(window), rank, self.world_size)
        number = micro_batch % self.accumulate
        return self._sizes[window.start + share[number]] if number < len(share) else 0

    def loss_scale(self, micro_batch: int, rank: int) -> float:
        """Return the factor of a rank's mean loss over a micro-batch; see ``ShardPlan.loss_scale``."""
        return self.local_count(micro_batch, rank) * self.world_size / self.window_count(micro_batch)

    def _window(self, micro_batch: int) -> range:
        """Return the numbers of the batches in a micro-batch's optimizer step."""
        start = self.step_of(micro_batch) * self.world_size * self.accumulate
        if not self._sizes:
            raise ConfigurationError(
                "The sizes of an epoch's batches must be read before they are asked for. Call iter(loader) first."
            )
        return range(start, min(start + self.world_size * self.accumulate, self._num_batches))


class ShardedBatchSampler(Sampler[list[SampleKey]]):
    """One rank's share of a user's own batch sampler, under a seed that all ranks share.

    The order is read whole at the start of each epoch, so it should be cheap to make: indices, not data. In training
    every rank gets the same number of batches; one that has none left in the last step repeats samples of that step,
    which its plan weighs with 0. In evaluation each rank gets a contiguous share of the batches, each batch once.

    Args:
        order: The batch sampler: yields lists of indices, and has a length.
        training: Give every rank the same number of batches.
        seed: The run's seed, the same on every rank.
        accumulate: Micro-batches per optimizer step.
        filler: Samples in the batch of a rank that has no real one left.
        rank: This process's rank; None: that of the process group, or of the launcher's environment.
        world_size: Number of ranks; None as for ``rank``.

    Attributes:
        plan: Counts and loss scales in training, for the epoch that was begun last; None in evaluation.
        rank: This process's rank.
        epoch: 0-based epoch, set by ``set_epoch``.
        seed: The run's seed.

    Raises:
        ConfigurationError: An argument is out of its range, or the order is sharded already.
    """

    plan: BatchPlan | None

    def __init__(
        self,
        order: Iterable[Sequence[int]],
        *,
        training: bool,
        seed: int,
        accumulate: int = 1,
        filler: int = 1,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        for sampler in (order, getattr(order, "sampler", None)):
            if isinstance(sampler, DistributedSampler):
                raise ConfigurationError(
                    f"`order` must yield the batches of the whole fleet, but holds a {type(sampler).__name__}, which "
                    "is sharded already. Hand it to the DataLoader as its batch_sampler."
                )
        if not isinstance(order, Sized):
            raise ConfigurationError(
                f"`order` must have a length, but {type(order).__name__} has none. Give it `__len__`: its batches in "
                "one epoch."
            )
        check_positive("accumulate", accumulate)
        check_positive("filler", filler)
        self.rank, self.world_size = resolve_rank(rank, world_size)
        self.seed, self.epoch, self.filler = seed, 0, filler
        self.plan = BatchPlan(len(order), self.world_size, accumulate) if training else None
        self._order: Iterable[Sequence[int]] = order
        self._num_batches = len(order)

    def __len__(self) -> int:
        if self.plan is None:
            return len(even_share(self._num_batches, self.rank, self.world_size))
        return self.plan.num_micro_batches

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration yields.

        Args:
            epoch: 0-based epoch.
        """
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[SampleKey]]:
        # no generator: the plan is to know the epoch as soon as the loader begins, before its first batch
        batches = self._read_order()
        if self.plan is None:
            share = even_share(len(batches), self.rank, self.world_size)
            return iter(batches[share.start : share.stop])
        self.plan.start_epoch([len(batch) for batch in batches])
        return iter([self._training_batch(batches, number) for number in range(self.plan.num_micro_batches)])

    def _training_batch(self, batches: list[list[SampleKey]], micro_batch: int) -> list[SampleKey]:
        assert self.plan is not None
        per_step = self.world_size * self.plan.accumulate
        start = self.plan.step_of(micro_batch) * per_step
        share = even_share(min(per_step, len(batches) - start), self.rank, self.world_size)
        number = micro_batch % self.plan.accumulate
        return batches[start + share[number]] if number < len(share) else batches[start][: self.filler]

    def _read_order(self) -> list[list[SampleKey]]:
        announce_epoch(self._order, self.epoch)
        batches: list[list[SampleKey]] = []
        times_seen: dict[int, int] = {}  # an index that comes again in an epoch is augmented anew
        with seeded_order(self._order, mix(self.seed, _BATCHES, self.epoch)):
            for batch in self._order:
                keys = []
                for index in self._indices(batch):
                    draw = times_seen.get(index, 0)
                    times_seen[index] = draw + 1
                    keys.append(SampleKey(index, self.epoch, draw))
                batches.append(keys)
        self._num_batches = len(batches)
        return batches

    def _indices(self, batch: Iterable[int]) -> list[int]:
        indices = [plain_index(index) for index in batch] if isinstance(batch, Iterable) else []
        if not indices:
            raise ConfigurationError(
                f"`order` must yield batches of at least one index, but yielded {batch!r} in epoch {self.epoch}. "
                "Hand a sampler of single indices over as the order of a ShardedSampler."
            )
        return indices
