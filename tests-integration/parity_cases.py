"""Law 3: three epochs on a fleet against three epochs of a plain torch loop at the global batch."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fleet_cases import seeded, start
from srforge.distributed import get_active_strategy, plain_state_dict, rehearse, unwrap_module

# The last step of an epoch has two samples: with three or four ranks some have none.
NUM_SAMPLES, GLOBAL_BATCH, EPOCHS, SEED = 26, 12, 3, 5

#: name -> (dtype, optimizer, largest allowed difference)
RECIPES: dict[str, tuple[torch.dtype, type[torch.optim.Optimizer], dict[str, float], float]] = {
    "float64": (torch.float64, torch.optim.AdamW, {"lr": 1e-3}, 1e-12),
    "float32-sgd": (torch.float32, torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}, 1e-6),
    "float32-adamw": (torch.float32, torch.optim.AdamW, {"lr": 1e-3}, 1e-5),
}


def samples(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return seeded(NUM_SAMPLES, 3, 6, 6, seed=1).to(dtype), seeded(NUM_SAMPLES, 2, 2, 2, seed=2).to(dtype)


def model_of(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.GELU(), nn.Conv2d(6, 2, 3)).to(dtype)


def losses(prediction: Tensor, target: Tensor) -> Tensor:
    """Return the loss of each sample, shape ``(N,)``."""
    return (prediction - target).square().mean(dim=(1, 2, 3))


def trained_alone(recipe: str, order: list[list[int]]) -> dict[str, Tensor]:
    """Train in one process with nothing of ours; ``order`` holds the sample indices of each epoch."""
    dtype, optimizer_class, arguments, _ = RECIPES[recipe]
    model, (inputs, targets) = model_of(dtype), samples(dtype)
    optimizer = optimizer_class(model.parameters(), **arguments)
    for indices in order:
        for batch in torch.tensor(indices).split(GLOBAL_BATCH):
            losses(model(inputs[batch]), targets[batch]).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return dict(model.state_dict())


def trained_by_fleet(recipe: str, *, accumulates: bool = False) -> dict[str, Any]:
    """Train with the strategy, the sampler and its plan, as a hand-written loop would."""
    strategy = start()
    dtype, optimizer_class, arguments, _ = RECIPES[recipe]
    model = strategy.prepare(model_of(dtype))
    optimizer = optimizer_class(model.parameters(), **arguments)
    accumulate = 1 if not accumulates else 2 if strategy.world_size == 3 else 3
    batch_size = GLOBAL_BATCH // strategy.world_size // accumulate
    sampler = strategy.make_sampler(
        NUM_SAMPLES, batch_size=batch_size, shuffle=True, training=True, seed=SEED, accumulate=accumulate
    )
    loader = DataLoader(TensorDataset(*samples(dtype)), batch_size=batch_size, sampler=sampler)
    plan = sampler.plan
    first = next(iter(loader))
    rehearse(model, lambda: losses(model(on_device(first[0])), on_device(first[1])).mean().backward())
    prints = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for step, (inputs, targets) in enumerate(loader):
            window_ends = plan.ends_window(step)
            if window_ends:
                loss = losses(model(on_device(inputs)), on_device(targets)).mean()
                (loss * plan.loss_scale(step, strategy.rank)).backward()
                optimizer.step()
                optimizer.zero_grad()
                continue
            with strategy.no_sync(model):
                loss = losses(model(on_device(inputs)), on_device(targets)).mean()
                (loss * plan.loss_scale(step, strategy.rank)).backward()
        strategy.check_replicas(model)
        prints.append(strategy.fingerprint(model))
    state = {name: tensor.cpu() for name, tensor in plain_state_dict(unwrap_module(model)).items()}
    return {"state": state, "fingerprints": prints}


def on_device(tensor: Tensor) -> Tensor:
    return tensor.to(get_active_strategy().device)


def float64() -> dict[str, Any]:
    return trained_by_fleet("float64")


def float64_accumulated() -> dict[str, Any]:
    return trained_by_fleet("float64", accumulates=True)


def float32_sgd() -> dict[str, Any]:
    return trained_by_fleet("float32-sgd")


def float32_sgd_accumulated() -> dict[str, Any]:
    return trained_by_fleet("float32-sgd", accumulates=True)


def float32_adamw() -> dict[str, Any]:
    return trained_by_fleet("float32-adamw")
