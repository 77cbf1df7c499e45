"""Distributed training as an environment: start-up, sharding, gradient sync, metrics, gates and seeding."""

from srforge.distributed.batch_sharding import ShardedBatchSampler
from srforge.distributed.counter_random import permute, uniforms
from srforge.distributed.epochs import begin_epoch
from srforge.distributed.iterable_shards import ShardedIterable, stop_together
from srforge.distributed.seeding import mix, preserved_rng, resolve_seed, seed_epoch, seed_sample
from srforge.distributed.shard_plan import ShardPlan
from srforge.distributed.sharding import SampleKey, ShardedSampler, plan_of

__all__ = [
    "SampleKey",
    "ShardPlan",
    "ShardedBatchSampler",
    "ShardedIterable",
    "ShardedSampler",
    "begin_epoch",
    "mix",
    "permute",
    "plan_of",
    "preserved_rng",
    "resolve_seed",
    "seed_epoch",
    "seed_sample",
    "stop_together",
    "uniforms",
]
