"""One rank of a fleet that is not there: torch's ``fake`` process group answers every collective at once."""

import cProfile
import pstats
import tracemalloc
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from srforge.distributed import get_active_strategy, rehearse, setup_device
from srforge.distributed.parts import reducers


def completed(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Stand in for the all-reduce of gradients, for which the fake group has no answer."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def start_and_run_an_epoch() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 3, 3))
    model, _ = setup_device(model, "cpu", range(10_000_000), options={"backend": "gloo"})
    strategy = get_active_strategy()
    for part in reducers(model):
        part.register_comm_hook(None, completed)
    rehearse(model, lambda: model(torch.ones(2, 3, 8, 8)).mean().backward())
    sampler = strategy.make_sampler(10_000_000, batch_size=4, shuffle=True, training=True, seed=1)
    sampler.set_epoch(1)
    keys = iter(sampler)
    for _ in range(8):
        next(keys)
    strategy.sync_buffers(model)
    strategy.check_replicas(model)


def work_of_rank(rank: int, world_size: int) -> dict[str, Any]:
    """Return what a start and an epoch's bookkeeping cost one rank: function calls and peak memory in bytes."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    start_and_run_an_epoch()  # imports and caches
    tracemalloc.start()
    start_and_run_an_epoch()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    profile = cProfile.Profile()
    profile.runcall(start_and_run_an_epoch)
    strategy = get_active_strategy()
    found = {"rank": strategy.rank, "world_size": strategy.world_size}
    return {**found, "calls": pstats.Stats(profile).total_calls, "bytes": peak}
