"""The training that the kill matrix kills: small, with everything in it that a resume could get wrong.

Dropout, BatchNorm, spectral norm, random augmentation from three generators, accumulation, a short last batch, a schedule
by step, an average, early stopping, a stateful hook and a history. A process of this file imports everything once and
forks a rank for each line that it reads, so that kills come in the run and not in imports.

Workers of loaders import this module again: what they do not need waits until a rank runs.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

NUM_SAMPLES, NUM_VALIDATION, GLOBAL_BATCH, SEED = 29, 6, 8, 11
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


class Network(nn.Module):
    """A few convolutions with BatchNorm, dropout and spectral norm."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.body = torch.nn.utils.parametrizations.spectral_norm(nn.Conv2d(6, 6, 3, padding=1))
        self.dropout = nn.Dropout2d(0.3)
        self.tail = nn.Conv2d(6, 1, 3, padding=1)

    def forward(self, lr: torch.Tensor) -> torch.Tensor:
        features = torch.relu(self.norm(self.head(lr)))
        return self.tail(self.dropout(torch.relu(self.body(features))))


def squared(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean squared difference, per sample."""
    return (prediction - target).square().mean(dim=(1, 2, 3))


def train(case: dict[str, Any], target: dict[str, Any] | None) -> None:
    """Run one rank of one launch; the environment says which.

    Args:
        case: ``folder``, ``notes``, ``workers``, ``persistent``, ``accumulate``, ``pause`` (seconds a step), ``device``.
        target: Where to die; see ``KillPoints``.
    """
    import srforge
    from kill_points import KillPoints, PassingBy
    from srforge.data import DataLoaderFactory
    from srforge.distributed import get_active_strategy, setup_device
    from srforge.tracking import LocalTracker
    from srforge.training import (
        CheckpointStore,
        ExponentialMovingAverage,
        Hook,
        LossLogger,
        Metrics,
        MetricsLogger,
        Objective,
        RunnerOptions,
        Schedule,
        Trainer,
        TrainerOptions,
        TrainingRunner,
        ValidationRunner,
        hooks_into,
        warmup_cosine,
    )

    class Worsening(Hook):
        @hooks_into("on_post_forward")
        def worsen(self, context: Any) -> None:
            distance = abs(context.epoch - BEST_EPOCH)
            context.terms["l2"] = context.terms["l2"] * 0.01 + float(distance)

    class Pausing(Hook):
        @hooks_into("on_pre_step")
        def pause(self, context: Any) -> None:
            time.sleep(case["pause"])

    points = KillPoints(case["notes"], int(os.environ.get("RANK", "0")), target)
    points.reach("start-up")
    if case["workers"]:
        srforge.init()
    torch.manual_seed(SEED)
    model, device = setup_device(Network(), case["device"], options={"backend": "gloo"})
    random.seed(os.getpid())  # every launch goes on from another random state
    np.random.seed(os.getpid())  # noqa: NPY002  # as above
    torch.manual_seed(os.getpid())
    strategy = get_active_strategy()
    points.install()

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = Schedule(warmup_cosine(optimizer, total_steps=4 * NUM_EPOCHS), "step")
    schedule.after_epoch = points.before("scheduler", schedule.after_epoch)
    ema = ExponentialMovingAverage(model, 0.9)
    options = RunnerOptions(max_norm=1.0, deterministic=device.type == "cuda")
    runner = TrainingRunner(model, optimizer, Objective({"l2": squared}), schedule=schedule, ema=ema, options=options)
    validator = ValidationRunner(model, Metrics({"l2": squared}), ema=ema)
    for hook in (PassingBy(points, "training"), Pausing()):
        runner.hooks.attach(hook)
    for hook in (PassingBy(points, "validation"), Worsening()):
        validator.hooks.attach(hook)
    loading: dict[str, Any] = {"num_workers": case["workers"], "seed": SEED}
    if case["workers"]:
        loading["persistent_workers"] = case["persistent"]
    batch_size = GLOBAL_BATCH // strategy.world_size // case["accumulate"]
    train_set, val_set = Images(NUM_SAMPLES, augment=True), Images(NUM_VALIDATION, augment=False)
    tracker = LocalTracker(case["folder"], run_id="run")
    trainer = Trainer(
        runner,
        validator,
        seed=SEED,
        checkpoints=CheckpointStore(f"{case['folder']}/checkpoints"),
        tracker=tracker,
        hooks=[LossLogger(show_replicas=True), MetricsLogger(tracker)],
        options=TrainerOptions(monitor="validation/l2", mode="min", patience=PATIENCE),
    )
    trainer.resume("auto")
    result = trainer.train(
        MOST_EPOCHS,
        DataLoaderFactory(
            train_set, batch_size, shuffle=True, accumulate=case["accumulate"], filler=2, **loading
        ).get_loader(),
        DataLoaderFactory(val_set, 1, shuffle=False, **loading).get_loader(),
    )
    assert result.stop_reason == "patience", result


def main(task: dict[str, Any]) -> None:
    """Run one rank of one launch, and leave a file ``r0.done`` when it came to its end."""
    from srforge.distributed import rank_entrypoint

    os.environ.update(task["environment"])
    target = task["target"]
    if isinstance(target, list):  # one for each time that torchrun starts this
        target = target[int(os.environ["TORCHELASTIC_RESTART_COUNT"])]
    rank_entrypoint(train)(task["case"], target)
    Path(task["case"]["notes"], f"r{os.environ.get('RANK', '0')}.done").touch()


def serve() -> None:
    """Fork a rank for each line of standard input, and answer with its process id."""
    import kill_points  # noqa: F401  # imported before the fork
    import srforge.data
    import srforge.tracking  # noqa: F401  # as above

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
