"""A complete training loop written by hand, for one process and for many: nothing but torch and srforge.distributed.

python apps/minimal_ddp.py
torchrun --standalone --nproc_per_node=2 apps/minimal_ddp.py
"""

import time

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from srforge.distributed import (
    MetricSum,
    begin_epoch,
    get_active_strategy,
    main_process_only,
    rank_entrypoint,
    rehearse,
    setup_device,
)
from srforge.distributed.scaffold import format_time, get_model_size, set_seed

EPOCHS, GLOBAL_BATCH, SEED = 5, 16, 0


def make_images(num_images: int, seed: int) -> TensorDataset:
    """Return smooth images `(1, 24, 24)` and their halves `(1, 12, 12)`."""
    coarse = torch.rand(num_images, 1, 6, 6, generator=torch.Generator().manual_seed(seed))
    hr = functional.interpolate(coarse, size=24, mode="bicubic")
    return TensorDataset(functional.avg_pool2d(hr, 2), hr)


@main_process_only
def say(text: str) -> None:
    """Print once per fleet."""
    print(text, flush=True)


@rank_entrypoint
def main() -> None:
    """Train a small network that doubles images."""
    started = time.monotonic()
    set_seed(SEED)
    model: nn.Module = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 4, 3, padding=1), nn.PixelShuffle(2)
    )
    training, validation = make_images(97, seed=1), make_images(7, seed=2)
    model, device = setup_device(model, "auto", training)
    strategy = get_active_strategy()
    say(f"{get_model_size(model)} parameters, {strategy.world_size} x {device}: {strategy.reason}")

    # The same 16 samples form a step however many ranks share them: 1, 2, 4, 8 or 16.
    batch_size = GLOBAL_BATCH // strategy.world_size
    shuffled = strategy.make_sampler(97, batch_size=batch_size, shuffle=True, training=True, seed=SEED)
    in_order = strategy.make_sampler(7, batch_size=batch_size, shuffle=False, training=False, seed=SEED)
    loader = DataLoader(training, batch_size=batch_size, sampler=shuffled)
    validation_loader = DataLoader(validation, batch_size=batch_size, sampler=in_order)
    plan = shuffled.plan
    assert plan is not None
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def loss_of(batch: list[Tensor]) -> Tensor:
        lr, hr = (images.to(device) for images in batch)
        return functional.l1_loss(model(lr), hr)

    first_batch = next(iter(loader))
    rehearse(model, lambda: loss_of(first_batch).backward())  # type: ignore[no-untyped-call]  # torch's

    for epoch in range(EPOCHS):
        begin_epoch(epoch, SEED, loader, validation_loader)
        model.train()
        sums = {name: torch.zeros((), device=device) for name in ("training", "validation")}
        counts = {"training": 0, "validation": len(in_order)}
        for step, batch in enumerate(loader):
            loss = loss_of(batch)
            scale = plan.loss_scale(step, strategy.rank)  # a short last step counts each sample once too
            (loss * scale).backward()  # type: ignore[no-untyped-call]  # torch's
            optimizer.step()
            optimizer.zero_grad()
            counts["training"] += plan.local_count(step, strategy.rank)
            sums["training"] += loss.detach() * plan.local_count(step, strategy.rank)
        strategy.sync_buffers(model)  # this model has none; BatchNorm does
        model.eval()
        with torch.no_grad():
            for batch in validation_loader:
                sums["validation"] += loss_of(batch) * len(batch[0])
        losses = strategy.reduce_metrics({name: MetricSum(sums[name], counts[name]) for name in sums})
        strategy.check_replicas(model)
        replicas = strategy.all_gather_object(strategy.fingerprint(model)[:8])
        say(
            f"epoch {epoch}: training {losses['training']:.4f} validation {losses['validation']:.4f} replicas {replicas}"
        )
    say(f"done in {format_time(time.monotonic() - started)}")


if __name__ == "__main__":
    main()
