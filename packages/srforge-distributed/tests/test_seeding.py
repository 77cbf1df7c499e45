import logging
import pickle
import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from srforge.distributed.errors import ConfigurationError
from srforge.distributed.seeding import capture_rng, mix, preserved_rng, resolve_seed, seed_epoch, seed_sample
from srforge.distributed.sharding import SampleKey
from srforge.distributed.testing import FakeStrategy


@pytest.fixture(autouse=True)
def _own_generators():
    with preserved_rng():
        yield


def draw():
    return random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002 - the generator under test


def test_mix_keeps_its_values_between_versions():
    # the first two words of SplitMix64 seeded with 0, as its authors publish them: mix(0) and mix(golden ratio)
    assert mix(0) == 0xE220A8397B1DCDAF
    assert mix(0x9E3779B97F4A7C15) == 0x6E789E6AA1B965F4
    assert [mix(1, 2), mix(1, 2, 3), mix(2**64 - 1, 0)] == [
        6165558766200589692,
        8952801392542201019,
        6755974106381971767,
    ]


def test_mix_depends_on_order_number_and_every_part():
    seeds = {mix(seed, *parts) for seed in range(20) for parts in [(), (0,), (0, 0), (1, 2), (2, 1), (-1,), (2**63,)]}
    assert len(seeds) == 20 * 7
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert len({mix(0, epoch, index) for epoch in range(100) for index in range(100)}) == 10_000


def test_mix_takes_the_integers_of_numpy_and_torch():
    assert mix(np.int64(5), np.int32(-1), torch.tensor(3)) == mix(5, -1, 3)
    with pytest.raises(TypeError):
        mix(5, 1.5)


def test_seeds_of_epochs_ranks_and_samples_differ_in_every_generator():
    seen = []
    for seed in (0, 1):
        for epoch in range(3):
            for number in range(3):
                for function in (seed_epoch, seed_sample):
                    function(seed, epoch, number)
                    seen.append(draw())
    for generator in zip(*seen, strict=True):
        assert len(set(generator)) == len(seen)


@pytest.mark.parametrize("function", [seed_epoch, seed_sample])
def test_the_same_numbers_give_the_same_draws(function):
    function(3, 1, 2)
    first = draw()
    draw()
    function(3, 1, 2)
    assert draw() == first


def test_a_sample_drawn_twice_in_an_epoch_is_seeded_twice():
    draws = []
    for key in (5, SampleKey(5, 2), SampleKey(5, 2, 1), SampleKey(5, 2, 2)):
        seed_sample(0, 2, key)
        draws.append(draw())
    assert draws[0] == draws[1]
    assert len(set(draws)) == 3


def test_seed_sample_leaves_accelerators_alone(monkeypatch):
    def refuse(*_):
        raise AssertionError("walks all accelerators")

    monkeypatch.setattr(torch, "manual_seed", refuse)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", refuse)
    seed_sample(0, 0, 0)


def test_preserved_rng_restores_every_generator_after_draws_seeds_and_errors():
    seed_epoch(0, 0, 0)
    expected = draw()
    seed_epoch(0, 0, 0)
    with pytest.raises(ZeroDivisionError), preserved_rng():
        1 / ((draw() and seed_epoch(9, 9, 9)) or 0)
    assert draw() == expected


def test_capture_rng_can_be_put_back_many_times():
    restore = capture_rng(cuda=True)
    first = draw()
    for _ in range(2):
        restore()
        assert draw() == first


def test_numpy_is_seeded_if_loaded_and_never_loaded():
    program = """
import sys
sys.modules["numpy"] = None  # importing it fails, as where it is not installed
from srforge.distributed.seeding import preserved_rng, seed_epoch
del sys.modules["numpy"]
with preserved_rng():
    seed_epoch(0, 0, 0)
assert "numpy" not in sys.modules
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, timeout=60)


def test_a_seed_that_is_given_needs_no_collective(caplog):
    strategy = FakeStrategy(1, 4)
    assert resolve_seed(12, strategy) == 12
    assert strategy.calls == []
    assert not caplog.records


def test_a_seed_that_is_not_given_is_drawn_by_rank_0_and_reported_once(caplog):
    with caplog.at_level(logging.WARNING):
        assert resolve_seed(None, FakeStrategy(1, 2, peers=[777])) == 777
        assert not caplog.records
        seed = resolve_seed(None, FakeStrategy(0, 2))
    assert [record.getMessage() for record in caplog.records] == [
        f"No seed was given: drew seed={seed} for all ranks. Pass it to repeat this run."
    ]
    assert resolve_seed(None, FakeStrategy(0, 2)) != seed
    assert resolve_seed(seed, FakeStrategy(0, 2)) == seed


@pytest.mark.parametrize("seed", [-1, 2**63, 1.0, "1", True])
def test_a_seed_that_is_no_seed_is_refused(seed):
    with pytest.raises(ConfigurationError, match=r"`seed` must be an integer in \[0, 2\^63\) or None, but is"):
        resolve_seed(seed, FakeStrategy(0, 1))


def test_sample_keys_survive_pickling_into_workers():
    for key in (SampleKey(3), SampleKey(4, 2), SampleKey(5, 6, 7)):
        for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
            copy = pickle.loads(pickle.dumps(key, protocol))
            assert (int(copy), copy.epoch, copy.draw) == (int(key), key.epoch, key.draw)
