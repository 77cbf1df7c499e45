"""Two dry steps at every launch, so that no later step of the process is special."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from srforge.distributed.active import get_active_strategy
from srforge.distributed.breadcrumbs import note_place
from srforge.distributed.errors import ConfigurationError
from srforge.distributed.seeding import preserved_rng

NUM_PASSES = 2


def rehearse(model: nn.Module, forward_backward: Callable[[], None]) -> None:
    """Run ``forward_backward`` twice with gradient sync, and leave no trace.

    DDP rebuilds its buckets after a process's first step and records the static graph in it; both would make a resumed
    process differ in bits from one that went on. Two passes right after ``setup_device``, at every launch, take that
    out of training. They double as a check that a step runs at all, before anything is logged.

    Afterwards gradients are None; buffers, train/eval mode, ``requires_grad`` and the random states of python, numpy
    (if loaded) and torch are what they were, bit for bit.

    Args:
        model: What ``setup_device`` returned, or ``torch.compile`` of that.
        forward_backward: One micro-step on one batch: forward and backward, no optimizer step, no ``no_sync``.

    Raises:
        ConfigurationError: The active strategy did not prepare the model, so ranks would train apart; or DDP found the
            model's graph at odds with an option, which the message names.

    Collective: every rank must call.
    """
    note_place("rehearsal")
    strategy = get_active_strategy()
    if not strategy.is_prepared(model):
        raise ConfigurationError(
            f"`model` must be what setup_device returned, but is a {type(model).__name__} that the active strategy "
            "did not prepare: ranks would train apart. Call model, device = setup_device(model, device) first."
        )
    with (
        preserved_rng(),
        _preserved_device_generator(strategy.device),
        _preserved_model(model),
        strategy.explained_errors(model),
    ):
        for _ in range(NUM_PASSES):
            _drop_gradients(model)
            forward_backward()
        strategy.refuse_unfinished_sync(model)


def _drop_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


@contextmanager
def _preserved_model(model: nn.Module) -> Iterator[None]:
    """Put buffers (the objects and their bits), modes and ``requires_grad`` back; drop gradients."""
    modules = list(model.modules())
    modes = [module.training for module in modules]
    buffers: list[dict[str, Tensor | None]] = [dict(module._buffers) for module in modules]  # noqa: SLF001 - objects, not values
    bits = {id(buffer): buffer.detach().clone() for buffer in model.buffers()}
    takes_gradient = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        yield
    finally:
        for module, mode, own in zip(modules, modes, buffers, strict=True):
            module.training = mode
            module._buffers.clear()  # noqa: SLF001 - as above
            module._buffers.update(own)  # noqa: SLF001 - as above
        with torch.no_grad():
            for buffer in model.buffers():
                buffer.copy_(bits[id(buffer)])
        for parameter, requires_grad in takes_gradient:
            parameter.requires_grad_(requires_grad)
        _drop_gradients(model)


@contextmanager
def _preserved_device_generator(device: torch.device) -> Iterator[None]:
    """Put back the random state of this process's device; asking other devices for theirs would occupy them."""
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        if state is not None:
            torch.cuda.set_rng_state(state, device)
