"""Seeds as pure functions of (seed, epoch, rank) and (seed, epoch, index), so that no generator state needs storing.

Numbers without any state (permutations, uniforms) live in ``counter_random``.
"""

import logging
import random
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import index
from typing import Any, Protocol

import torch

from srforge.distributed.errors import ConfigurationError

_logger = logging.getLogger(__name__)
_WORD = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_EPOCH, _SAMPLE = 0x65, 0x73  # keep the two families of seeds apart where their numbers coincide


class _Broadcasting(Protocol):
    """What ``resolve_seed`` needs of a training strategy."""

    @property
    def is_main(self) -> bool: ...

    def broadcast_object(self, value: Any, source: int = 0) -> Any: ...


def resolve_seed(seed: int | None, strategy: _Broadcasting) -> int:
    """Return the run's seed: the given one, or one that rank 0 draws, shares and reports.

    Args:
        seed: Seed in [0, 2^63), or None.
        strategy: The active training strategy.

    Returns:
        The seed, the same on every rank.

    Raises:
        ConfigurationError: ``seed`` is no integer in [0, 2^63).

    Collective: every rank must call when ``seed`` is None.
    """
    if seed is None:
        seed = int(strategy.broadcast_object(secrets.randbits(32), source=0))
        if strategy.is_main:
            _logger.warning("No seed was given: drew seed=%d for all ranks. Pass it to repeat this run.", seed)
        return seed
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ConfigurationError(
            f"`seed` must be an integer in [0, 2^63) or None, but is {seed!r}. Choose another one."
        )
    return seed


def mix(seed: int, *parts: int) -> int:
    """Derive a 64-bit seed from a seed and any number of integers.

    The result depends on the order and the number of the parts. With all but one of the integers fixed, different
    values of that one never collide. The value is part of the promise that a run can be repeated: it is the same on
    every platform and stays the same between versions.

    Args:
        seed: The run's seed; taken modulo 2^64, as the parts are.
        *parts: What the derived seed is for: an epoch, a rank, a sample's index.

    Returns:
        An integer in [0, 2^64).

    Source:
        Steele, Lea and Flood, Fast splittable pseudorandom number generators, 2014 (the finaliser).
    """
    state = _scramble((index(seed) + _GOLDEN) & _WORD)
    for part in parts:
        state = _scramble(((state + _GOLDEN) ^ index(part)) & _WORD)  # index: numpy's integers would overflow
    return state


def seed_epoch(seed: int, epoch: int, rank: int) -> None:
    """Seed python's, numpy's (if it is loaded) and torch's global generators, CUDA's included, for one epoch.

    Args:
        seed: The run's seed.
        epoch: 0-based epoch.
        rank: This process's rank: dropout must not be the same on every rank.
    """
    derived = mix(seed, _EPOCH, epoch, rank)
    _seed_python_and_numpy(derived)
    torch.manual_seed(derived)


def seed_sample(seed: int, epoch: int, key: int) -> None:
    """Seed the generators that a data set draws from, just before it makes one sample.

    The CPU generator is seeded directly: ``torch.manual_seed`` also walks all accelerators, about 100 times the cost,
    and would reset the model's generators.

    Args:
        seed: The run's seed.
        epoch: 0-based epoch.
        key: Index of the sample. Of a ``SampleKey`` its ``draw`` counts too: a sample that comes several times in an
            epoch is augmented differently each time.
    """
    seed_generators(mix(seed, _SAMPLE, epoch, key, getattr(key, "draw", 0)))


def seed_generators(derived: int) -> None:
    """Seed python's, numpy's (if it is loaded) and torch's CPU generator, and no accelerator's.

    Args:
        derived: Seed in [0, 2^64), as ``mix`` returns it.
    """
    _seed_python_and_numpy(derived)
    torch.default_generator.manual_seed(derived)


def capture_rng(*, cuda: bool = False) -> Callable[[], None]:
    """Return a function that puts the global generators back to where they are now.

    Args:
        cuda: Include the generators of all CUDA devices (one that is not in use yet has no state).

    Returns:
        A function without arguments: restores python's, numpy's (if it is loaded now) and torch's CPU generators.
    """
    python_state = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = None if numpy is None else numpy.random.get_state()
    torch_state = torch.default_generator.get_state()
    cuda_in_use = cuda and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    cuda_states = torch.cuda.get_rng_state_all() if cuda_in_use else []

    def restore() -> None:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
        torch.default_generator.set_state(torch_state)
        if cuda_states:
            torch.cuda.set_rng_state_all(cuda_states)

    return restore


@contextmanager
def preserved_rng(*, cuda: bool = False) -> Iterator[None]:
    """Restore the global generators on leaving, whatever the body drew or seeded.

    Args:
        cuda: Preserve the generators of all CUDA devices too.

    Yields:
        Nothing.
    """
    restore = capture_rng(cuda=cuda)
    try:
        yield
    finally:
        restore()


def _scramble(word: int) -> int:
    """Apply the SplitMix64 finaliser, a bijection on 64-bit words in which each input bit flips half of the output."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & _WORD
    return word ^ (word >> 31)


def _seed_python_and_numpy(derived: int) -> None:
    random.seed(derived)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(derived & 0xFFFFFFFF)  # its legacy seed holds 32 bits
