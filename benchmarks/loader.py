"""What starting workers and seeding samples cost, as ratios measured in one run.

    python benchmarks/loader.py [--workers 2] [--loaders 5]

Time to first batch: from ``iter(loader)`` to its first batch, of a second loader in a process that has started one
already (warm), and of the first one. Each start method runs in a process of its own, once as a bare script and once as
if ``apps/train.py`` were the main script, which workers then import again.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
METHODS = ("fork", "spawn", "forkserver", "ours")
PRELOAD_OF_TRAIN = ("hydra", "omegaconf")  # what apps/train.py imports at its module level


def measure(method, main_script, num_workers, num_loaders):
    """In a process of its own: return the seconds to the first batch of several loaders, one after the other."""
    if main_script:
        pose_as(ROOT / main_script)
    if method == "ours":
        import srforge

        srforge.init(preload=PRELOAD_OF_TRAIN if main_script else ())
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    torch.set_num_threads(1)
    dataset = TensorDataset(torch.zeros(64, 3))
    seconds = []
    for _ in range(num_loaders):
        if method == "ours":
            from srforge.data import DataLoaderFactory

            loader = DataLoaderFactory(dataset, 4, shuffle=False, num_workers=num_workers, seed=0).get_loader()
        else:
            loader = DataLoader(dataset, 4, num_workers=num_workers, multiprocessing_context=method)
        began = time.perf_counter()
        batches = iter(loader)
        next(batches)
        seconds.append(time.perf_counter() - began)
        del batches, loader
    return seconds


def pose_as(script):
    """Make workers believe that ``script`` is the main script: they import it as they would."""
    main = sys.modules["__main__"]
    main.__file__, main.__spec__ = str(script), None
    sys.path.insert(0, str(script.parent))


def measure_seeding():
    """Print the seconds per sample that seeding adds, in a worker."""
    import torch
    from torch.utils.data import TensorDataset

    from srforge.data import DataLoaderFactory

    loader = DataLoaderFactory(
        TensorDataset(torch.zeros(8)), 4, shuffle=False, num_workers=1, seed=0, worker_init_fn=print_cost
    ).get_loader()
    next(iter(loader))


def print_cost(_worker_id):
    """In a worker: the processor time of a sample with and without our wrapper (other processes do not count)."""
    import torch

    from srforge.distributed.sharding import SampleKey

    seeded = torch.utils.data.get_worker_info().dataset
    keys = [SampleKey(number % 8, 0) for number in range(5000)]
    costs = []
    for dataset in (seeded, seeded.dataset):
        rounds = []
        for _ in range(5):
            began = time.thread_time()
            for key in keys:
                dataset[key]
            rounds.append((time.thread_time() - began) / len(keys))
        costs.append(min(rounds))
    print(json.dumps(costs[0] - costs[1]), flush=True)


def ask(*arguments):
    """Run this file in a process of its own, and return what it prints."""
    command = [sys.executable, "-W", "ignore", __file__, *map(str, arguments)]
    answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    return json.loads(answer.stdout.strip().splitlines()[-1])


def main():
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--loaders", type=int, default=5)
    parser.add_argument("--measure", nargs=2, metavar=("METHOD", "SCRIPT"), help=argparse.SUPPRESS)
    parser.add_argument("--seeding", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.seeding:
        measure_seeding()
        return
    if options.measure:
        method, script = options.measure
        print(json.dumps(measure(method, script.strip("-"), options.workers, options.loaders)))
        return
    print(f"time to first batch, {options.workers} workers")
    print(f"{'main script':14} {'start':11} {'first':>8} {'warm':>8} {'/ fork':>8} {'/ forkserver':>13}")
    for script in ("-", "apps/train.py"):
        found = {}
        for method in METHODS:
            found[method] = ask("--workers", options.workers, "--loaders", options.loaders, "--measure", method, script)
        warm = {method: statistics.median(seconds[1:]) for method, seconds in found.items()}
        for method in METHODS:
            print(
                f"{script.replace('-', 'bare'):14} {method:11} {found[method][0]:7.2f}s {warm[method]:7.3f}s "
                f"{warm[method] / warm['fork']:8.2f} {warm[method] / warm['forkserver']:13.3f}"
            )
    print(f"seeding one sample in a worker: {ask('--seeding') * 1e6:.1f} us")


if __name__ == "__main__":
    main()
