"""What a checkpoint costs: time to save (down to the disk) and its share of an epoch, to verify, and to resume.

Run: python benchmarks/checkpoint.py [--folder FOLDER] [--millions 1 3 10 30 100] [--repeat 3] [--epoch-minutes 10]

To resume is what rank 0 does at a launch: clear litter, find the newest whole file, read it.

The state is that of training with Adam: weights and two moments, float32, 12 bytes a parameter, in tensors of about
590,000 numbers, as a convolution of 256 to 256 channels has.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from srforge.training.checkpoint_store import CheckpointStore
from srforge.training.resuming import read_checkpoint

_NUMEL = 256 * 256 * 9


def adam_state(num_parameters):
    names = [f"body.{index}.weight" for index in range(max(1, num_parameters // _NUMEL))]
    numel = num_parameters // len(names)
    moments = {i: {"exp_avg": torch.rand(numel), "exp_avg_sq": torch.rand(numel)} for i in range(len(names))}
    return {"model": {name: torch.rand(numel) for name in names}, "optimizer": {"state": moments}}


def timed(function, repeat):
    seconds = []
    for index in range(repeat):
        started = time.perf_counter()
        function(index)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def measure(folder, millions, repeat):
    store = CheckpointStore(folder, keep_last=1, keep_best=False)
    state = adam_state(round(millions * 1e6))

    def save(epoch):
        store.save(state, epoch=epoch, metrics={}, is_best=False, finished=False, world_size=1)

    plain = Path(folder, "plain.pt")
    row = {
        "save": timed(save, repeat),
        "torch.save": timed(lambda _: torch.save(state, plain), repeat),
        "verify": timed(lambda _: store.newest(), repeat),
        "load": timed(lambda _: store.load(store.records()[-1]), repeat),
        "torch.load": timed(lambda _: torch.load(plain, weights_only=True), repeat),
    }
    row["resume"] = timed(lambda _: read_checkpoint(store, "auto"), repeat)
    return store.records()[-1].size, row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", help="a folder on the disk to measure; by default the temporary one")
    parser.add_argument("--millions", type=float, nargs="+", default=[1, 3, 10, 30, 100])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--epoch-minutes", type=float, default=10.0)
    options = parser.parse_args()
    share_of = f"share of an epoch of {options.epoch_minutes:g} min"
    print(
        f"| parameters | file | {share_of} | save | torch.save, no fsync, no digest | verify | load | torch.load | resume |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for millions in options.millions:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            size, row = measure(folder, millions, options.repeat)
        cells = " | ".join(f"{seconds:.3f} s" for seconds in row.values())
        share = 100 * row["save"] / (60 * options.epoch_minutes)
        print(f"| {millions:g} M | {size / 1e6:.0f} MB | {share:.3f} % | {cells} |", flush=True)


if __name__ == "__main__":
    main()
