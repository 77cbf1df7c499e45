import pytest
import torch
from torch import nn

from srforge.distributed import (
    ConfigurationError,
    DistributedOptions,
    ReplicaDivergenceError,
    ShardedSampler,
    SingleDeviceStrategy,
    Topology,
)
from srforge.distributed.metric_tree import MetricSum
from srforge.distributed.testing import FakeStrategy


@pytest.fixture
def alone():
    return SingleDeviceStrategy(Topology.single(), torch.device("cpu"))


def test_collectives_of_one_process_answer_at_once(alone):
    assert alone.all_gather(torch.tensor([1, 2])).tolist() == [[1, 2]]
    assert alone.all_gather_object("x") == ["x"]
    assert alone.broadcast_object("x") == "x"
    assert alone.broadcast(torch.tensor(3)).item() == 3
    assert alone.barrier() is None
    assert alone.setup() is alone.teardown() is None


def test_one_process_keeps_the_model_as_it_is(alone):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert alone.prepare(model) is model
    with alone.no_sync(model), alone.explained_errors(model):
        model(torch.randn(2, 2)).sum().backward()
    alone.sync_buffers(model)
    alone.check_replicas(model)
    alone.refuse_unfinished_sync(model)


def test_model_compiled_before_setup_is_refused_where_wrapping_would_lose_it(alone):
    compiled = torch.compile(nn.Linear(2, 2), backend="eager")
    assert alone.is_prepared(alone.prepare(compiled))
    with pytest.raises(ConfigurationError, match=r"`model` must be a bare module.* compile what setup_device returns"):
        FakeStrategy(0, 2).prepare(torch.compile(nn.Linear(2, 2), backend="eager"))


def test_stray_parameters_are_refused_on_one_process_as_on_many(alone):
    model = nn.ModuleDict({"first": nn.Linear(2, 2), "second": nn.Linear(2, 2)})
    model.trainable_modules = lambda: {"first": model["first"]}
    with pytest.raises(ConfigurationError, match=r"`second.weight, second.bias` must be in one of"):
        alone.prepare(model)


def test_fingerprint_follows_every_parameter_and_buffer(alone):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    first = alone.fingerprint(model)
    assert len(first) == 32
    assert int(first, 16) >= 0
    model[1].running_mean[0] = 1
    second = alone.fingerprint(model)
    with torch.no_grad():
        model[0].weight[0, 0] += 1
    assert len({first, second, alone.fingerprint(model)}) == 3


def test_check_of_replicas_can_be_switched_off():
    def shifted(operation, rank, value):
        return value + 1 if isinstance(value, torch.Tensor) else value

    model = nn.Linear(2, 2)
    with pytest.raises(ReplicaDivergenceError):
        FakeStrategy(0, 2, peers=shifted).check_replicas(model)
    FakeStrategy(0, 2, peers=shifted, options=DistributedOptions(check_replicas=False)).check_replicas(model)


def test_sampler_is_this_ranks():
    sampler = FakeStrategy(1, 2).make_sampler(8, batch_size=2, shuffle=False, training=True, seed=0)
    assert isinstance(sampler, ShardedSampler)
    assert [int(key) for key in sampler] == [2, 3, 6, 7]  # the second half of each step of four


def test_reduction_of_one_process_is_the_local_mean_and_leaves_a_report(alone):
    assert alone.last_reduction is None
    tree = {"loss": MetricSum(3.0, 2), "band": {"B02": MetricSum(float("nan"), 1)}}
    reduced = alone.reduce_metrics(tree)
    assert reduced["loss"] == 1.5
    assert alone.last_reduction.non_finite


def test_rank_0_is_main():
    assert FakeStrategy(0, 2).is_main
    assert not FakeStrategy(1, 2).is_main
