import pytest
import torch

from srforge.distributed import ConfigurationError, require_same, set_active_strategy
from srforge.distributed.testing import FakeStrategy


@pytest.fixture(autouse=True)
def nothing_stays_active():
    yield
    set_active_strategy(None)


def others(told):
    """Answers of rank 1 of 2: its own digest (any other one), then its values."""
    return lambda operation, rank, value: value + 1 if isinstance(value, torch.Tensor) else told


def test_equal_values_cost_one_small_collective():
    strategy = FakeStrategy(1, 3)
    set_active_strategy(strategy)
    require_same("configuration", {"epochs": 3, "lr": 0.1})
    assert strategy.calls == ["all_gather"]


def test_one_process_asks_nobody():
    require_same("configuration", {"epochs": 3})


def test_what_differs_is_named_with_rank_and_both_values():
    set_active_strategy(FakeStrategy(0, 2, peers=others({"epochs": "4", "lr": "0.1", "new": "1"})))
    message = (
        r"`configuration` must be the same on every rank, but `epochs` is 3 on rank 0 and 4 on rank 1; "
        r"`new` is missing on rank 0 and 1 on rank 1\. Give every rank"
    )
    with pytest.raises(ConfigurationError, match=message):
        require_same("configuration", {"epochs": 3, "lr": 0.1})


def test_order_of_the_keys_does_not_matter():
    digests = []

    def listen(operation, rank, value):
        digests.append(value.tolist())
        return value

    for values in ({"a": 1, "b": 2}, {"b": 2, "a": 1}, {"a": 1, "b": 3}):
        set_active_strategy(FakeStrategy(0, 2, peers=listen))
        require_same("configuration", values)
    assert digests[0] == digests[1]
    assert digests[0] != digests[2]
