"""The strategy of this process: resolved once by ``setup_device``, asked for everywhere after it."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from srforge.distributed.announcements import say_once
from srforge.distributed.data_parallel import DataParallelStrategy
from srforge.distributed.ddp import DDPStrategy
from srforge.distributed.devices import (
    DeviceRequest,
    Host,
    fleet_backend_and_device,
    local_device,
    parallel_devices,
    requested_devices,
)
from srforge.distributed.errors import ConfigurationError
from srforge.distributed.options import DistributedOptions
from srforge.distributed.single_device import SingleDeviceStrategy
from srforge.distributed.strategy import TrainingStrategy
from srforge.distributed.topology import Topology

_ALONE = SingleDeviceStrategy(Topology.single(), torch.device("cpu"))
_active: TrainingStrategy = _ALONE
_request: tuple[Any, ...] | None = None


def get_active_strategy() -> TrainingStrategy:
    """Return the strategy of this process; before ``setup_device``, a single-process CPU strategy."""
    return _active


def is_strategy_chosen() -> bool:
    """Return whether ``setup_device`` or ``set_active_strategy`` has chosen the strategy of this process."""
    return _active is not _ALONE


def set_active_strategy(strategy: TrainingStrategy | None) -> None:
    """Make ``strategy`` the active one, None for none; meant for tests and for own launchers."""
    global _active, _request  # noqa: PLW0603 - one strategy per process is the meaning of this module
    _active = _ALONE if strategy is None else strategy
    _request = None


def setup_device(
    model: nn.Module,
    device: DeviceRequest,
    dataset: Any = None,
    *,
    options: DistributedOptions | Mapping[str, Any] | None = None,
) -> tuple[nn.Module, torch.device]:
    """Resolve the strategy of this process, once, and prepare a model under it.

    Build optimizers after this call. A second call prepares another model under the same strategy.

    Args:
        model: The bare model; see ``TrainingStrategy.prepare`` for composites.
        device: ``auto``, a device, a CUDA index, or a list of these.
        dataset: Training data set, for start-up checks only.
        options: Options, or their configuration keys.

    Returns:
        The prepared model and the device to put batches on.

    Raises:
        ConfigurationError: Device, options or model cannot work, or differ from the first call's.
        LaunchEnvironmentError: The launcher's variables are wrong.

    Collective: every rank must call.
    """
    global _active, _request
    if not isinstance(options, DistributedOptions):
        options = None if options is None and _active is not _ALONE else DistributedOptions.from_mapping(options)
    request = requested_devices(device)
    if _active is _ALONE:
        assert options is not None
        strategy = resolve_strategy(device, options)
        strategy.setup()
        _active, _request = strategy, tuple(request)
        _warn_without_effect(strategy)
    else:
        _refuse_other_request(request, options)
    _check_dataset(dataset)
    return _active.prepare(model), _active.device


def resolve_strategy(
    device: DeviceRequest, options: DistributedOptions, *, topology: Topology | None = None, host: Host | None = None
) -> TrainingStrategy:
    """Choose a strategy; opens nothing.

    Args:
        device: What the user said.
        options: The options.
        topology: The place in the fleet; None reads it from the process group that exists, or the environment.
        host: What the host offers; None asks torch.

    Raises:
        ConfigurationError: Device and options cannot work here.
        LaunchEnvironmentError: The launcher's variables are wrong.
    """
    host = Host.of_this_process() if host is None else host
    num_devices = len(requested_devices(device))
    strategy: TrainingStrategy
    if options.strategy == "single":
        strategy = SingleDeviceStrategy(Topology.single(), local_device(device, host), options)
        strategy.reason = "strategy is single"
        return strategy
    backend = options.backend
    if topology is None:
        topology, backend = _topology_and_backend(backend)
    if options.strategy == "ddp" or (options.strategy == "auto" and topology.world_size > 1):
        backend, own = fleet_backend_and_device(device, backend, topology.local_rank, host)
        strategy = DDPStrategy(topology, own, options, backend=backend)
        strategy.reason = "strategy is ddp" if options.strategy == "ddp" else f"WORLD_SIZE is {topology.world_size}"
        return strategy
    if topology.world_size > 1:
        raise ConfigurationError(
            f"`strategy` must be auto or ddp where WORLD_SIZE is {topology.world_size}, but is {options.strategy}: "
            "every process would train a model of its own. Launch with python instead of torchrun, or change it."
        )
    if options.strategy == "data_parallel" or num_devices > 1:
        devices = parallel_devices(device, host)
        if len(devices) > 1:
            strategy = DataParallelStrategy(devices, options)
            strategy.reason = f"device lists {len(devices)} devices"
            return strategy
        say_once("data_parallel over a list of one device: training on that device alone.")
        device = devices[0]
    strategy = SingleDeviceStrategy(topology, local_device(device, host), options)
    strategy.reason = "one process, one device"
    return strategy


def _topology_and_backend(backend: str) -> tuple[Topology, str]:
    """Return those of the process group that exists (Ray Train opens one), else the environment's and the option."""
    if not (dist.is_available() and dist.is_initialized()):
        return Topology.from_environment(), backend
    existing = dist.get_backend()
    if existing in ("nccl", "gloo"):  # groups of several backends choose by device
        if backend not in ("auto", existing):
            raise ConfigurationError(
                f"`backend` must be {existing}, as in the existing process group, but is {backend}. Leave it at auto."
            )
        backend = existing
    return Topology.from_environment(group=(dist.get_rank(), dist.get_world_size())), backend


