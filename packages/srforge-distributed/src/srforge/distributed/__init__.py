"""Distributed training as an environment: start-up, sharding, gradient sync, metrics, gates and seeding."""

from srforge.distributed.active import get_active_strategy, resolve_strategy, set_active_strategy, setup_device
from srforge.distributed.agreement import require_same
from srforge.distributed.batch_sharding import ShardedBatchSampler
from srforge.distributed.breadcrumbs import note_place
from srforge.distributed.counter_random import permute, uniforms
from srforge.distributed.data_parallel import DataParallelStrategy
from srforge.distributed.ddp import DDPStrategy
from srforge.distributed.entrypoint import rank_entrypoint
from srforge.distributed.epochs import begin_epoch
from srforge.distributed.errors import (
    CollectiveError,
    ConfigurationError,
    EmptyReductionError,
    LaunchEnvironmentError,
    ReplicaDivergenceError,
    SRForgeError,
)
from srforge.distributed.gate_scope import inside_gate
from srforge.distributed.gates import every_rank, is_main_process, main_process_only
from srforge.distributed.iterable_shards import ShardedIterable, stop_together
from srforge.distributed.main_work import main_work
from srforge.distributed.metric_tree import MetricSum
from srforge.distributed.options import DistributedOptions, refuse_fsdp
from srforge.distributed.ordered_gather import gather_in_order
from srforge.distributed.parts import copy_unwrapped, load_plain_state_dict, plain_state_dict, unwrap_module
from srforge.distributed.reductions import ReductionReport
from srforge.distributed.rehearsal import rehearse
from srforge.distributed.seeding import mix, preserved_rng, resolve_seed, seed_epoch, seed_sample
from srforge.distributed.shard_plan import ShardPlan
from srforge.distributed.sharding import SampleKey, ShardedSampler, plan_of
from srforge.distributed.single_device import SingleDeviceStrategy
from srforge.distributed.strategy import TrainingStrategy
from srforge.distributed.termination import on_exit
from srforge.distributed.topology import Topology

__all__ = [
    "CollectiveError",
    "ConfigurationError",
    "DDPStrategy",
    "DataParallelStrategy",
    "DistributedOptions",
    "EmptyReductionError",
    "LaunchEnvironmentError",
    "MetricSum",
    "ReductionReport",
    "ReplicaDivergenceError",
    "SRForgeError",
    "SampleKey",
    "ShardPlan",
    "ShardedBatchSampler",
    "ShardedIterable",
    "ShardedSampler",
    "SingleDeviceStrategy",
    "Topology",
    "TrainingStrategy",
    "begin_epoch",
    "copy_unwrapped",
    "every_rank",
    "gather_in_order",
    "get_active_strategy",
    "inside_gate",
    "is_main_process",
    "load_plain_state_dict",
    "main_process_only",
    "main_work",
    "mix",
    "note_place",
    "on_exit",
    "permute",
    "plain_state_dict",
    "plan_of",
    "preserved_rng",
    "rank_entrypoint",
    "refuse_fsdp",
    "rehearse",
    "require_same",
    "resolve_seed",
    "resolve_strategy",
    "seed_epoch",
    "seed_sample",
    "set_active_strategy",
    "setup_device",
    "stop_together",
    "uniforms",
    "unwrap_module",
]
