"""Cost of the calls on hot paths, and of importing the package. Ratios within one run; no test depends on them.

python benchmarks/calls.py
"""

import subprocess
import sys
import timeit

from srforge.distributed import get_active_strategy, is_main_process, main_process_only, set_active_strategy
from srforge.distributed.testing import FakeStrategy

REPEATS = 7


def plain():
    return None


gated = main_process_only(plain)


@main_process_only
class Gated:
    def method(self):
        return None


class Plain:
    def method(self):
        return None


def nanoseconds(call, number=200_000):
    """The quickest repeat: what other programs take from the machine is no cost of the call."""
    return min(timeit.repeat(call, number=number, repeat=REPEATS)) / number * 1e9


def import_seconds(statement):
    """Processor time of an import: the least of several fresh interpreters."""
    code = f"import time; t = time.process_time(); {statement}; print(time.process_time() - t)"
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(REPEATS)
    ]
    return min(float(run.stdout) for run in runs)


def main():
    bare = nanoseconds(plain)
    print(f"{'call':<48}{'ns':>8}{'over a plain call':>20}")
    for title, call in (("plain function", plain), ("get_active_strategy", get_active_strategy)):
        print(f"{title:<48}{nanoseconds(call):>8.0f}{nanoseconds(call) / bare:>19.1f}x")
    for title, strategy in (
        ("one process", None),
        ("rank 0 of 8", FakeStrategy(0, 8)),
        ("rank 3 of 8", FakeStrategy(3, 8)),
    ):
        set_active_strategy(strategy)
        for name, call in (
            ("is_main_process", is_main_process),
            ("gated function", gated),
            ("gated method", Gated().method),
        ):
            taken = nanoseconds(call)
            print(f"{name + ', ' + title:<48}{taken:>8.0f}{taken / bare:>19.1f}x")
    set_active_strategy(None)

    torch_alone = import_seconds("import torch, torch.distributed, torch.nn.parallel, torch.utils.data")
    both = import_seconds("import srforge.distributed")
    print(
        f"\nimport torch {torch_alone:.2f} s; import srforge.distributed {both:.2f} s: {both / torch_alone:.2f} of it"
    )
    probe = (
        "import sys, torch, torch.distributed, torch.nn.parallel, torch.utils.data; before = set(sys.modules);"
        "import time; t = time.process_time(); import srforge.distributed;"
        "print(time.process_time() - t, *sorted({m.partition('.')[0] for m in set(sys.modules) - before}))"
    )
    seconds, *modules = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=True
    ).stdout.split()
    print(f"over bare torch: {float(seconds) * 1e3:.0f} ms, new top-level modules: {' '.join(modules)}")


if __name__ == "__main__":
    main()
