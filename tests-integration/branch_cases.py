"""Cases in which steps use different parameters, gradients travel compressed, or the process group is another's."""

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fleet_cases import raises, rank_data, seeded, start
from harness import asked_backend, asked_device
from srforge.distributed import (
    CollectiveError,
    ConfigurationError,
    get_active_strategy,
    load_plain_state_dict,
    plain_state_dict,
    rehearse,
    setup_device,
    unwrap_module,
)
from srforge.distributed.parts import copy_unwrapped
from strategy_cases import bits, convolutions


class TwoBranches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.even = nn.Linear(3, 3)
        self.odd = nn.Linear(3, 3)

    def forward(self, batch: Tensor, step: int | None) -> Any:
        if step is None:
            return self.even(batch), self.odd(batch)
        return self.even(batch) if step % 2 == 0 else self.odd(batch)


def alternate(**options: Any) -> list[str]:
    strategy = start(**options)
    model = strategy.prepare(TwoBranches())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with raises(ConfigurationError) as messages, strategy.explained_errors(model):
        for step in range(4):
            model(rank_data(2, 3), step).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        strategy.check_replicas(model)
    return messages


def branches_under_a_static_graph() -> list[str]:
    return alternate()


def branches_without_looking_for_unused() -> list[str]:
    return alternate(static_graph=False)


def branches_with_unused_parameters() -> list[str]:
    return alternate(static_graph=False, find_unused_parameters=True)


def output_that_the_loss_ignores() -> list[str]:
    """The rehearsal meets it, before training starts."""
    strategy = start()
    model = strategy.prepare(TwoBranches())
    with raises(ConfigurationError) as messages:
        rehearse(model, lambda: model(rank_data(2, 3), None)[0].square().mean().backward())
    return messages


def compressed_gradients() -> dict[str, float]:
    """Relative error of the synced gradient, by type on the wire."""
    errors = {}
    for compression in ("none", "fp16") if asked_backend() == "gloo" else ("none", "fp16", "bf16"):
        strategy = start(gradient_compression=compression)
        model = strategy.prepare(convolutions())
        oracle = copy_unwrapped(model)
        everyones = [oracle(rank_data(2, 3, 8, 8, rank=rank)).square().mean() for rank in range(strategy.world_size)]
        torch.stack(everyones).mean().backward()
        model(rank_data(2, 3, 8, 8)).square().mean().backward()
        pairs = list(zip(model.parameters(), oracle.parameters(), strict=True))
        errors[compression] = max(float((a.grad - b.grad).abs().max() / b.grad.abs().max()) for a, b in pairs)
        gathered = [strategy.all_gather(a.grad) for a, _ in pairs]
        assert all(bool((each == each[0]).all()) for each in gathered)
    return errors


def resumed_bits() -> dict[str, Any]:
    """Six steps in one go against three, then a new wrapper (as in a new process) and three more."""

    def batches(step: int) -> Tensor:
        return seeded(4, 3, 8, 8, seed=1000 + 10 * step + get_active_strategy().rank).to(get_active_strategy().device)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            first, second = batches(step).chunk(2)
            with get_active_strategy().no_sync(model):
                model(first).square().mean().backward()
            model(second).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def launch() -> tuple[nn.Module, torch.optim.Optimizer]:
        strategy = start()
        torch.manual_seed(strategy.rank)
        # Several buckets: the order in which they are reduced is what a rebuild changes.
        bare = nn.Sequential(
            nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 512, 3), nn.Conv2d(512, 1, 3)
        )
        model = strategy.prepare(bare)
        before, random_state = bits(unwrap_module(model)), torch.get_rng_state()
        model.eval()
        modes = [module.training for module in model.modules()]
        rehearse(model, lambda: model.train()(torch.randn(4, 3, 8, 8).to(strategy.device)).square().mean().backward())
        assert modes == [module.training for module in model.modules()]
        assert before == bits(unwrap_module(model))
        assert bool((random_state == torch.get_rng_state()).all())
        assert all(parameter.grad is None for parameter in model.parameters())
        model.train()
        return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    model, optimizer = launch()
    train(model, optimizer, range(6))
    uninterrupted = bits(unwrap_module(model))
    model, optimizer = launch()
    train(model, optimizer, range(3))
    saved = {name: tensor.clone() for name, tensor in plain_state_dict(model).items()}, optimizer.state_dict()
    model, optimizer = launch()
    load_plain_state_dict(model, saved[0])
    optimizer.load_state_dict(saved[1])
    train(model, optimizer, range(3, 6))
    resumed = bits(unwrap_module(model))
    return {"differing": [name for name in resumed if resumed[name] != uninterrupted[name]]}


def group_of_another_launcher(port: int) -> dict[str, Any]:
    """As under Ray Train: the group is open before us, and stays open after us."""
    import os

    rank = int(os.environ["TEST_RANK"])
    dist.init_process_group(asked_backend(), init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    setup_device(nn.Linear(2, 2), asked_device(), options={"backend": asked_backend()})
    strategy = get_active_strategy()
    objects = strategy.all_gather_object(rank)
    strategy.teardown()
    return {"name": strategy.name, "rank": strategy.rank, "objects": objects, "open": dist.is_initialized()}


def peer_that_does_not_come() -> list[str]:
    """Rank 1 comes to the second barrier far too late."""
    strategy = start(timeout_minutes=3 / 60)
    strategy.barrier()
    if strategy.rank == 1:
        time.sleep(8)
        return []
    with raises(CollectiveError) as messages:
        strategy.barrier()
    return messages
