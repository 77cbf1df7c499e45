"""What every rank of a fleet runs for ``test_trainer_processes``: real training, by the trainer itself."""

import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from fleet_cases import start
from srforge.distributed import (
    ShardedSampler,
    get_active_strategy,
    main_process_only,
    plain_state_dict,
    set_active_strategy,
    setup_device,
)
from srforge.training import (
    CheckpointStore,
    ExponentialMovingAverage,
    Hook,
    Metrics,
    Objective,
    RunnerOptions,
    Schedule,
    Trainer,
    TrainerOptions,
    TrainingRunner,
    ValidationRunner,
    hooks_into,
)

GLOBAL_BATCH = 24


class Lines(Dataset):
    def __init__(self, num_samples: int, dtype: torch.dtype):
        generator = torch.Generator().manual_seed(5)
        self.lr = torch.randn(num_samples, 3, generator=generator, dtype=torch.float64).to(dtype)
        self.hr = (self.lr.square().sum(dim=1, keepdim=True) - 1).to(dtype)

    def __len__(self) -> int:
        return len(self.lr)

    def __getitem__(self, key: int) -> dict[str, torch.Tensor]:
        return {"lr": self.lr[key], "hr": self.hr[key]}


def squared(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (prediction - target).square().mean(dim=1)


def make_model(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)


def make_loader(data: Any, batch_size: int, *, training: bool = True, accumulate: int = 1) -> DataLoader[Any]:
    strategy = get_active_strategy()
    options = {"accumulate": accumulate} if training else {}
    sampler = ShardedSampler(
        len(data),
        rank=strategy.rank,
        world_size=strategy.world_size,
        batch_size=batch_size,
        shuffle=training,
        training=training,
        seed=1,
        **options,
    )
    return DataLoader(data, batch_size=batch_size, sampler=sampler, generator=torch.Generator())


def train(case: dict[str, Any]) -> dict[str, Any]:
    """Train three epochs by one case of the parity table, and return weights, averages and metrics."""
    strategy = get_active_strategy()
    dtype = getattr(torch, case["dtype"])
    model, _ = setup_device(make_model(dtype), strategy.device)
    rates = {"SGD": 0.05, "AdamW": 0.01}
    optimizer = getattr(torch.optim, case["optimizer"])(model.parameters(), lr=rates[case["optimizer"]])
    ema = ExponentialMovingAverage(model, 0.9)
    runner = TrainingRunner(
        model,
        optimizer,
        Objective({"l2": squared}),
        schedule=Schedule(torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9), "step"),
        ema=ema,
        options=RunnerOptions(max_norm=case["max_norm"]),
    )
    validator = ValidationRunner(model, Metrics({"l2": squared}), ema=ema)
    batch_size = GLOBAL_BATCH // strategy.world_size // case["accumulate"]
    loader = make_loader(Lines(case["num_samples"], dtype), batch_size, accumulate=case["accumulate"])
    result = Trainer(runner, validator, seed=3).train(3, loader, make_loader(Lines(11, dtype), 2, training=False))
    assert runner.schedule.scheduler.last_epoch == result.global_step
    weights = {name: value.cpu() for name, value in plain_state_dict(model).items()}
    averages = {name: value.cpu() for name, value in ema.model.state_dict().items()}
    return {"weights": weights, "averages": averages, "metrics": result.metrics, "steps": result.global_step}


