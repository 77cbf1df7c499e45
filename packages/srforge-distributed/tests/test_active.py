import pytest
import torch
import torch.distributed as dist
from torch import nn

from srforge.distributed import (
    ConfigurationError,
    DataParallelStrategy,
    DDPStrategy,
    DistributedOptions,
    LaunchEnvironmentError,
    SingleDeviceStrategy,
    Topology,
    get_active_strategy,
    resolve_strategy,
    set_active_strategy,
    setup_device,
)
from srforge.distributed.devices import Host
from srforge.distributed.environment_variables import SCHEDULER_TASK_COUNTS
from srforge.distributed.testing import FakeStrategy

CPU_HOST, GPU_HOST = Host(0, has_nccl=True), Host(4, has_nccl=True)
RANK_1_OF_2 = Topology(1, 1, 2, 2, "localhost", 29500)
VARIABLES = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", *SCHEDULER_TASK_COUNTS]


@pytest.fixture(autouse=True)
def _no_launcher_and_no_strategy(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    set_active_strategy(None)
    yield
    get_active_strategy().teardown()
    set_active_strategy(None)


def test_before_setup_there_is_a_strategy_of_one_process_on_the_cpu():
    strategy = get_active_strategy()
    assert (strategy.name, strategy.rank, strategy.world_size, strategy.is_main) == ("single", 0, 1, True)
    assert strategy.device == torch.device("cpu")


@pytest.mark.parametrize(
    ("device", "options", "topology", "host", "kind"),
    [
        ("auto", {}, Topology.single(), CPU_HOST, SingleDeviceStrategy),
        ("auto", {}, Topology.single(), GPU_HOST, SingleDeviceStrategy),
        ([0, 1], {}, Topology.single(), GPU_HOST, DataParallelStrategy),
        ([0], {}, Topology.single(), GPU_HOST, SingleDeviceStrategy),
        ([2], {"strategy": "data_parallel"}, Topology.single(), GPU_HOST, SingleDeviceStrategy),
        ("auto", {}, RANK_1_OF_2, CPU_HOST, DDPStrategy),
        ([0, 1], {}, RANK_1_OF_2, GPU_HOST, DDPStrategy),
        ("cpu", {"strategy": "ddp"}, Topology.single(), CPU_HOST, DDPStrategy),
        ("cpu", {"strategy": "single"}, RANK_1_OF_2, CPU_HOST, SingleDeviceStrategy),
    ],
)
def test_strategy_is_chosen_by_option_then_world_size_then_device(device, options, topology, host, kind):
    strategy = resolve_strategy(device, DistributedOptions(**options), topology=topology, host=host)
    assert type(strategy) is kind
    assert strategy.reason


def test_single_strategy_never_reads_the_launchers_variables(monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    with pytest.raises(LaunchEnvironmentError, match="strategy: single"):
        resolve_strategy("cpu", DistributedOptions())
    assert resolve_strategy("cpu", DistributedOptions(strategy="single")).world_size == 1


def test_data_parallel_under_a_launcher_is_refused():
    with pytest.raises(ConfigurationError, match="`strategy` must be auto or ddp where WORLD_SIZE is 2, but is data_p"):
        resolve_strategy([0, 1], DistributedOptions(strategy="data_parallel"), topology=RANK_1_OF_2, host=GPU_HOST)


def test_one_process_needs_no_group():
    """hosts on which gloo finds no device train alone all the same."""
    model = nn.Linear(2, 2)
    prepared, device = setup_device(model, "cpu")
    assert prepared is model
    assert device == torch.device("cpu")
    assert not dist.is_initialized()
    assert get_active_strategy().is_prepared(prepared)


def test_second_call_prepares_another_model_under_the_same_strategy():
    setup_device(nn.Linear(2, 2), "cpu", options={"strategy": "single"})
    strategy = get_active_strategy()
    second, _ = setup_device(nn.Linear(3, 3), "cpu")
    assert get_active_strategy() is strategy
    assert strategy.is_prepared(second)
    setup_device(nn.Linear(3, 3), torch.device("cpu"), options={"strategy": "single"})


def test_second_call_with_another_device_or_other_options_is_refused():
    setup_device(nn.Linear(2, 2), "cpu")
    with pytest.raises(ConfigurationError, match=r"`device` must be that of the active strategy \(cpu\), but is cuda"):
        setup_device(nn.Linear(2, 2), "cuda")
    with pytest.raises(ConfigurationError, match=r"`options` must be those of the first .*, but `strategy` differs"):
        setup_device(nn.Linear(2, 2), "cpu", options={"strategy": "single"})


def test_another_kind_of_device_than_that_of_a_strategy_chosen_otherwise_is_refused():
    set_active_strategy(FakeStrategy(1, 4))
    with pytest.raises(
        ConfigurationError, match=r"`device` must be that of the active strategy \(cpu\), but is cuda:0"
    ):
        setup_device(nn.Linear(2, 2), "cuda:0")
    assert setup_device(nn.Linear(2, 2), "auto")[1] == torch.device("cpu")


def test_refused_strategy_is_not_kept():
    with pytest.raises(ConfigurationError, match="Did you mean"):
        setup_device(nn.Linear(2, 2), "cpu", options={"stratgy": "ddp"})
    setup_device(nn.Linear(2, 2), "cpu")


@pytest.mark.parametrize(
    "options",
    [{"backend": "gloo"}, {"static_graph": False}, {"gradient_compression": "fp16"}, {"sync_batchnorm": True}],
)
def test_option_without_effect_warns(options):
    with pytest.warns(UserWarning, match=f"`{next(iter(options))}=.*` has no effect under the single strategy"):
        setup_device(nn.Linear(2, 2), "cpu", options=options)


def test_looking_for_unused_parameters_in_a_static_graph_warns():
    with pytest.warns(UserWarning, match="`find_unused_parameters=True` has no effect with `static_graph=True`"):
        setup_device(nn.Linear(2, 2), "cpu", options={"strategy": "ddp", "find_unused_parameters": True})


def test_data_set_smaller_than_the_fleet_warns(monkeypatch):
    strategy = SingleDeviceStrategy(Topology(0, 0, 4), torch.device("cpu"))
    monkeypatch.setattr("srforge.distributed.active.resolve_strategy", lambda *_: strategy)
    monkeypatch.setattr(strategy, "prepare", lambda model: model)
    with pytest.warns(UserWarning, match="`dataset` has 3 samples for 4 ranks"):
        setup_device(nn.Linear(2, 2), "cpu", [1, 2, 3])
    setup_device(nn.Linear(2, 2), "cpu", [1, 2, 3, 4])
    setup_device(nn.Linear(2, 2), "cpu", iter([]))


def test_existing_group_decides_the_backend():
    other = DDPStrategy(Topology.single(), torch.device("cpu"))
    other.setup()
    try:
        with pytest.raises(
            ConfigurationError, match="`backend` must be gloo, as in the existing process group, but is nc"
        ):
            resolve_strategy("auto", DistributedOptions(backend="nccl", strategy="ddp"), host=GPU_HOST)
        strategy = resolve_strategy("auto", DistributedOptions(strategy="ddp"), host=GPU_HOST)
        assert (strategy.backend, strategy.device) == ("gloo", torch.device("cpu"))
    finally:
        other.teardown()
