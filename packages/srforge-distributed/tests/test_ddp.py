"""DDP in a fleet of one, over a store in memory; several ranks are in ``tests-integration``."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from srforge.distributed import (
    CollectiveError,
    ConfigurationError,
    DDPStrategy,
    DistributedOptions,
    Topology,
    main_process_only,
    plain_state_dict,
    set_active_strategy,
)
from srforge.distributed.parts import reducers
from srforge.distributed.testing import FakeStrategy


def strategy_of(**options):
    return DDPStrategy(Topology.single(), torch.device("cpu"), DistributedOptions(**options))


@pytest.fixture
def strategy():
    strategy = strategy_of()
    strategy.setup()
    yield strategy
    strategy.teardown()


def composite():
    model = nn.ModuleDict({"first": nn.Linear(2, 2), "second": nn.Linear(2, 2), "frozen": nn.Linear(2, 2)})
    model["frozen"].requires_grad_(False)
    model.trainable_modules = lambda: {name: model[name] for name in model}
    return model


def test_plain_model_is_wrapped_whole_and_composites_by_part(strategy):
    plain = strategy.prepare(nn.Linear(2, 2))
    assert isinstance(plain, DistributedDataParallel)
    assert strategy.trainable_parts(plain) == {"": plain}
    model = composite()
    assert strategy.prepare(model) is model
    kinds = {name: type(part) for name, part in strategy.trainable_parts(model).items()}
    assert kinds == {"first": DistributedDataParallel, "second": DistributedDataParallel, "frozen": nn.Linear}
    assert strategy.is_prepared(model)
    assert strategy.prepare(model) is model


def test_nested_parts_are_wrapped_where_they_stand(strategy):
    model = nn.Module()
    model.inner = nn.ModuleDict({"deep": nn.Linear(2, 2)})
    model.trainable_modules = lambda: {"inner.deep": model.inner["deep"]}
    strategy.prepare(model)
    assert isinstance(model.inner["deep"], DistributedDataParallel)
    assert list(plain_state_dict(model)) == ["inner.deep.weight", "inner.deep.bias"]


def test_bare_model_and_copies_do_not_count_as_prepared(strategy):
    bare = nn.Linear(2, 2)
    prepared = strategy.prepare(bare)
    assert strategy.is_prepared(prepared)
    assert strategy.is_prepared(torch.compile(prepared, backend="eager"))
    assert not strategy.is_prepared(bare)
    assert not strategy.is_prepared(nn.Linear(2, 2))
    assert strategy.unwrap(prepared) is bare


def test_model_that_somebody_wrapped_is_refused(strategy):
    wrapped = DistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(ConfigurationError, match="`model` must be a bare module, but is DistributedDataParallel"):
        strategy.prepare(wrapped)
    with pytest.raises(ConfigurationError, match=r"`model.0` must be a bare module"):
        strategy.prepare(nn.Sequential(wrapped))


def test_wrapper_has_a_static_graph_and_no_buffer_broadcasts(strategy):
    part = strategy.prepare(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    assert part.static_graph
    assert part.gradient_as_bucket_view
    assert not part.will_sync_module_buffers()
    other = strategy_of(static_graph=False, find_unused_parameters=True).prepare(nn.Linear(2, 2))
    assert not other.static_graph
    assert other.find_unused_parameters


def test_no_sync_covers_every_part(strategy):
    model = strategy.prepare(composite())
    parts = list(reducers(model))
    assert len(parts) == 2
    with strategy.no_sync(model):
        assert not any(part.require_backward_grad_sync for part in parts)
    assert all(part.require_backward_grad_sync for part in parts)
    with strategy.no_sync(torch.compile(model, backend="eager")):
        assert not any(part.require_backward_grad_sync for part in parts)


def test_stray_parameter_is_refused_before_anything_is_wrapped(strategy):
    model = composite()
    model["late"] = nn.Linear(2, 2)
    model.trainable_modules = lambda: {"first": model["first"], "second": model["second"]}
    with pytest.raises(
        ConfigurationError, match=r"`late.weight, late.bias` must be in one of the model's trainable parts"
    ):
        strategy.prepare(model)
    assert type(model["first"]) is nn.Linear


def test_sync_batchnorm_is_refused_on_the_cpu_with_the_reason():
    strategy = strategy_of(sync_batchnorm=True)
    with pytest.raises(
        ConfigurationError, match="`sync_batchnorm` must be false on cpu, but is true: torch's SyncBatch"
    ):
        strategy.prepare(nn.BatchNorm1d(2))


def test_bf16_gradients_are_refused_without_nccl():
    with pytest.raises(ConfigurationError, match="`gradient_compression` must be fp16 or none with gloo, but is bf16"):
        strategy_of(gradient_compression="bf16")


def test_setup_and_teardown_may_come_twice():
    strategy = strategy_of()
    strategy.setup()
    strategy.setup()
    assert dist.is_initialized()
    strategy.teardown()
    strategy.teardown()
    assert not dist.is_initialized()


def test_existing_group_is_adopted_and_left_open(strategy):
    second = strategy_of()
    second.setup()
    second.teardown()
    assert dist.is_initialized()


@pytest.mark.parametrize("operation", ["all_gather", "all_gather_object", "broadcast", "broadcast_object", "barrier"])
def test_collective_inside_a_gate_is_refused_and_not_hung(strategy, operation):
    set_active_strategy(FakeStrategy(0, 2))
    arguments = () if operation == "barrier" else (torch.zeros(1),)
    gated = main_process_only(lambda: getattr(strategy, operation)(*arguments))
    try:
        with pytest.raises(CollectiveError, match=f"`{operation}` must be called on every rank"):
            gated()
    finally:
        set_active_strategy(None)
