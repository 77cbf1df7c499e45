"""What every rank of a fleet runs for ``test_resume_fleet``."""

import hashlib
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from fleet_cases import start
from kill_training import Network, squared
from srforge.data import DataLoaderFactory
from srforge.distributed import get_active_strategy, main_work, plain_state_dict, setup_device
from srforge.training import (
    CheckpointStore,
    ExponentialMovingAverage,
    Hook,
    Metrics,
    Objective,
    Trainer,
    TrainingRunner,
    ValidationRunner,
    hooks_into,
    warm_start_model,
)

SEED = 7


class Numbered(Dataset[dict[str, torch.Tensor]]):
    """Images that know their index, changed at random as training images are."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        image = torch.rand(3, 8, 8)  # drawn from (seed, epoch, index)
        return {"lr": image, "hr": image.mean(0, keepdim=True), "index": torch.tensor(int(index))}


class Seeing(Hook):
    """Keeps, for each optimizer step, the real samples of this rank with what they looked like."""

    def __init__(self) -> None:
        self.seen: dict[tuple[int, int], list[tuple[int, str]]] = {}
        self._first_step: dict[int, int] = {}

    @hooks_into("on_pre_step")
    def see(self, context: Any) -> None:
        step = context.global_step - self._first_step.setdefault(context.epoch, context.global_step)
        kept = self.seen.setdefault((context.epoch, step), [])
        for index, image in zip(context.batch["index"][: context.count], context.batch["lr"], strict=False):
            kept.append((int(index), hashlib.sha256(image.numpy().tobytes()).hexdigest()))


def continue_run(folder: str, epochs: int, num_samples: int, global_batch: int) -> dict[str, Any]:
    """Resume, train until so many epochs are finished, and return what this rank saw."""
    start()
    strategy = get_active_strategy()
    torch.manual_seed(0)
    model, _ = setup_device(Network(), strategy.device)
    runner = TrainingRunner(
        model, torch.optim.AdamW(model.parameters(), lr=0.01), Objective({"l2": squared}),
        ema=ExponentialMovingAverage(model, 0.9),
    )  # fmt: skip
    validator = ValidationRunner(model, Metrics({"l2": squared}), ema=runner.ema)
    seeing, measured = Seeing(), Seeing()
    runner.hooks.attach(seeing)
    validator.hooks.attach(measured)
    trainer = Trainer(runner, validator, seed=SEED, checkpoints=CheckpointStore(folder))
    resumed = trainer.resume("auto")
    factory = DataLoaderFactory(
        Numbered(num_samples), global_batch // strategy.world_size, shuffle=True, seed=SEED, filler=2
    )
    result = trainer.train(
        epochs, factory.get_loader(), DataLoaderFactory(Numbered(5), 1, shuffle=False, seed=SEED).get_loader()
    )
    return {
        "resumed": resumed,
        "seen": seeing.seen,
        "validated": measured.seen,
        "steps": result.global_step,
        "digest": strategy.fingerprint(model),
    }


def warm_start_on_every_rank(folder: str) -> tuple[bool, str]:
    """Only rank 0 can see the file; return whether this rank has its weights, and the error for one that is not there."""
    start()
    strategy = get_active_strategy()
    torch.manual_seed(strategy.rank)
    model, _ = setup_device(Network(), strategy.device)
    path = Path(folder, "weights.pth") if strategy.is_main else Path("/nowhere/weights.pth")
    warm_start_model(model, path)
    expected = torch.load(Path(folder, "weights.pth"), weights_only=True)
    is_same = all(torch.equal(value.cpu(), expected[name]) for name, value in plain_state_dict(model).items())
    try:
        warm_start_model(model, path.with_name("absent.pth"))
    except Exception as error:  # noqa: BLE001  # its text is the result
        return is_same, f"{type(error).__name__}: {error}"
    return is_same, ""


def save_where_nothing_can_be_saved(folder: str) -> None:
    """Rank 0 alone meets the error of the disk."""
    continue_run(f"{folder}/file/checkpoints", 1, 8, 8)


def leave_after_work() -> str:
    """Rank 0 hosts the store, and ends right after its work; the others must hear that it was done."""
    start()
    strategy = get_active_strategy()
    for _ in range(5):
        with main_work(strategy, "saving", 1.0):
            if strategy.is_main:
                time.sleep(0.12)  # the others have come to look rarely
    if strategy.is_main:
        folder = Path(os.environ["TEST_FOLDER"])
        import pickle

        folder.joinpath("r0.pickle").write_bytes(pickle.dumps("left"))
        os._exit(0)
    return "heard"