def _refuse_other_request(request: list[torch.device | None], options: DistributedOptions | None) -> None:
    if _request is None:  # the strategy was chosen otherwise: by set_active_strategy, by scaffold.setup_ddp
        differs = any(entry is not None and entry.type != _active.device.type for entry in request)
    else:
        differs = _request != tuple(request) and request != [_active.device]
    if differs:
        raise ConfigurationError(
            f"`device` must be that of the active strategy ({_active.device}), but is "
            f"{', '.join('auto' if entry is None else str(entry) for entry in request)}. One process trains under one "
            "strategy: give every setup_device call the same device."
        )
    if options is not None and options != _active.options:
        raise ConfigurationError(
            f"`options` must be those of the first setup_device call, but {_difference(options)} differs. "
            "Leave them out of later calls."
        )


def _difference(options: DistributedOptions) -> str:
    first, second = (vars(each) for each in (_active.options, options))
    return ", ".join(f"`{name}`" for name in first if first[name] != second[name])


def _warn_without_effect(strategy: TrainingStrategy) -> None:
    """Warn of options that were changed and change nothing under this strategy."""
    changed = strategy.options.changed()
    idle = {"backend", "timeout_minutes", "static_graph", "find_unused_parameters", "sync_batchnorm"}
    idle |= {"gradient_compression", "check_replicas"}
    for name, value in changed.items():
        if not isinstance(strategy, DDPStrategy) and name in idle:
            warnings.warn(
                f"`{name}={value}` has no effect under the {strategy.name} strategy: there is one process.",
                stacklevel=3,
            )
    if isinstance(strategy, DDPStrategy) and strategy.options.static_graph and strategy.options.find_unused_parameters:
        warnings.warn(
            "`find_unused_parameters=True` has no effect with `static_graph=True`: set static_graph to false as well.",
            stacklevel=3,
        )


def _check_dataset(dataset: Any) -> None:
    """Warn of a data set that leaves ranks or devices without a sample."""
    if dataset is None or not hasattr(dataset, "__len__"):
        return
    num_samples = len(dataset)
    if isinstance(_active, DataParallelStrategy):
        sharers, what = len(_active.devices), "devices"
    else:
        sharers, what = _active.world_size, "ranks"
    if num_samples < sharers:
        warnings.warn(
            f"`dataset` has {num_samples} samples for {sharers} {what}: some will have none of their own in a step.",
            stacklevel=3,
        )
