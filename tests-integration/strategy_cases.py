"""Cases of one model under DDP: start, sync, accumulation, rehearsal, errors."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from fleet_cases import raises, rank_data, start
from srforge.distributed import (
    ReplicaDivergenceError,
    load_plain_state_dict,
    plain_state_dict,
    rehearse,
    unwrap_module,
)
from srforge.distributed.parts import copy_unwrapped, reducers


def convolutions(*, dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 2, 3)).to(dtype)


class ManyTypes(nn.Module):
    """Parameters and buffers of every kind that travels: odd lengths, no axes, every width."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(3, 5, generator=generator))
        self.narrow = nn.Parameter(torch.randn(7, generator=generator).half())
        self.frozen = nn.Parameter(torch.randn((), generator=generator, dtype=torch.float64), requires_grad=False)
        self.register_buffer("flag", torch.randn(3, generator=generator) > 0)
        self.register_buffer("count", torch.randint(0, 99, (), generator=generator))
        self.register_buffer("tiny", torch.randn(5, generator=generator).to(torch.float8_e4m3fn))
        self.register_buffer("wave", torch.randn(3, dtype=torch.complex64, generator=generator))
        self.register_buffer("table", torch.randn(4, 3, generator=generator).t(), persistent=False)
        self.register_buffer("none", torch.empty(0))


def bits(model: nn.Module) -> dict[str, bytes]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for name, t in named}


def start_sends_every_tensor_of_rank_0() -> dict[str, bytes]:
    strategy = start()
    return bits(unwrap_module(strategy.prepare(ManyTypes(seed=strategy.rank))))


def primitives_carry_every_type() -> dict[str, Any]:
    strategy = start()
    rank = strategy.rank
    return {
        "flags": strategy.all_gather(torch.tensor([True, rank == 0], device=strategy.device)).tolist(),
        "strided": strategy.all_gather(torch.arange(6, device=strategy.device).reshape(2, 3).t() + rank).tolist(),
        "scalar": strategy.all_gather(torch.tensor(float(rank), dtype=torch.float64)).tolist(),
        "complex": strategy.all_gather(torch.tensor([-1j * rank], device=strategy.device).conj()).tolist(),
        "empty": tuple(strategy.all_gather(torch.empty(0, 3)).shape),
        "broadcast": strategy.broadcast(torch.tensor([rank + 7]), source=strategy.world_size - 1).item(),
        "object": strategy.broadcast_object({"rank": rank}),
        "objects": strategy.all_gather_object(rank),
    }


def buffers_after_sync() -> dict[str, Any]:
    strategy = start()
    model = strategy.prepare(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4, track_running_stats=False))
    )
    model.register_buffer("own", torch.tensor([strategy.rank, 7], device=strategy.device))
    for _ in range(2 + strategy.rank):
        model(rank_data(2, 3, 8, 8))
    norm = unwrap_module(model)[1]
    seen = (norm.running_mean.clone(), norm.running_var.clone())
    everyones = [strategy.all_gather(tensor).double().mean(0).float().tolist() for tensor in seen]
    strategy.sync_buffers(model)
    strategy.check_replicas(model)
    now = [norm.running_mean.tolist(), norm.running_var.tolist()]
    return {"expected": everyones, "now": now, "own": model.own.tolist(), "batches": int(norm.num_batches_tracked)}


def divergence_is_named() -> list[list[str]]:
    strategy = start()
    model = strategy.prepare(convolutions())
    found = []
    for change in ("weight", "order", "none"):
        with torch.no_grad(), raises(ReplicaDivergenceError) as messages:
            weight = unwrap_module(model)[2].weight
            if change == "weight" and strategy.rank == 1:
                weight[0, 0, 0, 0] += 0.25
            if change == "order" and strategy.rank == 1:  # equal sums, other places
                weight.copy_(weight.flip(0))
            strategy.check_replicas(model)
        found.append(messages)
        load_plain_state_dict(model, strategy.broadcast_object(plain_state_dict(model)))
    return found


def different_models_are_refused() -> list[list[str]]:
    strategy = start()
    found = []
    for model in (nn.Linear(3, 4 + strategy.rank), nn.Linear(3, 4, bias=strategy.rank == 0)):
        with raises(ReplicaDivergenceError) as messages:
            strategy.prepare(model)
        found.append(messages)
    return found


