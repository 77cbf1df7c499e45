"""Exactness of `permute` and `uniforms` against big-integer python; their randomness is tested in test_randomness."""

import pytest
import torch

from srforge.distributed.counter_random import permute, uniforms
from srforge.distributed.errors import ConfigurationError

WORD = 2**64 - 1
LENGTHS = sorted(
    {*range(1, 40), 97, 541, 4093, 4095, 4096, 4097, 7919, 65537, 104729}
    | {2**bits + offset for bits in (6, 10, 13, 15, 17) for offset in (-1, 0, 1)}
)


def scramble(word):
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        word = ((word ^ (word >> shift)) * factor) & WORD
    return word ^ (word >> 31)


def derive(seed, *parts):
    state = scramble((seed + 0x9E3779B97F4A7C15) & WORD)
    for part in parts:
        state = scramble(((state + 0x9E3779B97F4A7C15) & WORD) ^ (part & WORD))
    return state


def permute_one(position, length, key):
    """The network spelled out for one position, in python's unbounded integers."""
    bits = (length - 1).bit_length()
    low_bits = bits // 2
    while True:
        high, low = divmod(position, 2**low_bits)
        for number in range(6):
            half, width = (low, bits - low_bits) if number % 2 == 0 else (high, low_bits)
            word = ((half + derive(key, 1, number)) * 0xBF58476D1CE4E5B9) & WORD
            sign = WORD << 32 & WORD if word >> 63 else 0
            word ^= (word >> 32) | sign
            hashed = ((word * 0x94D049BB133111EB) & WORD) >> (64 - width)
            high, low = (high ^ hashed, low) if number % 2 == 0 else (high, low ^ hashed)
        position = high * 2**low_bits + low
        if position < length:
            return position


@pytest.mark.parametrize("length", LENGTHS)
def test_permute_is_a_bijection_of_every_length(length):
    for key in (0, 1, 2**64 - 1):
        images = permute(torch.arange(length), length, key)
        assert torch.equal(images.sort().values, torch.arange(length))


@pytest.mark.parametrize("length", [4097, 8192, 10**6 + 3, 10**9, 2**40 + 1, 2**62])
def test_permute_equals_the_network_in_unbounded_integers(length):
    positions = [0, 1, 2, length // 3, length // 2, length - 2, length - 1]
    for key in (0, 7, 2**63, 2**64 - 1):
        expected = [permute_one(position, length, key) for position in positions]
        assert permute(torch.tensor(positions), length, key).tolist() == expected


@pytest.mark.parametrize("length", [1, 2, 7, 1000, 4096])
def test_permute_sorts_short_ranges_by_their_hash(length):
    base = derive(3, 1)
    hashes = [scramble((position * 0x9E3779B97F4A7C15 + base) & WORD) for position in range(length)]
    signed = [word - 2**64 if word >> 63 else word for word in hashes]
    expected = sorted(range(length), key=signed.__getitem__)
    assert permute(torch.arange(length), length, 3).tolist() == expected


def test_permute_answers_each_position_alone_as_it_does_in_a_block():
    whole = permute(torch.arange(5000), 5000, 11)
    block = permute(torch.arange(1000, 1600).view(3, 200), 5000, 11)
    assert block.shape == (3, 200)
    assert torch.equal(block.flatten(), whole[1000:1600])
    assert int(permute(torch.tensor(4321), 5000, 11)) == int(whole[4321])
    assert permute(torch.empty(0, dtype=torch.int64), 5000, 11).shape == (0,)


def test_permute_leaves_its_argument_and_the_global_generators_alone():
    positions, state = torch.arange(10), torch.get_rng_state()
    permute(positions, 10**6, 1)
    uniforms(1, positions, 3)
    assert torch.equal(positions, torch.arange(10))
    assert torch.equal(torch.get_rng_state(), state)


def test_permute_keeps_its_values_between_versions():
    assert permute(torch.arange(8), 8, 0).tolist() == [1, 7, 4, 0, 3, 5, 2, 6]
    assert permute(torch.arange(6), 10**8, 12345).tolist() == [
        38744280,
        80962186,
        23671442,
        61547423,
        12493647,
        85509059,
    ]


@pytest.mark.parametrize("key", [0, 5, 2**64 - 1])
def test_uniforms_equal_splitmix64_in_unbounded_integers(key):
    indices = [0, 1, 2**40, 2**63 - 1]
    expected = []
    for index in indices:
        state = scramble((index * 0x9E3779B97F4A7C15 + derive(key, 2)) & WORD)
        words = [scramble((state + step * 0x9E3779B97F4A7C15) & WORD) for step in (1, 2, 3)]
        expected.append([(word >> 11) / 2**53 for word in words])
    assert uniforms(key, torch.tensor(indices), 3).tolist() == expected
    single = uniforms(key, torch.tensor(indices), 3, dtype=torch.float32)
    assert single.dtype == torch.float32
    assert (single.double() - torch.tensor(expected, dtype=torch.float64)).abs().max() < 2**-24
    assert single.max() < 1


def test_uniforms_of_more_numbers_begin_with_those_of_fewer():
    indices = torch.arange(6).view(2, 3)
    more = uniforms(1, indices, 5)
    assert more.shape == (2, 3, 5)
    assert torch.equal(more[..., :2], uniforms(1, indices, 2))
    assert uniforms(1, indices, 0).shape == (2, 3, 0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: permute(torch.arange(3), 0, 0), r"`length` must be in \[1, 2\^62\], but is 0"),
        (lambda: permute(torch.arange(3), 2**62 + 1, 0), r"`length` must be in \[1, 2\^62\]"),
        (lambda: permute(torch.arange(4), 3, 0), r"`positions` must be in \[0, length=3\), but span \[0, 3\]"),
        (lambda: permute(torch.tensor([-1]), 3, 0), r"but span \[-1, -1\]"),
        (lambda: permute(torch.arange(3.0), 3, 0), r"`positions` must be int64, but is torch.float32"),
        (lambda: uniforms(0, torch.arange(3).int(), 1), r"`indices` must be int64, but is torch.int32"),
        (lambda: uniforms(0, torch.arange(3), -1), r"`num` must be >= 0, but is -1"),
        (lambda: uniforms(0, torch.arange(3), 1, dtype=torch.float16), r"`dtype` must be torch.float64 or"),
    ],
)
def test_arguments_out_of_range_are_refused(call, message):
    with pytest.raises(ConfigurationError, match=message):
        call()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_the_same_numbers():
    for length in (100, 4097, 10**9):
        positions = torch.arange(100)
        assert torch.equal(permute(positions.cuda(), length, 9).cpu(), permute(positions, length, 9))
    assert torch.equal(uniforms(9, torch.arange(100).cuda(), 4).cpu(), uniforms(9, torch.arange(100), 4))
