"""Cost of the replica check: the fingerprint of a 16 M parameter model against a training step of that model.

python benchmarks/fingerprint.py

One thread and processor time on the CPU, so that other programs on the machine do not count; the device's own time on
a GPU. Ratios within one run; no test depends on them.
"""

import time

import torch
from torch import nn

from srforge.distributed.replicas import fingerprint

CHANNELS, BLOCKS, BATCH, PATCH, REPEATS = 180, 28, 16, 24, 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.second = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)

    def forward(self, features):
        return features + self.second(torch.relu(self.first(features)))


def seconds(call):
    """The quickest repeat after a first call."""
    call()
    least = float("inf")
    for _ in range(REPEATS):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            torch.cuda.synchronize()
            least = min(least, time.perf_counter() - start)
        else:
            start = time.process_time()
            call()
            least = min(least, time.process_time() - start)
    return least


def main():
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ends = nn.Conv2d(3, CHANNELS, 3, padding=1), nn.Conv2d(CHANNELS, 3, 3, padding=1)
    model = nn.Sequential(ends[0], *[Block() for _ in range(BLOCKS)], ends[1]).to(device)
    batch = torch.randn(BATCH, 3, PATCH, PATCH, device=device)
    tensors = list(model.parameters())
    step = seconds(lambda: model(batch).square().mean().backward())
    check = seconds(lambda: fingerprint(tensors))
    print(f"{sum(tensor.numel() for tensor in tensors) / 1e6:.1f} M parameters, batch {BATCH}, patch {PATCH}, {device}")
    print("| | ms | share |\n|---|---|---|")
    print(f"| forward and backward | {step * 1e3:.1f} | |")
    print(f"| fingerprint | {check * 1e3:.1f} | {check / step:.2%} of a step, {check / step / 100:.4%} of 100 |")


if __name__ == "__main__":
    main()
