import random

import pytest
import torch

from srforge.distributed import scaffold
from srforge.distributed.active import get_active_strategy, set_active_strategy
from srforge.distributed.errors import ConfigurationError, EmptyReductionError, LaunchEnvironmentError
from srforge.distributed.testing import FakeStrategy


@pytest.fixture(autouse=True)
def _restore(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    deterministic, benchmark = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    yield
    set_active_strategy(None)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = deterministic, benchmark


def test_without_a_launcher_setup_is_alone_and_idempotent():
    assert scaffold.setup_ddp() == (0, 1, 0)
    strategy = get_active_strategy()
    assert scaffold.setup_ddp() == (0, 1, 0)
    assert get_active_strategy() is strategy
    scaffold.cleanup_ddp()
    scaffold.cleanup_ddp()
    assert get_active_strategy() is not strategy


def test_setup_keeps_a_strategy_that_was_set():
    set_active_strategy(FakeStrategy(1, 4))
    assert scaffold.setup_ddp() == (1, 4, 1)


def test_wrong_launch_environment_is_named(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(LaunchEnvironmentError, match="RANK must be in"):
        scaffold.setup_ddp()


def test_seed_and_rank_determine_python_numpy_and_torch():
    numpy = pytest.importorskip("numpy")

    def draws(seed, rank):
        scaffold.set_seed(seed, rank)
        return random.random(), float(numpy.random.rand()), torch.rand(1).item()

    assert draws(3, 1) == draws(4, 0) == draws(3, 1)
    assert all(a != b for a, b in zip(draws(3, 0), draws(3, 1), strict=True))
    assert torch.backends.cudnn.deterministic
    assert not torch.backends.cudnn.benchmark
    scaffold.set_seed(2**40)  # numpy's seeds end at 2**32
    with pytest.raises(ConfigurationError, match="`seed` \\+ `rank` must be >= 0, but is -1"):
        scaffold.set_seed(-2, 1)


def packed(values, count):
    return torch.tensor([*values, count], dtype=torch.float64)


def test_mean_without_counts_is_the_mean_over_ranks():
    set_active_strategy(FakeStrategy(1, 2, peers=[packed([1.0, 5.0], 1)]))
    tensor = torch.tensor([3.0, 1.0], requires_grad=True)
    reduced = scaffold.reduce_tensor(tensor)
    assert reduced.tolist() == [2.0, 3.0]
    assert (reduced.dtype, reduced.requires_grad, tensor.tolist()) == (torch.float32, False, [3.0, 1.0])


def test_mean_with_counts_is_the_mean_over_samples():
    set_active_strategy(FakeStrategy(0, 2, peers=[packed([4.0], 2)]))
    reduced = scaffold.reduce_tensor(torch.tensor(1.0, dtype=torch.float64), count=5)
    assert reduced.shape == ()
    assert reduced.item() == 13 / 7


def test_rank_without_samples_adds_nothing():
    set_active_strategy(FakeStrategy(0, 3, peers=[packed([4.0], 2), packed([6.0], 2)]))
    assert scaffold.reduce_tensor(torch.tensor(float("nan")), count=0).item() == 5.0


def test_nothing_counted_on_any_rank_is_an_error():
    set_active_strategy(FakeStrategy(0, 2))
    with pytest.raises(EmptyReductionError, match="`count` must be above 0 on at least one rank"):
        scaffold.reduce_tensor(torch.tensor(0.0), count=0)


def test_sum_keeps_integers_exact_and_the_argument_as_it_is():
    set_active_strategy(FakeStrategy(0, 2, peers=[torch.tensor([2**62, 5])]))
    tensor = torch.tensor([1, 2])
    reduced = scaffold.reduce_tensor(tensor, op="sum")
    assert reduced.tolist() == [2**62 + 1, 7]
    assert tensor.tolist() == [1, 2]


def test_mean_of_integers_is_no_integer():
    set_active_strategy(FakeStrategy(0, 2, peers=[packed([2.0], 1)]))
    assert scaffold.reduce_tensor(torch.tensor(1)).item() == 1.5


def test_reductions_that_do_not_exist_are_refused():
    with pytest.raises(ConfigurationError, match="`op` must be mean or sum, but is 'max'"):
        scaffold.reduce_tensor(torch.tensor(1.0), op="max")
    with pytest.raises(ConfigurationError, match="`count` must be None for a sum, but is 3"):
        scaffold.reduce_tensor(torch.tensor(1.0), op="sum", count=3)


@pytest.mark.parametrize(
    ("num_parameters", "text"),
    [(0, "0"), (950, "950"), (18_428, "18.4K"), (999_949, "999.9K"), (999_951, "1.0M"), (16_700_000, "16.7M")],
)
def test_model_size_counts_trainable_parameters_as_people_say_it(num_parameters, text):
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.empty(num_parameters, device="meta"))
    model.frozen = torch.nn.Parameter(torch.empty(7, device="meta"), requires_grad=False)
    assert scaffold.get_model_size(model) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00:00"), (59.6, "0:01:00"), (3723, "1:02:03"), (176_523, "2 days, 1:02:03")]
)
def test_time_is_written_in_hours_minutes_and_seconds(seconds, text):
    assert scaffold.format_time(seconds) == text


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf")])
def test_times_that_do_not_exist_are_refused(seconds):
    with pytest.raises(ConfigurationError, match="`seconds` must be finite and >= 0, but is"):
        scaffold.format_time(seconds)