def parity(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    results = []
    for case in cases:
        start()
        results.append(train(case))
        set_active_strategy(None)
    return results


class RankValue(Hook):
    """Makes the validation metric of each rank another one, and better or worse by turns."""

    @hooks_into("on_post_forward")
    def differ(self, context: Any) -> None:
        rank = get_active_strategy().rank
        sign = 1.0 if (context.epoch + rank) % 2 else -1.0
        context.terms["l2"] = torch.full_like(context.terms["l2"], sign * (rank + 1) * (context.epoch + 1))


class OnceAndEverywhere(Hook):
    def __init__(self) -> None:
        self.once = self.everywhere = 0

    @hooks_into("on_epoch_finished")
    @main_process_only
    def count_once(self, context: Any) -> None:
        self.once += 1

    @hooks_into("on_epoch_finished")
    def count_everywhere(self, context: Any) -> None:
        self.everywhere += 1


class Norms(Hook):
    def __init__(self) -> None:
        self.norms: list[float] = []

    @hooks_into("on_post_step")
    def keep(self, context: Any) -> None:
        if context.ends_window:
            self.norms.append(float(context.grad_norm))


def toy_trainer(hooks: Any = (), **arguments: Any) -> Trainer:
    model, _ = setup_device(make_model(), get_active_strategy().device)
    runner = TrainingRunner(model, torch.optim.SGD(model.parameters(), lr=0.05), Objective({"l2": squared}))
    validator = ValidationRunner(model, Metrics({"l2": squared}))
    return Trainer(runner, validator, seed=3, hooks=hooks, **arguments)


def decisions() -> dict[str, Any]:
    """Best epoch, side effects and gradient norms of a run whose ranks see different values."""
    strategy = start()
    counter, norms = OnceAndEverywhere(), Norms()
    with tempfile.TemporaryDirectory() as folder:
        store = CheckpointStore(folder)
        trainer = toy_trainer([counter], checkpoints=store, options=TrainerOptions(monitor="validation/l2", mode="max"))
        trainer.training_runner.hooks.attach(norms)
        trainer.validation_runner.hooks.attach(RankValue())
        data = Lines(16, torch.float64)
        result = trainer.train(4, make_loader(data, 4), make_loader(data, 2, training=False))
        saved = sorted(path.name for path in Path(folder).iterdir())
    return {
        "best": (result.best_epoch, result.best_value),
        "metrics": result.metrics,
        "once": counter.once,
        "everywhere": counter.everywhere,
        "norms": norms.norms,
        "saved": saved,
        "rank": strategy.rank,
    }


class Stream(IterableDataset):
    """Five samples on rank 0, two on every other rank, each with its rank's value."""

    def __iter__(self) -> Any:
        rank = get_active_strategy().rank
        for _ in range(5 if rank == 0 else 2):
            yield {"lr": torch.full((3,), float(rank), dtype=torch.float64), "hr": torch.zeros(1, dtype=torch.float64)}


def uneven_stream() -> tuple[int, float]:
    strategy = start()
    trainer = toy_trainer()
    loader = DataLoader(Stream(), batch_size=1)
    result = trainer.train(2, loader)
    return result.global_step, strategy.all_gather(torch.tensor(float(result.global_step))).std().item()


class Sleeping(Hook):
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    @hooks_into("on_epoch_finished")
    @main_process_only
    def sleep(self, context: Any) -> None:
        if context.epoch == 0:
            time.sleep(self.seconds)


def slow_main_work(group_seconds: float, hook_seconds: float, limit_seconds: float) -> Any:
    """Train while a hook of rank 0 sleeps; returns the epochs done, or the error's text."""
    start(timeout_minutes=group_seconds / 60)
    trainer = toy_trainer(
        [Sleeping(hook_seconds)], options=TrainerOptions(main_work_timeout_minutes=limit_seconds / 60)
    )
    data = Lines(8, torch.float64)
    return trainer.train(2, make_loader(data, 4), make_loader(data, 4, training=False)).epochs


class Images(Dataset):
    """Noise in float32."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, key: int) -> dict[str, torch.Tensor]:
        noise = torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(int(key)))
        return {"lr": noise, "hr": 1 - noise}


def channels_last(is_early: bool) -> tuple[list[str], bool]:
    """Train convolutions in channels-last, converted before they are wrapped or after.

    Returns:
        Warnings about strides, and whether the weights have that format at the end.
    """
    strategy = start()
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1))
    if is_early:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model, _ = setup_device(model, strategy.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        objective = Objective({"l1": lambda prediction, target: (prediction - target).abs().flatten(1).mean(1)})
        runner = TrainingRunner(model, optimizer, objective, options=RunnerOptions(channels_last=True))
        Trainer(runner, seed=0).train(1, make_loader(Images(), 2))
    strides = [str(warning.message) for warning in seen if "strides" in str(warning.message)]
    images = [parameter for parameter in model.parameters() if parameter.ndim == 4]
    return strides, all(p.is_contiguous(memory_format=torch.channels_last) for p in images)
