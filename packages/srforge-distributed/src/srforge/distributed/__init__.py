"""Distributed training as an environment: start-up, sharding, gradient sync, metrics, gates and seeding."""

from srforge.distributed.active import get_active_strategy, resolve_strategy, set_active_strategy, setup_device
from srforge.distributed.data_parallel import DataParallelStrategy
from srforge.distributed.ddp import DDPStrategy
from srforge.distributed.errors import (
    CollectiveError,
    ConfigurationError,
    EmptyReductionError,
    LaunchEnvironmentError,
    ReplicaDivergenceError,
    SRForgeError,
)
from srforge.distributed.options import DistributedOptions, refuse_fsdp
from srforge.distributed.parts import load_plain_state_dict, plain_state_dict, unwrap_module
from srforge.distributed.rehearsal import rehearse
from srforge.distributed.single_device import SingleDeviceStrategy
from srforge.distributed.strategy import TrainingStrategy
from srforge.distributed.topology import Topology

__all__ = [
    "CollectiveError",
    "ConfigurationError",
    "DDPStrategy",
    "DataParallelStrategy",
    "DistributedOptions",
    "EmptyReductionError",
    "LaunchEnvironmentError",
    "ReplicaDivergenceError",
    "SRForgeError",
    "SingleDeviceStrategy",
    "Topology",
    "TrainingStrategy",
    "get_active_strategy",
    "load_plain_state_dict",
    "plain_state_dict",
    "refuse_fsdp",
    "rehearse",
    "resolve_strategy",
    "set_active_strategy",
    "setup_device",
    "unwrap_module",
]
