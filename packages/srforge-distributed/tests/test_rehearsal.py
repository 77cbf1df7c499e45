import random

import numpy as np
import pytest
import torch
from torch import nn

from srforge.distributed import ConfigurationError, rehearse, set_active_strategy
from srforge.distributed.testing import FakeStrategy


@pytest.fixture
def strategy():
    strategy = FakeStrategy(1, 2)
    set_active_strategy(strategy)
    yield strategy
    set_active_strategy(None)


class Restless(nn.Module):
    """Changes everything that a forward can change."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("replaced", torch.zeros(2))
        self.register_buffer("late", None)

    def forward(self, batch):
        self.replaced = self.replaced + 1
        self.late = torch.ones(1)
        self.eval()
        self.train()
        return nn.functional.dropout(self.norm(self.linear(batch)))


def test_unprepared_model_is_refused(strategy):
    with pytest.raises(ConfigurationError, match="`model` must be what setup_device returned, but is a Linear"):
        rehearse(nn.Linear(2, 2), lambda: None)
    bare = nn.Linear(2, 2)
    strategy.prepare(bare)
    with pytest.raises(ConfigurationError, match="ranks would train apart"):
        rehearse(nn.Sequential(bare), lambda: None)


def test_unprepared_model_is_refused_before_setup_device_too():
    with pytest.raises(ConfigurationError, match="did not prepare"):
        rehearse(nn.Linear(2, 2), lambda: None)


def test_compiled_model_counts_as_prepared(strategy):
    model = torch.compile(strategy.prepare(nn.Linear(2, 2)), backend="eager")
    rehearse(model, lambda: None)


def test_two_passes_leave_no_trace(strategy):
    model = strategy.prepare(Restless())
    model.norm.eval()
    model.linear.bias.requires_grad_(False)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    replaced = model.replaced
    modes = [module.training for module in model.modules()]
    draws = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # noqa: NPY002 - the global one is meant
    seen = []

    def forward_backward():
        seen.append([parameter.grad for parameter in model.parameters()])
        random.random(), np.random.rand(), torch.rand(1)  # noqa: NPY002 - they move the generators
        model.linear.bias.requires_grad_(True)
        model(torch.randn(4, 3)).square().mean().backward()
        assert model.linear.weight.grad is not None

    rehearse(model, forward_backward)
    assert seen == [[None] * 4] * 2
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert model.replaced is replaced
    assert model.late is None
    assert [module.training for module in model.modules()] == modes
    assert not model.linear.bias.requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())
    now = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # noqa: NPY002 - as above
    assert now == draws


def test_failure_leaves_no_trace_either(strategy):
    model = strategy.prepare(Restless())

    def fail():
        model(torch.randn(4, 3)).mean().backward()
        raise KeyError("batch")

    before = torch.get_rng_state()
    with pytest.raises(KeyError, match="batch"):
        rehearse(model, fail)
    assert model.replaced.tolist() == [0, 0]
    assert int(model.norm.num_batches_tracked) == 0
    assert model.linear.weight.grad is None
    assert torch.equal(torch.get_rng_state(), before)
