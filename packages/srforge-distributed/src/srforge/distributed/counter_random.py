"""Randomness without state: permutations and uniform numbers as pure functions of a key and a counter.

Any position of a shuffled epoch can be asked for on its own, on any rank, at any time, in constant memory. Seeds of
generators that do hold state live in ``seeding``.
"""

import torch
from torch import Tensor

from srforge.distributed.errors import ConfigurationError
from srforge.distributed.seeding import mix

_GOLDEN = -0x61C8864680B583EB  # the odd integer next to 2^64 / golden ratio, as a signed 64-bit word
_MULTIPLIERS = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)  # of the SplitMix64 finaliser, signed
_NUM_ROUNDS = 6
_SORTED_LENGTH = 4096  # a Feistel network over so few positions is visibly not random; sorting them is quick and is
_MAX_LENGTH = 2**62
_PERMUTE, _UNIFORMS = 1, 2  # keep the two functions apart under one key


def permute(positions: Tensor, length: int, key: int) -> Tensor:
    """Map positions through a keyed bijection on ``range(length)``.

    Short ranges are ordered by a 64-bit hash of each position. Longer ones go through an alternating Feistel network
    over the next power of two; results outside the range are sent through it again until they are inside, which keeps
    the map one to one. Work and memory grow with the number of positions, not with ``length``.

    Args:
        positions: Positions in [0, length), int64, any shape, any device.
        length: Size of the range, 1 to 2^62.
        key: Chooses the permutation; taken modulo 2^64.

    Returns:
        The image of each position, int64, shape and device of ``positions``; the same on every platform.

    Raises:
        ConfigurationError: ``length`` or ``positions`` are out of range, or ``positions`` is not int64.

    Source:
        Luby and Rackoff, How to construct pseudorandom permutations from pseudorandom functions, 1988 (the network);
        Black and Rogaway, Ciphers with arbitrary finite domains, 2002 (cycle walking).
    """
    if not 1 <= length <= _MAX_LENGTH:
        raise ConfigurationError(f"`length` must be in [1, 2^62], but is {length}. Give the size of the range.")
    _check_int64("positions", positions)
    if positions.numel() == 0:
        return positions.clone()
    smallest, largest = torch.aminmax(positions)
    if smallest < 0 or largest >= length:
        raise ConfigurationError(
            f"`positions` must be in [0, length={length}), but span [{int(smallest)}, {int(largest)}]. "
            "Take them modulo the length."
        )
    if length <= _SORTED_LENGTH:
        words = torch.arange(length, device=positions.device).mul_(_GOLDEN).add_(_signed(mix(key, _PERMUTE)))
        return torch.argsort(_scramble_(words), stable=True)[positions]
    round_keys = [_signed(mix(key, _PERMUTE, round_number)) for round_number in range(_NUM_ROUNDS)]
    images = _feistel(positions.flatten(), length, round_keys)
    outside = (images >= length).nonzero().flatten()
    while outside.numel():
        moved = _feistel(images[outside], length, round_keys)
        images[outside] = moved
        outside = outside[moved >= length]
    return images.view(positions.shape)


def uniforms(key: int, indices: Tensor, num: int, *, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return ``num`` uniform numbers for each index, a function of the key and the index alone.

    Args:
        key: Chooses the stream; taken modulo 2^64.
        indices: Counters, int64, any shape, any device.
        num: Numbers per index, >= 0.
        dtype: ``torch.float64`` (53 random bits) or ``torch.float32`` (24 bits, for devices without float64).

    Returns:
        Numbers in [0, 1), shape ``(*indices.shape, num)``, device of ``indices``.

    Raises:
        ConfigurationError: ``indices`` is not int64, ``num`` is negative or ``dtype`` is another one.

    Source:
        Steele, Lea and Flood, Fast splittable pseudorandom number generators, 2014 (SplitMix64).
    """
    _check_int64("indices", indices)
    if num < 0:
        raise ConfigurationError(f"`num` must be >= 0, but is {num}. Say how many numbers each index needs.")
    bits = {torch.float64: 53, torch.float32: 24}.get(dtype)
    if bits is None:
        raise ConfigurationError(f"`dtype` must be torch.float64 or torch.float32, but is {dtype}. Convert the result.")
    states = _scramble_(indices * _GOLDEN + _signed(mix(key, _UNIFORMS)))
    steps = torch.arange(1, num + 1, device=indices.device) * _GOLDEN
    words = _scramble_(states.unsqueeze(-1) + steps)
    return _shift_right(words, 64 - bits).to(dtype).mul_(2.0**-bits)


def _feistel(positions: Tensor, length: int, round_keys: list[int]) -> Tensor:
    """Permute ``range(2 ** bits)``, the smallest such range that holds ``range(length)``."""
    bits = (length - 1).bit_length()
    low_bits = bits // 2
    high = positions >> low_bits
    low = positions & ((1 << low_bits) - 1)
    for even_key, odd_key in zip(round_keys[::2], round_keys[1::2], strict=True):
        high ^= _round(low, even_key, bits - low_bits)
        low ^= _round(high, odd_key, low_bits)
    return high.bitwise_left_shift_(low_bits).bitwise_or_(low)


def _round(half: Tensor, round_key: int, bits: int) -> Tensor:
    """Hash one half of each word to ``bits`` bits: the upper ones, which depend on every bit of the input."""
    words = (half + round_key).mul_(_MULTIPLIERS[0])
    words ^= words >> 32  # with copies of the sign: a round function may be any function
    return _shift_right(words.mul_(_MULTIPLIERS[1]), 64 - bits)


def _scramble_(words: Tensor) -> Tensor:
    """Apply the SplitMix64 finaliser in place: each input bit flips half of the output bits."""
    words ^= _shift_right(words, 30)
    words.mul_(_MULTIPLIERS[0])
    words ^= _shift_right(words, 27)
    words.mul_(_MULTIPLIERS[1])
    words ^= _shift_right(words, 31)
    return words


def _shift_right(words: Tensor, num_bits: int) -> Tensor:
    """Shift as if the words were unsigned: torch's own shift of int64 copies the sign bit downwards."""
    return (words >> num_bits).bitwise_and_((1 << (64 - num_bits)) - 1)


def _signed(word: int) -> int:
    """Return the signed reading of an unsigned 64-bit word, the one torch accepts."""
    return word - 2**64 if word >= 2**63 else word


def _check_int64(name: str, tensor: Tensor) -> None:
    if tensor.dtype != torch.int64:
        raise ConfigurationError(f"`{name}` must be int64, but is {tensor.dtype}. Call .long() on it.")
