"""Which sample stands at a position of an epoch's stream: in sequence, shuffled, weighted, or by the user's sampler.

A stream is asked for any positions in any order. Who asks for which ones is the business of ``shard_plan`` and
``sharding``.
"""

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

from srforge.distributed.counter_random import permute, uniforms
from srforge.distributed.errors import ConfigurationError
from srforge.distributed.seeding import mix, preserved_rng, seed_generators

_SHUFFLE, _WEIGHTS, _ORDER = 0x70, 0x77, 0x6F  # keep the three kinds of order apart under one seed


class IndexStream(Protocol):
    """An endless stream of indices per epoch, made of passes over the data."""

    def __len__(self) -> int:
        """Return the number of samples in one pass."""

    def take(self, positions: Tensor, epoch: int) -> tuple[Tensor, Tensor]:
        """Return what stands at some positions of an epoch's stream.

        Args:
            positions: Positions >= 0, int64, shape ``(n,)``.
            epoch: 0-based epoch.

        Returns:
            Indices into the data set, int64, ``(n,)``; and draws, int64, ``(n,)``: numbers that tell apart the times
            that one index comes in an epoch (0 for a sample that comes once).
        """


class SequentialStream:
    """The data set's own order, pass after pass."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def take(self, positions: Tensor, epoch: int) -> tuple[Tensor, Tensor]:
        """See ``IndexStream.take``."""
        del epoch
        return positions % self._num_samples, positions // self._num_samples


class ShuffledStream:
    """A new permutation for each pass of each epoch, in constant memory."""

    def __init__(self, num_samples: int, seed: int) -> None:
        self._num_samples = num_samples
        self._seed = seed

    def __len__(self) -> int:
        return self._num_samples

    def take(self, positions: Tensor, epoch: int) -> tuple[Tensor, Tensor]:
        """See ``IndexStream.take``."""
        parts = [
            permute(within, self._num_samples, mix(self._seed, _SHUFFLE, epoch, number))
            for number, within in _split_passes(positions, self._num_samples)
        ]
        return torch.cat(parts), positions // self._num_samples


class WeightedStream:
    """Samples drawn with replacement, each with a probability proportional to its weight.

    A position's sample is the inverse of the cumulated weights at a uniform number that depends on (seed, epoch,
    position) alone. The cumulated weights, 8 bytes a sample, are all that is stored.
    """

    def __init__(self, weights: Sequence[float] | Tensor, num_samples: int, seed: int) -> None:
        values = torch.as_tensor(weights, dtype=torch.float64, device="cpu")
        if values.shape != (num_samples,):
            raise ConfigurationError(
                f"`weights` must hold one number for each of {num_samples} samples, but has shape "
                f"{tuple(values.shape)}. Give one weight per sample."
            )
        wrong = (~torch.isfinite(values) | (values < 0)).nonzero().flatten()
        if wrong.numel():
            first = int(wrong[0])
            raise ConfigurationError(
                f"`weights` must be finite and >= 0, but weights[{first}] is {float(values[first])}. Correct it."
            )
        if not values.any():
            raise ConfigurationError("`weights` must hold a number > 0, but all are 0. Give a sample a weight.")
        self._cumulated = values.cumsum(0)
        if not math.isfinite(self._cumulated[-1]):
            raise ConfigurationError("`weights` must have a finite sum, but it is inf. Scale them down.")
        self._last = int(values.nonzero()[-1])
        self._seed = seed

    def __len__(self) -> int:
        return self._cumulated.numel()

    def take(self, positions: Tensor, epoch: int) -> tuple[Tensor, Tensor]:
        """See ``IndexStream.take``."""
        numbers = uniforms(mix(self._seed, _WEIGHTS, epoch), positions, 1).squeeze(1)
        # right=True steps over samples of weight 0; rounding can bring the product up to the total itself: clamp.
        indices = torch.searchsorted(self._cumulated, numbers * self._cumulated[-1], right=True)
        return indices.clamp_(max=self._last), positions + 1


class OrderStream:
    """The order of the user's own sampler, iterated anew for each pass under a seed that all ranks share."""

    def __init__(self, order: Iterable[int], seed: int) -> None:
        if isinstance(order, DistributedSampler):
            raise ConfigurationError(
                f"`order` must yield the indices of the whole fleet, but is a {type(order).__name__}, which is "
                "sharded already. Hand it to the DataLoader as its sampler."
            )
        if not isinstance(order, Sized):
            raise ConfigurationError(
                f"`order` must have a length, but {type(order).__name__} has none. Give it `__len__`: the number of "
                "indices in one pass."
            )
        self._order = order
        self._length = len(order)
        self._seed = seed
        self._read_pass: tuple[int, int] | None = None
        self._indices_and_times_seen = torch.empty(2, 0, dtype=torch.int64)

    def __len__(self) -> int:
        return self._length

    def take(self, positions: Tensor, epoch: int) -> tuple[Tensor, Tensor]:
        """See ``IndexStream.take``."""
        parts = [self._read(epoch, number)[:, within] for number, within in _split_passes(positions, self._length)]
        indices, times_seen = torch.cat(parts, dim=1)
        return indices, positions // self._length * self._length + times_seen

    def start_epoch(self) -> None:
        """Forget what was read: the data behind the sampler may have changed since."""
        self._read_pass = None

    def _read(self, epoch: int, number: int) -> Tensor:
        if self._read_pass != (epoch, number):
            announce_epoch(self._order, epoch)
            with seeded_order(self._order, mix(self._seed, _ORDER, epoch, number)):
                # one more than there should be is enough to tell, also of an endless sampler
                indices = array("q", map(plain_index, islice(self._order, self._length + 1)))
            if len(indices) != self._length:
                found = "more" if len(indices) > self._length else len(indices)
                raise ConfigurationError(
                    f"`order` must yield the {self._length} indices that its length says, but yielded {found} in epoch "
                    f"{epoch}. Correct its `__len__`."
                )
            read = torch.tensor(indices, dtype=torch.int64)
            self._indices_and_times_seen = torch.stack([read, _times_seen_before(read)])
            self._read_pass = (epoch, number)
        return self._indices_and_times_seen


