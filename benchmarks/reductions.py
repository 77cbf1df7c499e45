"""Reduction of an epoch's metrics against one all-reduce per number, under gloo. No test depends on it.

python benchmarks/reductions.py [world_size]
"""

import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests-integration"))

from harness import run_ranks

NUM_METRICS, NUM_BANDS, REPEATS = 3, 12, 30


def rank_measures():
    """Milliseconds (medians) and collectives per epoch: ours, then one all-reduce for each total and count."""
    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile

    from srforge.distributed import MetricSum, get_active_strategy, setup_device

    setup_device(torch.nn.Linear(1, 1), "cpu")
    strategy = get_active_strategy()
    value = torch.tensor(float(strategy.rank), dtype=torch.float64)
    tree = {
        f"metric{metric}": {f"B{band:02}": MetricSum(value, torch.tensor(5)) for band in range(NUM_BANDS)}
        for metric in range(NUM_METRICS)
    }

    def one_by_one():
        reduced = {}
        for metric, bands in tree.items():
            for band, leaf in bands.items():
                pair = torch.stack([leaf.total, leaf.count.double()])
                dist.all_reduce(pair)
                reduced[metric, band] = (pair[0] / pair[1]).item()
        return reduced

    results = []
    for reduce in (lambda: strategy.reduce_metrics(tree), one_by_one):
        times = []
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            reduce()
        collectives = sum(event.name.startswith("c10d::") for event in profiler.events())
        for _ in range(REPEATS):
            strategy.barrier()
            started = time.perf_counter()
            reduce()
            times.append(time.perf_counter() - started)
        results.append((statistics.median(times) * 1e3, collectives))
    return results


def main():
    world_size = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    (packed, packed_collectives), (single, single_collectives) = run_ranks(rank_measures, world_size, timeout=100)[0]
    print(f"{NUM_METRICS} metrics x {NUM_BANDS} bands, {world_size} ranks, gloo on CPU")
    print(f"{'':<24}{'ms':>8}{'collectives':>14}")
    print(f"{'reduce_metrics':<24}{packed:>8.2f}{packed_collectives:>14.0f}")
    print(f"{'one all-reduce each':<24}{single:>8.2f}{single_collectives:>14.0f}")
    print(f"ratio {single / packed:.1f}")


if __name__ == "__main__":
    main()
