"""The arithmetic of one training epoch: how its stream of samples is cut into steps, ranks and micro-batches.

Pure integers: which sample stands at a position of the stream is the business of ``index_streams``.
"""

import warnings
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from srforge.distributed.errors import ConfigurationError

TAILS = ("exact", "pad", "drop")


def even_share(count: int, rank: int, world_size: int) -> range:
    """Return the contiguous slice of ``range(count)`` that one rank takes: equal shares, the first ranks one more.

    Args:
        count: Number of items, >= 0.
        rank: This process's rank, in [0, world_size).
        world_size: Number of ranks.

    Returns:
        Positions of this rank's items; empty where there are fewer items than ranks.
    """
    base, extra = divmod(count, world_size)
    start = rank * base + min(rank, extra)
    return range(start, start + base + (rank < extra))


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """How many real samples each rank and the fleet have in each micro-batch of a training epoch.

    Optimizer step k takes positions ``[k * global_batch_size, (k + 1) * global_batch_size)`` of the epoch's stream,
    whatever the number of ranks. Each rank takes a contiguous slice of them (``even_share`` of a short last step) and
    cuts it into micro-batches of ``batch_size``. Only the last step can be short, so only the last row of a rank can,
    and a plain ``DataLoader(batch_size=batch_size)`` over the rank's samples finds exactly these micro-batches.

    Attributes:
        num_samples: Length of the data set, or of one pass of a sampler, >= 1.
        world_size: Number of ranks.
        batch_size: Samples per rank and micro-batch.
        accumulate: Micro-batches per optimizer step.
        tail: What happens to a short last step: ``exact`` trains on it as it is, ``pad`` fills it up from a further
            pass over the data, ``drop`` leaves it out.
        repeat: Passes over the data per epoch.
        steps_per_epoch: Optimizer steps per epoch, taken from as many passes as they need; None: ``repeat`` passes.
        filler: Samples in the row of a rank that has no real one left (at most ``batch_size`` are used).
    """

    num_samples: int
    world_size: int
    batch_size: int
    accumulate: int = 1
    tail: str = "exact"
    repeat: int = 1
    steps_per_epoch: int | None = None
    filler: int = 1

    def __post_init__(self) -> None:
        for name in ("num_samples", "world_size", "batch_size", "accumulate", "repeat", "filler"):
            check_positive(name, getattr(self, name))
        if self.tail not in TAILS:
            raise ConfigurationError(f"`tail` must be one of {', '.join(TAILS)}, but is {self.tail!r}. Choose one.")
        if self.steps_per_epoch is not None:
            check_positive("steps_per_epoch", self.steps_per_epoch)
            if self.repeat > 1 or self.tail != "exact":
                warnings.warn("`repeat` and `tail` have no effect beside `steps_per_epoch`.", stacklevel=3)
        elif self.tail == "drop" and self.stream_length == 0:
            raise ConfigurationError(
                f"`num_samples` must fill one global batch of {self.global_batch_size} when `tail` is drop, "
                f"but is {self.num_samples} (repeat={self.repeat}). Use tail=exact or a smaller batch."
            )

    @cached_property
    def global_batch_size(self) -> int:
        """Samples per optimizer step over all ranks, accumulation included."""
        return self.batch_size * self.world_size * self.accumulate

    @cached_property
    def stream_length(self) -> int:
        """Length of the epoch's stream of samples, over all ranks."""
        if self.steps_per_epoch is not None:
            return self.steps_per_epoch * self.global_batch_size
        length = self.num_samples * self.repeat
        if self.tail == "pad":
            return -(-length // self.global_batch_size) * self.global_batch_size
        if self.tail == "drop":
            return length // self.global_batch_size * self.global_batch_size
        return length

    @cached_property
    def num_steps(self) -> int:
        """Optimizer steps per epoch."""
        return -(-self.stream_length // self.global_batch_size)

    @cached_property
    def num_micro_batches(self) -> int:
        """Micro-batches per epoch, the same on every rank: the length of its loader."""
        full_steps, rest = divmod(self.stream_length, self.global_batch_size)
        return full_steps * self.accumulate + -(-rest // (self.world_size * self.batch_size))

    def step_of(self, micro_batch: int) -> int:
        """Return the optimizer step, counted from 0 in each epoch, that a micro-batch belongs to."""
        self._check_micro_batch(micro_batch)
        return micro_batch // self.accumulate

    def ends_window(self, micro_batch: int) -> bool:
        """Say whether an optimizer step follows this micro-batch."""
        self._check_micro_batch(micro_batch)
        return (micro_batch + 1) % self.accumulate == 0 or micro_batch + 1 == self.num_micro_batches

    def window_count(self, micro_batch: int) -> int:
        """Return how many samples the fleet has in the optimizer step that a micro-batch belongs to."""
        start = self.step_of(micro_batch) * self.global_batch_size
        return min(self.global_batch_size, self.stream_length - start)

    def local_count(self, micro_batch: int, rank: int) -> int:
        """Return how many real samples a rank has in a micro-batch; 0: its row is a filler."""
        local = len(even_share(self.window_count(micro_batch), rank, self.world_size))
        return max(0, min(self.batch_size, local - micro_batch % self.accumulate * self.batch_size))

    def loss_scale(self, micro_batch: int, rank: int) -> float:
        """Return the factor of a rank's mean loss over a micro-batch.

        With gradients summed over a window's micro-batches and averaged over ranks, as DDP does, the factors make them
        the gradient of the mean over the window's real samples, whoever has how many of them.
        """
        return self.local_count(micro_batch, rank) * self.world_size / self.window_count(micro_batch)

    def local_length(self, rank: int) -> int:
        """Return how many samples a rank yields in an epoch, the filler of a row without a real one included.

        Args:
            rank: The rank.

        Returns:
            Number of samples; cut into rows of ``batch_size`` they are ``num_micro_batches`` rows.
        """
        full_steps, rest = divmod(self.stream_length, self.global_batch_size)
        share = len(even_share(rest, rank, self.world_size))
        length = full_steps * self.batch_size * self.accumulate + share
        if -(-share // self.batch_size) < -(-rest // (self.world_size * self.batch_size)):
            length += min(self.filler, self.batch_size)
        return length

    def local_positions(self, rank: int, numbers: Tensor) -> Tensor:
        """Map a rank's samples to positions of the epoch's stream.

        Args:
            rank: The rank.
            numbers: Samples of the rank counted from 0, in [0, local_length), int64, shape ``(n,)``.

        Returns:
            Positions, int64, shape ``(n,)``; of a filler the first position of its step.
        """
        per_step = self.batch_size * self.accumulate
        steps, offsets = numbers // per_step, numbers % per_step
        full_steps, rest = divmod(self.stream_length, self.global_batch_size)
        share = even_share(rest, rank, self.world_size)
        is_short = steps == full_steps
        offsets = torch.where(is_short, offsets + share.start, offsets + rank * per_step)
        offsets = torch.where(is_short & (offsets >= share.stop), 0, offsets)
        return steps * self.global_batch_size + offsets

    def _check_micro_batch(self, micro_batch: int) -> None:
        if not 0 <= micro_batch < self.num_micro_batches:
            raise ConfigurationError(
                f"`micro_batch` must be in [0, {self.num_micro_batches}), the epoch's micro-batches, but is "
                f"{micro_batch}. Iterate the loader that this plan belongs to."
            )


def check_positive(name: str, value: int) -> None:
    """Refuse what is no integer >= 1.

    Args:
        name: The configuration key.
        value: Its value.

    Raises:
        ConfigurationError: It is something else.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"`{name}` must be an integer >= 1, but is {value!r}. Give a positive number.")
