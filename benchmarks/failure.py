"""What the watching costs a training step: the note of each step, and the thread that reports it.

python benchmarks/failure.py

Both are timed alone, and set against a small step: a difference of whole runs would drown in noise.
"""

import timeit

import torch
import torch.distributed as dist

from srforge.distributed import breadcrumbs, note_place


def make_step():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU(), torch.nn.Conv2d(16, 3, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.rand(8, 3, 48, 48)

    def step():
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def seconds(call, number):
    """The quickest repeat: what other programs take from the machine is no cost of the call."""
    return min(timeit.repeat(call, number=number, repeat=7)) / number


def main():
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    publisher = breadcrumbs._Publisher(store, 0, 1)  # noqa: SLF001  # what its thread does is what is timed
    step = seconds(make_step(), 20)
    note = seconds(lambda: note_place("training", 3, 17), 100_000)
    report = seconds(lambda: publisher._send(1), 200) / publisher.period  # noqa: SLF001  # as above
    print(f"step                   {1e3 * step:9.3f} ms")
    print(f"note of a step         {1e6 * note:9.3f} us   {100 * note / step:.4f} % of the step")
    print(f"reports in a second    {1e6 * report:9.3f} us   {100 * report:.4f} % of the time")
    print(f"together               {100 * (note / step + report):.4f} %")


if __name__ == "__main__":
    main()
