"""GAN cases: what discriminators do to replicas."""

from typing import Any

import torch
from torch import Tensor, nn

from fleet_cases import raises, rank_data, start
from srforge.distributed import ReplicaDivergenceError, get_active_strategy, rehearse, unwrap_module
from srforge.distributed.parts import copy_unwrapped


class Composite(nn.Module):
    """A generator and a discriminator, stepped on their own."""

    def __init__(self, generator: nn.Module, discriminator: nn.Module) -> None:
        super().__init__()
        self.generator = generator
        self.discriminator = discriminator

    def trainable_modules(self) -> dict[str, nn.Module]:
        return {"generator": self.generator, "discriminator": self.discriminator}


def small_gan(*, norm: str = "batch", old_api: bool = False) -> Composite:
    generator = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 3, padding=1)
    )
    first, second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 1, 3)
    if norm == "spectral":
        wrap = nn.utils.spectral_norm if old_api else nn.utils.parametrizations.spectral_norm
        first, second = wrap(first), wrap(second)
        return Composite(generator, nn.Sequential(first, nn.LeakyReLU(0.2), second))
    return Composite(generator, nn.Sequential(first, nn.BatchNorm2d(4), nn.LeakyReLU(0.2), second))


def frozen(module: nn.Module, *, is_frozen: bool) -> None:
    for parameter in module.parameters():
        parameter.requires_grad_(not is_frozen)


def generator_loss(model: Composite, lr: Tensor) -> Tensor:
    """D through its bare module, frozen: the wrapped one must see each of its backward passes."""
    discriminator = unwrap_module(model.discriminator)
    frozen(discriminator, is_frozen=True)
    return -discriminator(model.generator(lr)).mean()


def discriminator_loss(model: Composite, lr: Tensor, hr: Tensor) -> Tensor:
    frozen(model.discriminator, is_frozen=False)
    with torch.no_grad():
        fake = unwrap_module(model.generator)(lr)
    return (
        nn.functional.softplus(model.discriminator(fake)).mean()
        + nn.functional.softplus(-model.discriminator(hr)).mean()
    )


def train_gan(model: Composite, *, num_steps: int, ratio: int = 1, penalty: bool = False) -> dict[str, Any]:
    strategy = get_active_strategy()
    prepared = strategy.prepare(model)
    assert isinstance(prepared, Composite)
    lr, hr = rank_data(2, 3, 8, 8), rank_data(2, 3, 8, 8).flip(0)

    def both() -> None:
        generator_loss(prepared, lr).backward()
        discriminator_loss(prepared, lr, hr).backward()

    rehearse(prepared, both)
    optimizers = {
        "generator": torch.optim.SGD(prepared.generator.parameters(), lr=0.05),
        "discriminator": torch.optim.SGD(prepared.discriminator.parameters(), lr=0.05),
    }
    losses = []
    for step in range(num_steps):
        if step % ratio == 0:
            generator_loss(prepared, lr).backward()
            optimizers["generator"].step()
            optimizers["generator"].zero_grad()
        loss = discriminator_loss(prepared, lr, hr)
        if penalty:
            loss = loss + 0.01 * r1_penalty(prepared.discriminator, hr)
        loss.backward()
        optimizers["discriminator"].step()
        optimizers["discriminator"].zero_grad()
        losses.append(float(loss.detach()))
    frozen(prepared.discriminator, is_frozen=False)
    strategy.check_replicas(prepared, buffers=False)
    before_sync = strategy.fingerprint(prepared)
    strategy.sync_buffers(prepared)
    strategy.check_replicas(prepared)
    return {"fingerprint": strategy.fingerprint(prepared), "before_sync": before_sync, "losses": losses}


def r1_penalty(discriminator: nn.Module, hr: Tensor) -> Tensor:
    """Through the bare module, joined to the one synced backward: a further wrapped forward breaks the replicas."""
    real = hr.detach().requires_grad_(True)
    (slope,) = torch.autograd.grad(unwrap_module(discriminator)(real).sum(), real, create_graph=True)
    return slope.square().sum(dim=(1, 2, 3)).mean()


def batchnorm_discriminator_called_twice() -> dict[str, Any]:
    start()
    return train_gan(small_gan(), num_steps=4)


def spectral_norm_by_parametrization() -> dict[str, Any]:
    start()
    return train_gan(small_gan(norm="spectral"), num_steps=10)


def spectral_norm_by_hook() -> dict[str, Any]:
    start()
    return train_gan(small_gan(norm="spectral", old_api=True), num_steps=10)


def two_optimizers_at_a_ratio() -> dict[str, Any]:
    start()
    return train_gan(small_gan(norm="spectral"), num_steps=8, ratio=3)


def r1_penalty_every_step() -> dict[str, Any]:
    start()
    return train_gan(small_gan(norm="spectral"), num_steps=4, penalty=True)


def r1_penalty_gradients() -> dict[str, float]:
    """The synced gradient of loss and penalty together against one process that sees every rank's data."""
    strategy = start()
    model = strategy.prepare(
        Composite(nn.Identity(), nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 1, 3))).double()
    )
    oracle = copy_unwrapped(model)

    def loss(part: nn.Module, rank: int | None = None) -> Tensor:
        hr = rank_data(2, 3, 8, 8, rank=rank).double()
        return nn.functional.softplus(part(hr)).mean() + nn.functional.softplus(-part(hr)).mean() + r1_penalty(part, hr)

    rehearse(model, lambda: loss(model.discriminator).backward())
    for step in range(4):
        oracle.zero_grad()
        model.zero_grad()
        with_penalty = step % 3 == 0  # lazily, as is usual
        data = rank_data(2, 3, 8, 8).double()
        own = loss(model.discriminator) if with_penalty else model.discriminator(data).square().mean()
        own.backward()
        ranks = range(strategy.world_size)
        alone = [
            loss(oracle.discriminator, rank)
            if with_penalty
            else oracle.discriminator(rank_data(2, 3, 8, 8, rank=rank).double()).square().mean()
            for rank in ranks
        ]
        torch.stack(alone).mean().backward()
    pairs = zip(model.parameters(), oracle.parameters(), strict=True)
    return {"error": max(float((a.grad - b.grad).abs().max() / b.grad.abs().max()) for a, b in pairs)}


def wrapped_discriminator_in_the_generator_step() -> list[str]:
    """The usual mistake, of which DDP says nothing: the check of the replicas does."""
    strategy = start()
    model = strategy.prepare(small_gan())
    lr, hr = rank_data(2, 3, 8, 8), rank_data(2, 3, 8, 8).flip(0)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.05) for part in (model.generator, model.discriminator)]
    with raises(ReplicaDivergenceError) as messages:
        for _ in range(4):
            frozen(model.discriminator, is_frozen=True)
            (-model.discriminator(model.generator(lr)).mean()).backward()
            optimizers[0].step()
            optimizers[0].zero_grad()
            discriminator_loss(model, lr, hr).backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
        strategy.check_replicas(model, buffers=False)
    return messages


def wrapped_forward_for_the_penalty() -> list[str]:
    """The same of an R1 penalty whose forward goes through the wrapper."""
    strategy = start()
    model = strategy.prepare(small_gan(norm="spectral"))
    part, hr = model.discriminator, rank_data(2, 3, 8, 8)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.05)
    with raises(ReplicaDivergenceError) as messages:
        for _ in range(4):
            real = hr.clone().requires_grad_(True)
            (slope,) = torch.autograd.grad(part(real).sum(), real, create_graph=True)
            (part(hr).square().mean() + part(-hr).mean() + slope.square().sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
        strategy.check_replicas(model, buffers=False)
    return messages
