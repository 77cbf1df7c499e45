"""Start time and memory of one rank's sampler against ``DistributedSampler``: python benchmarks/sampler.py [--peer].

Times are those of the CPU, which other work on the machine does not lengthen much. Each cell is a process of its own,
so that memory is what this sampler alone adds to python and torch. ``--peer`` adds torch's sampler up to 10^8 samples;
there it needs several GB and some minutes. Ratios compare cells of one run.
"""

import argparse
import itertools
import json
import resource
import subprocess
import sys
import time

SIZES = (10**6, 10**8, 10**9)
RANKS = ((3, 8), (511, 1024))
LARGEST_PEER = 10**8
FIRST = 4096


def peak_mb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(kind, num_samples, rank, world_size):
    """Make a sampler, take its first batch of 16, its first 4,096 indices, and time later ones."""
    import torch
    from torch.utils.data import DistributedSampler

    from srforge.distributed import ShardedSampler

    def make(length):
        if kind == "peer":
            return DistributedSampler(range(length), num_replicas=world_size, rank=rank)
        return ShardedSampler(
            length, rank=rank, world_size=world_size, batch_size=16, shuffle=True, training=True, seed=0
        )

    torch.set_num_threads(1)
    list(itertools.islice(make(64 * world_size), 64))  # torch's own first-use costs belong to neither
    before, begun, attempts = peak_mb(), time.process_time(), []
    # the best of up to five: what comes between only ever adds time
    while not attempts or (len(attempts) < 5 and time.process_time() - begun < 2):
        attempts.append(attempt(make, num_samples))
    return {name: min(one[name] for one in attempts) for name in attempts[0]} | {"memory_mb": peak_mb() - before}


def attempt(make, num_samples):
    start = time.process_time()
    iterator = iter(make(num_samples))
    list(itertools.islice(iterator, 16))
    first_batch = time.process_time()
    list(itertools.islice(iterator, FIRST - 16))
    first_block = time.process_time()
    later = sum(1 for _ in itertools.islice(iterator, 100_000))
    end = time.process_time()
    return {
        "batch_ms": 1e3 * (first_batch - start),
        "block_ms": 1e3 * (first_block - start),
        "later_us": 1e6 * (end - first_block) / later if later else float("nan"),
    }


def measure_apart(*cell):
    command = [sys.executable, __file__, "--cell", json.dumps(cell)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", action="store_true", help="measure torch's DistributedSampler too")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.cell:
        print(json.dumps(measure(*json.loads(arguments.cell))))
        return
    print(
        f"{'sampler':<10} {'samples':>8} {'rank':>10} {'first 16':>11} {'first 4096':>12} {'memory':>9} {'later':>10}"
    )
    for num_samples, (rank, world_size) in itertools.product(SIZES, RANKS):
        kinds = ["srforge", "peer"] if arguments.peer and num_samples <= LARGEST_PEER else ["srforge"]
        cells = {kind: measure_apart(kind, num_samples, rank, world_size) for kind in kinds}
        for kind, cell in cells.items():
            print(
                f"{kind:<10} {num_samples:>8.0e} {f'{rank}/{world_size}':>10} {cell['batch_ms']:>8.2f} ms "
                f"{cell['block_ms']:>9.2f} ms {cell['memory_mb']:>6.1f} MB {cell['later_us']:>7.2f} us",
                flush=True,
            )
        if "peer" in cells:
            ours, peer = cells["srforge"], cells["peer"]
            print(
                f"{'  ratio':<30} {peer['batch_ms'] / ours['batch_ms']:>8.0f} x {peer['block_ms'] / ours['block_ms']:>10.0f} x "
                f"{peer['memory_mb'] / max(ours['memory_mb'], 0.1):>7.0f} x",
                flush=True,
            )


if __name__ == "__main__":
    main()
