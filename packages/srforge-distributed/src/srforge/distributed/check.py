"""``python -m srforge.distributed check``: what a fleet is made of, whether its ranks reach each other, and how fast.

Run it as the training is run (under torchrun, or behind the shim), before an hour of training is spent on finding out.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist

from srforge.distributed.active import resolve_strategy
from srforge.distributed.breadcrumbs import note_place
from srforge.distributed.check_report import as_text, problems_of, warnings_of
from srforge.distributed.entrypoint import rank_entrypoint
from srforge.distributed.environment_variables import (
    GLOO_SOCKET_IFNAME,
    NCCL_SOCKET_IFNAME,
    asked_interface,
    visible_devices,
)
from srforge.distributed.networking import interface_name, own_address_towards
from srforge.distributed.options import DistributedOptions
from srforge.distributed.strategy import TrainingStrategy

_SMALLEST_BYTES = 4096
_SIZE_FACTOR = 16
_REPEATS = 5
_CLOCK_ROUNDS = 9
_MATRIX_SIZE = 384
_MATRIX_REPEATS = 9


@rank_entrypoint
def check_fleet(*, device: str, backend: str, timeout: float, max_mebibytes: float, as_json: bool) -> int:
    """Examine the fleet that this process is a rank of; rank 0 prints the report.

    Args:
        device: As in ``setup_device``.
        backend: ``auto``, ``nccl`` or ``gloo``.
        timeout: How long ranks wait for each other, in seconds, > 0.
        max_mebibytes: Largest message that is timed, in MiB.
        as_json: Print JSON and nothing else to stdout.

    Returns:
        0 if everything worked, 1 otherwise; the same on every rank.

    Raises:
        LaunchEnvironmentError: Ranks did not arrive, or cannot work together; names them.

    Collective: every rank must call.
    """
    options = DistributedOptions(backend=backend, timeout_minutes=timeout / 60)
    strategy = resolve_strategy(device, options)
    strategy.setup()
    report = examine(strategy, int(max_mebibytes * 2**20))
    if strategy.is_main:
        text = json.dumps(report, indent=2) if as_json else as_text(report)
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    strategy.barrier()
    strategy.teardown()
    return 1 if report["problems"] else 0


def examine(strategy: TrainingStrategy, max_bytes: int) -> dict[str, Any]:
    """Return the report, the same on every rank.

    Args:
        strategy: Set up.
        max_bytes: Largest message that is timed.

    Collective: every rank must call.
    """
    report: dict[str, Any] = {"world_size": strategy.world_size, "strategy": strategy.reason}
    note_place("rank table")
    report["ranks"] = strategy.all_gather_object(describe_rank(strategy))
    note_place("clocks")
    report["clock_skew_seconds"] = _clock_skew(strategy)
    report["collectives"] = _collectives(strategy)
    report["all_reduce"] = list(_timings(strategy, max_bytes))
    note_place("speed of each rank")
    report["matmul_milliseconds"] = strategy.all_gather_object(_matmul_milliseconds(strategy.device))
    report["problems"] = problems_of(report)
    report["warnings"] = warnings_of(report)
    return report


def describe_rank(strategy: TrainingStrategy) -> dict[str, Any]:
    """Return this rank's row of the table."""
    topology, device = strategy.topology, strategy.device
    backend = getattr(strategy, "backend", "none")
    address = own_address_towards(topology.master_addr) if topology.master_addr else "?"
    asked = asked_interface(NCCL_SOCKET_IFNAME if backend == "nccl" else GLOO_SOCKET_IFNAME)
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    uuid = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    return {
        "rank": strategy.rank,
        "local_rank": topology.local_rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "device": str(device),
        "device_uuid": uuid,
        "backend": backend,
        "interface": asked or interface_name(address) or address,
        "address": address,
        "torch": torch.__version__,
        "srforge": metadata.version("srforge-distributed"),
        "python": platform.python_version(),
        "gpus": gpus,
        "visible_devices": visible_devices(),
    }


