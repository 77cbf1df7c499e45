"""On a host without GPUs ``DataParallel`` passes its input through: structure, names and numbers are tested here."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel

from srforge.distributed import DataParallelStrategy, plain_state_dict

CPU = torch.device("cpu")


@pytest.fixture
def strategy():
    if torch.cuda.is_available():
        pytest.skip("DataParallel over CPUs passes its input through on hosts without a GPU only")
    return DataParallelStrategy([CPU, CPU])


def test_outputs_live_on_the_first_device(strategy):
    assert (strategy.name, strategy.device, strategy.world_size) == ("data_parallel", CPU, 1)
    assert strategy.devices == [CPU, CPU]


def test_plain_model_is_wrapped_whole_and_unwraps(strategy):
    bare = nn.Linear(2, 2)
    model = strategy.prepare(bare)
    assert isinstance(model, DataParallel)
    assert strategy.unwrap(model) is bare
    assert strategy.is_prepared(model)
    assert list(plain_state_dict(model)) == ["weight", "bias"]


def test_composites_are_wrapped_by_part(strategy):
    model = nn.ModuleDict({"first": nn.Linear(2, 2), "frozen": nn.Linear(2, 2).requires_grad_(False)})
    model.trainable_modules = lambda: dict(model.items())
    parts = strategy.trainable_parts(strategy.prepare(model))
    assert {name: type(part) for name, part in parts.items()} == {"first": DataParallel, "frozen": nn.Linear}


@pytest.mark.parametrize("num_samples", [1, 3, 4])
def test_short_batch_weighs_each_sample_once(strategy, num_samples):
    """The loss is taken over the gathered outputs, so an uneven split changes nothing."""
    bare = nn.Linear(2, 2)
    batch = torch.randn(num_samples, 2)
    expected = torch.autograd.grad(bare(batch).square().mean(), bare.weight)[0]
    strategy.prepare(bare)(batch).square().mean().backward()
    torch.testing.assert_close(bare.weight.grad, expected)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_one_gpu_trains_the_same_through_the_wrapper():
    strategy = DataParallelStrategy([torch.device("cuda", 0)])
    bare = nn.Linear(2, 2)
    model = strategy.prepare(bare)
    batch = torch.randn(3, 2, device="cuda")
    expected = torch.autograd.grad(bare(batch).square().mean(), bare.weight)[0]
    model(batch).square().mean().backward()
    torch.testing.assert_close(bare.weight.grad, expected)
