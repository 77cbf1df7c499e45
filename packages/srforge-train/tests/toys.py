"""A small regression that every test of the loop can train in milliseconds."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from srforge.distributed import ShardedSampler, get_active_strategy, setup_device
from srforge.training import Metrics, Objective, RunnerOptions, Trainer, TrainingRunner, ValidationRunner


class Lines(Dataset):
    """Samples of a fixed linear map, float64 so that sums are exact enough to compare."""

    def __init__(self, num_samples, dtype=torch.float64):
        generator = torch.Generator().manual_seed(5)
        self.lr = torch.randn(num_samples, 3, generator=generator, dtype=dtype)
        self.hr = self.lr @ torch.tensor([[1.0], [-2.0], [0.5]], dtype=dtype) + 0.3

    def __len__(self):
        return len(self.lr)

    def __getitem__(self, key):
        return {"lr": self.lr[key], "hr": self.hr[key]}


def squared(prediction, target):
    return (prediction - target).square().mean(dim=1)


def make_model(seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(dtype)


def loader_of(dataset, *, training=True, batch_size=4, accumulate=1, seed=1, **options):
    strategy = get_active_strategy()
    sampler = ShardedSampler(
        len(dataset),
        rank=strategy.rank,
        world_size=strategy.world_size,
        batch_size=batch_size,
        shuffle=training,
        training=training,
        seed=seed,
        **({"accumulate": accumulate} if training else {}),
        **options,
    )
    return DataLoader(dataset, batch_size=batch_size, sampler=sampler, generator=torch.Generator())


def make_runner(model=None, *, optimizer=None, **arguments):
    model = make_model() if model is None else model
    model, _ = setup_device(model, "cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05) if optimizer is None else optimizer(model.parameters())
    arguments.setdefault("options", RunnerOptions())
    return TrainingRunner(model, optimizer, Objective({"l2": squared}), **arguments)


def make_trainer(runner=None, *, validate=True, **arguments):
    runner = make_runner() if runner is None else runner
    validator = ValidationRunner(runner.model, Metrics({"l2": squared}), ema=runner.ema) if validate else None
    return Trainer(runner, validator, seed=3, **arguments)