def _clock_skew(strategy: TrainingStrategy) -> list[float]:
    """Return how far each rank's clock is ahead of rank 0's, in seconds; as good as a barrier is sharp."""
    rounds = []
    for _ in range(_CLOCK_ROUNDS):
        strategy.barrier()
        rounds.append(strategy.all_gather(torch.tensor(time.time(), dtype=torch.float64)).tolist())
    return [statistics.median(each[rank] - each[0] for each in rounds) for rank in range(strategy.world_size)]


def _collectives(strategy: TrainingStrategy) -> dict[str, dict[str, Any]]:
    """Return, by collective, the ranks on which it gave a wrong result, and its seconds on the slowest rank."""
    found: dict[str, dict[str, Any]] = {}
    for name, is_right in _trials(strategy).items():
        note_place(name)
        started = time.perf_counter()
        right = is_right()
        answers = strategy.all_gather_object((right, time.perf_counter() - started))
        wrong = [rank for rank, (each, _) in enumerate(answers) if not each]
        found[name] = {"wrong_on_ranks": wrong, "seconds": max(seconds for _, seconds in answers)}
    return found


def _trials(strategy: TrainingStrategy) -> dict[str, Callable[[], bool]]:
    """Return each collective as a function that runs it and says whether the result is the right one."""
    world_size, rank = strategy.world_size, strategy.rank
    own = torch.full((3,), float(rank + 1), device=strategy.device)
    expected = torch.arange(1.0, world_size + 1).unsqueeze(1).expand(-1, 3)

    def all_reduce() -> bool:
        total = own.clone()
        dist.all_reduce(total)
        return total.tolist() == [world_size * (world_size + 1) / 2] * 3

    def barrier() -> bool:
        strategy.barrier()
        return True

    trials = {
        "barrier": barrier,
        "all_gather": lambda: torch.equal(strategy.all_gather(own).cpu(), expected),
        "broadcast": lambda: strategy.broadcast(own.clone(), world_size - 1).tolist() == [float(world_size)] * 3,
        "all_gather_object": lambda: (
            strategy.all_gather_object({"rank": rank}) == [{"rank": each} for each in range(world_size)]
        ),
        "broadcast_object": lambda: (
            strategy.broadcast_object({"rank": rank}, world_size - 1) == {"rank": world_size - 1}
        ),
    }
    return {"all_reduce": all_reduce, **trials} if world_size > 1 else trials


def _timings(strategy: TrainingStrategy, max_bytes: int) -> Iterator[dict[str, float]]:
    """Yield bytes, seconds and gigabytes a second of an all-reduce, by message size; the slowest rank's median."""
    size = _SMALLEST_BYTES
    while strategy.world_size > 1 and size <= max(max_bytes, _SMALLEST_BYTES):
        note_place(f"all_reduce of {size} bytes")
        message = torch.ones(size // 4, device=strategy.device)
        seconds = []
        for _ in range(_REPEATS + 1):
            strategy.barrier()
            started = time.perf_counter()
            dist.all_reduce(message)
            _finish(strategy.device)
            seconds.append(time.perf_counter() - started)
        slowest = max(strategy.all_gather_object(statistics.median(seconds[1:])))
        # Each rank sends and receives 2 (W - 1) / W of the message: the bandwidth of the link, whatever W.
        moved = size * 2 * (strategy.world_size - 1) / strategy.world_size
        yield {"bytes": size, "seconds": slowest, "gigabytes_per_second": moved / slowest / 1e9}
        size *= _SIZE_FACTOR


def _matmul_milliseconds(device: torch.device) -> float:
    """Return the median time of a matrix product on this rank's device: a throttled or shared device shows."""
    matrix = torch.ones(_MATRIX_SIZE, _MATRIX_SIZE, device=device)
    seconds = []
    for _ in range(_MATRIX_REPEATS):
        started = time.perf_counter()
        torch.mm(matrix, matrix)
        _finish(device)
        seconds.append(time.perf_counter() - started)
    return 1e3 * statistics.median(seconds)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