def announce_epoch(order: object, epoch: int) -> None:
    """Call ``set_epoch`` on a user's sampler or batch sampler, and on the sampler inside it, where there is one.

    Args:
        order: The sampler or batch sampler.
        epoch: 0-based epoch.
    """
    for sampler in (order, getattr(order, "sampler", None)):
        set_epoch = getattr(sampler, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)


@contextmanager
def seeded_order(order: object, seed: int) -> Iterator[None]:
    """Give every generator that a user's sampler is likely to draw from one seed, and restore all of them afterwards.

    Python's, numpy's and torch's global generators, and the ``generator`` that a sampler of torch's, or the one inside
    a batch sampler, was given.

    Args:
        order: The sampler or batch sampler.
        seed: Seed in [0, 2^64), the same on every rank.

    Yields:
        Nothing: iterate the sampler in the body.
    """
    own = [getattr(sampler, "generator", None) for sampler in (order, getattr(order, "sampler", None))]
    generators = [generator for generator in own if isinstance(generator, torch.Generator)]
    states = [generator.get_state() for generator in generators]
    with preserved_rng():
        seed_generators(seed)
        for generator in generators:
            generator.manual_seed(seed)
        try:
            yield
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)


def plain_index(value: Any) -> int:
    """Return an index that a user's sampler yielded as an ``int``.

    Args:
        value: A python, numpy or 0-dim torch integer.

    Returns:
        The same number.

    Raises:
        ConfigurationError: It is no integer.
    """
    try:
        return int(value.__index__())
    except (AttributeError, TypeError) as error:
        raise ConfigurationError(
            f"A sampler must yield integer indices, but yielded {value!r} ({type(value).__name__}). Yield the position "
            "of a sample in the data set."
        ) from error


def _split_passes(positions: Tensor, length: int) -> Iterator[tuple[int, Tensor]]:
    """Split positions of a stream, in order, into (number of the pass, positions within it)."""
    passes, sizes = torch.unique_consecutive(positions // length, return_counts=True)
    yield from zip(passes.tolist(), torch.split(positions % length, sizes.tolist()), strict=True)


def _times_seen_before(indices: Tensor) -> Tensor:
    """Count, for each index, how often it came earlier: samplers with replacement repeat some."""
    ordered, by_index = torch.sort(indices, stable=True)
    first_of_run = torch.searchsorted(ordered, ordered)
    counts = torch.empty_like(indices)
    counts[by_index] = torch.arange(len(indices)) - first_of_run
    return counts