def accumulated_gradients() -> dict[str, Any]:
    """Two micro-batches per rank, synced once; the oracle is one process with the whole batch."""
    strategy = start()
    bare = convolutions(dtype=torch.float64)
    model = strategy.prepare(bare)
    oracle = copy_unwrapped(model)
    everything = torch.cat([rank_data(4, 3, 8, 8, rank=rank) for rank in range(strategy.world_size)]).double()
    oracle(everything).square().mean().backward()
    rehearse(model, lambda: model(everything).mean().backward())
    first, second = rank_data(4, 3, 8, 8).double().chunk(2)
    with strategy.no_sync(model):
        (model(first).square().mean() / 2).backward()
    local = [parameter.grad.clone() for parameter in model.parameters()]
    (model(second).square().mean() / 2).backward()
    synced = [parameter.grad for parameter in model.parameters()]
    expected = [parameter.grad for parameter in oracle.parameters()]
    return {
        "error": max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(synced, expected, strict=True)),
        "ranks_apart": max(float((x[0] - x[-1]).abs().max()) for x in map(strategy.all_gather, synced)),
        "local_apart": max(float((x[0] - x[-1]).abs().max()) for x in map(strategy.all_gather, local)),
    }


def rounds_per_window() -> list[int]:
    """Count all-reduces of a composite's parts: rehearsal, then four micro-batches, all but the last under no_sync."""
    strategy = start()
    model = nn.ModuleDict({"first": nn.Conv2d(3, 3, 3), "second": nn.Conv2d(3, 3, 3)})
    model.trainable_modules = lambda: {"first": model["first"], "second": model["second"]}
    model = strategy.prepare(model)
    rounds: list[int] = []

    def counting(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        rounds.append(len(window))
        return allreduce_hook(None, bucket)

    window: list[int] = []
    for part in reducers(model):
        part.register_comm_hook(None, counting)
    data = rank_data(2, 3, 8, 8)
    rehearse(model, lambda: model["second"](model["first"](data)).mean().backward())
    rounds.clear()
    for _ in range(3):
        with strategy.no_sync(model):
            model["second"](model["first"](data)).mean().backward()
            window.append(1)
    model["second"](model["first"](data)).mean().backward()
    return rounds


def preview_on_rank_0() -> dict[str, Any]:
    strategy = start()
    model = strategy.prepare(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))
    data = rank_data(2, 3, 8, 8)
    rehearse(model, lambda: model(data).square().mean().backward())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        if strategy.is_main:
            bare = strategy.unwrap(model)
            bare.eval()
            bare(data)
            bare.train()
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    strategy.check_replicas(model, buffers=False)
    return {"fingerprint": strategy.fingerprint(nn.ParameterList(model.parameters()))}


class BandEncoder(nn.Module):
    """One encoder, called once for each band within one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Conv2d(1, 4, 3)
        self.head = nn.Conv2d(4, 1, 1)

    def forward(self, bands: dict[str, Tensor]) -> Tensor:
        return self.head(sum(torch.tanh(self.encoder(band)) for band in bands.values()))


def encoder_called_per_band() -> dict[str, Any]:
    strategy = start()
    model = strategy.prepare(BandEncoder().double())
    oracle = copy_unwrapped(model)

    def bands(rank: int | None = None) -> dict[str, Tensor]:
        return dict(zip("rgbn", rank_data(4, 2, 1, 8, 8, rank=rank).double(), strict=True))

    rehearse(model, lambda: model(bands()).square().mean().backward())
    trained, alone = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, oracle))
    for _ in range(3):
        model(bands()).square().mean().backward()
        everyones = [oracle(bands(rank)).square().mean() for rank in range(strategy.world_size)]
        torch.stack(everyones).mean().backward()
        for optimizer in (trained, alone):
            optimizer.step()
            optimizer.zero_grad()
    strategy.check_replicas(model)
    pairs = zip(model.parameters(), oracle.parameters(), strict=True)
    return {"error": max(float((a - b).abs().max()) for a, b in pairs)}


def compiled_model() -> dict[str, Any]:
    """The wrapped module is compiled; what asks for its parts, state and preparation sees through that."""
    strategy = start()
    prepared = strategy.prepare(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3)))
    oracle = copy_unwrapped(prepared)
    model = torch.compile(prepared, backend="aot_eager")
    assert list(plain_state_dict(model)) == list(oracle.state_dict())
    data = rank_data(2, 3, 8, 8)
    rehearse(model, lambda: model(data).square().mean().backward())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        with strategy.no_sync(model):
            model(data).square().mean().backward()
        local = unwrap_module(model)[0].weight.grad.clone()
        model(data).square().mean().backward()
        assert (strategy.world_size == 1) or not torch.equal(unwrap_module(model)[0].weight.grad, 2 * local)
        optimizer.step()
        optimizer.zero_grad()
    strategy.sync_buffers(model)
    strategy.check_replicas(model)
    return {"fingerprint": strategy.fingerprint(model)}
