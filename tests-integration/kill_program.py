"""The program that the kill matrix kills. What it trains is in ``kill_training``.

A process of this file imports everything once and forks a rank for each line that it reads, so that kills come in the run
and not in imports. Workers of loaders import this module again: what they do not need waits until a rank runs.
"""

import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

GLOBAL_BATCH, SEED = 8, 11
#: Validation gets worse on purpose after this epoch, and patience ends the run two epochs later.
BEST_EPOCH, PATIENCE, MOST_EPOCHS = 2, 2, 30
NUM_EPOCHS = BEST_EPOCH + PATIENCE + 1


class Images(Dataset[dict[str, torch.Tensor]]):
    """Noise images of 8 x 8; training ones are flipped, shifted and scaled at random."""

    def __init__(self, num_samples: int, *, augment: bool) -> None:
        generator = torch.Generator().manual_seed(num_samples)
        self.images = torch.rand(num_samples, 3, 8, 8, generator=generator)
        self.augment = augment

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        image = self.images[index]
        if self.augment:
            image = image.flip(-1) if random.random() < 0.5 else image
            shift = int(np.random.randint(0, 8))  # noqa: NPY002  # the global generator is what is tested
            image = image.roll(shift, -1) * (0.5 + torch.rand(()))
        return {"lr": image, "hr": image.mean(0, keepdim=True)}


def main(task: dict[str, Any]) -> None:
    """Run one rank of one launch, and leave a file ``r0.done`` when it came to its end."""
    from kill_training import train
    from srforge.distributed import rank_entrypoint

    os.environ.update(task["environment"])
    target = task["target"]
    if isinstance(target, list):  # one for each time that torchrun starts this
        target = target[int(os.environ["TORCHELASTIC_RESTART_COUNT"])]
    rank_entrypoint(train)(task["case"], target)
    Path(task["case"]["notes"], f"r{os.environ.get('RANK', '0')}.done").touch()


def serve() -> None:
    """Fork a rank for each line of standard input, and answer with its process id."""
    import kill_training  # noqa: F401  # imported before the fork

    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a rank here: the driver watches it
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _become_rank(json.loads(line))
        print(child, flush=True)


def _become_rank(task: dict[str, Any]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    log = os.open(task["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for own, standard in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(own, standard)
    code = 1
    try:
        main(task)
        code = 0
    except BaseException:  # noqa: BLE001  # whatever it was, the process ends here and not in the server's loop
        sys.excepthook(*sys.exc_info())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve()
    else:
        main(json.loads(sys.argv[1]))
