"""`permute` and `uniforms` pass the tests that torch's generator passes, and that a poor generator fails.

Every number here is fixed by a key, so a test gives the same verdict each time. A statistic is turned into a z-score
(standard deviations from its expectation) and must stay below 4.5, about 7e-6 by chance.
"""

import itertools
import math

import pytest
import torch

from srforge.distributed.counter_random import permute, uniforms
from srforge.distributed.seeding import mix

LIMIT = 4.5


def permute_by_key(length, key):
    return permute(torch.arange(length), length, key)


def permute_by_torch(length, key):
    return torch.randperm(length, generator=torch.Generator().manual_seed(key))


def permute_poorly(length, key):
    """An affine map: each position comes once, but neighbours stay at one distance."""
    step = next(step for step in range(length * 3 // 5 + key % 89, 2 * length) if math.gcd(step, length) == 1)
    return (torch.arange(length) * step + key) % length


def uniforms_by_counter(key, indices, num):
    return uniforms(key, indices, num)


def uniforms_by_torch(key, indices, num):
    return torch.rand(len(indices), num, generator=torch.Generator().manual_seed(key), dtype=torch.float64)


permutations = pytest.mark.parametrize("shuffle", [permute_by_key, permute_by_torch])
numbers = pytest.mark.parametrize("draw", [uniforms_by_counter, uniforms_by_torch])


def chi_square_score(counts, expected=None):
    """z-score of a table of counts under equal (or given) expectations."""
    counts = torch.as_tensor(counts, dtype=torch.float64).flatten()
    expected = counts.mean() if expected is None else torch.as_tensor(expected, dtype=torch.float64).flatten()
    degrees = counts.numel() - 1
    # Wilson and Hilferty's cube root makes chi-square nearly normal
    ratio = ((counts - expected) ** 2 / expected).sum() / degrees
    return float((ratio ** (1 / 3) - (1 - 2 / (9 * degrees))) / math.sqrt(2 / (9 * degrees)))


def correlation_score(first, second):
    first, second = first.double() - first.double().mean(), second.double() - second.double().mean()
    return float((first * second).sum() / (first.norm() * second.norm())) * math.sqrt(first.numel())


def joint_counts(first, second, bins):
    """2-D histogram of two sequences of numbers in [0, 1)."""
    return torch.bincount((first * bins).long() * bins + (second * bins).long(), minlength=bins * bins)


def neighbour_score(shuffle, length=20011):
    images = shuffle(length, 5).double() / length
    return chi_square_score(joint_counts(images[:-1], images[1:], 10))


@permutations
def test_all_orders_of_five_come_equally_often(shuffle):
    orders = dict.fromkeys(itertools.permutations(range(5)), 0)
    for key in range(6000):
        orders[tuple(shuffle(5, mix(1, key)).tolist())] += 1
    assert abs(chi_square_score(list(orders.values()))) < LIMIT


@permutations
@pytest.mark.parametrize("length", [1000, 4096, 4097, 6007])
def test_each_position_meets_each_image_equally_often(shuffle, length):
    counts = torch.zeros(16, 16)
    for key in range(200):
        images = shuffle(length, mix(2, key))
        positions = torch.arange(length) * 16 // length
        counts += torch.bincount(positions * 16 + images * 16 // length, minlength=256).view(16, 16)
    sizes = torch.bincount(torch.arange(length) * 16 // length).double()
    expected = 200 * sizes[:, None] * sizes[None, :] / length
    # rows and columns have fixed sums: 15 * 15 free cells of 256 at a somewhat smaller variance
    statistic = float(((counts - expected) ** 2 / expected).sum())
    assert abs(statistic - 225) / math.sqrt(2 * 225) < LIMIT


@permutations
def test_images_of_neighbours_are_independent(shuffle):
    assert abs(neighbour_score(shuffle)) < LIMIT
    for lag in (1, 2, 3, 8, 128):
        images = shuffle(50021, 3)
        assert abs(correlation_score(images[:-lag], images[lag:])) < LIMIT


def test_a_poor_permutation_is_found_out():
    assert neighbour_score(permute_poorly) > 100


@permutations
def test_epochs_are_independent(shuffle):
    length = 20011
    epochs = [shuffle(length, mix(4, epoch)) for epoch in range(12)]
    for first, second in itertools.combinations(epochs, 2):
        assert abs(correlation_score(first, second)) < LIMIT
        assert abs(chi_square_score(joint_counts(first / length, second / length, 8))) < LIMIT
    # the number of positions with the same image in two epochs is Poisson with mean 1 per pair: 66 pairs
    same = sum(int((first == second).sum()) for first, second in itertools.combinations(epochs, 2))
    assert abs(same - 66) / math.sqrt(66) < LIMIT


@permutations
def test_ranks_get_samples_from_everywhere(shuffle):
    length, world_size = 40961, 8
    ranks = torch.arange(length) * world_size // length
    counts = torch.bincount(ranks * 16 + shuffle(length, 6) * 16 // length, minlength=128)
    assert abs(chi_square_score(counts)) < LIMIT


@permutations
def test_orders_rise_and_fall_as_often_as_chance_does(shuffle):
    length = 50021
    images = shuffle(length, 7)
    rises = int((images[1:] > images[:-1]).sum())
    assert abs(rises - (length - 1) / 2) / math.sqrt((length + 1) / 12) < LIMIT


def test_permute_flips_half_of_the_bits_when_one_input_bit_flips():
    bits, positions = 16, torch.arange(2**16)
    for key in (0, 1, 99):
        images = permute(positions, 2**bits, key)
        for flipped in range(bits):
            changed = images ^ permute(positions ^ (1 << flipped), 2**bits, key)
            for bit in range(bits):
                share = float((changed >> bit & 1).double().mean())
                # each pair is counted twice: 2^15 independent pairs
                assert abs(share - 0.5) * 2 * math.sqrt(2**15) < LIMIT, (key, flipped, bit)


@numbers
def test_uniforms_fill_the_interval_evenly(draw):
    sample = draw(1, torch.arange(100_000), 1).flatten()
    assert abs(chi_square_score(torch.histc(sample, 256, 0, 1))) < LIMIT
    ordered = sample.sort().values
    steps = torch.arange(1, len(sample) + 1, dtype=torch.float64) / len(sample)
    assert float((ordered - steps).abs().max()) * math.sqrt(len(sample)) < 2.4  # Kolmogorov: 2 * exp(-2 * 2.4^2) = 2e-5


@numbers
def test_uniforms_of_neighbours_and_of_one_index_are_independent(draw):
    sample = draw(2, torch.arange(50_000), 4)
    for lag in (1, 2, 16, 1024):
        assert abs(correlation_score(sample[:-lag, 0], sample[lag:, 0])) < LIMIT
    assert abs(chi_square_score(joint_counts(sample[:-1, 0], sample[1:, 0], 16))) < LIMIT
    for first, second in itertools.combinations(range(4), 2):
        assert abs(correlation_score(sample[:, first], sample[:, second])) < LIMIT
        assert abs(chi_square_score(joint_counts(sample[:, first], sample[:, second], 16))) < LIMIT
    # the next index's number must not be this index's next number
    assert abs(correlation_score(sample[1:, 0], sample[:-1, 1])) < LIMIT


@numbers
def test_uniforms_of_epochs_are_independent(draw):
    indices = torch.arange(20_000)
    epochs = [draw(mix(3, epoch), indices, 1).flatten() for epoch in range(8)]
    epochs += [draw(key, indices, 1).flatten() for key in (0, 1, 2, 3)]  # keys that differ by one
    for first, second in itertools.combinations(epochs, 2):
        assert abs(correlation_score(first, second)) < LIMIT
        assert abs(chi_square_score(joint_counts(first, second, 8))) < LIMIT


def test_uniforms_use_each_of_their_53_bits():
    words = (uniforms(4, torch.arange(50_000), 1).flatten() * 2**53).long()
    for bit in range(53):
        share = float((words >> bit & 1).double().mean())
        assert abs(share - 0.5) * 2 * math.sqrt(50_000) < LIMIT, bit
