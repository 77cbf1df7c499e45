"""DDP's own errors, said again with parameter names and the option that cures them."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from srforge.distributed.errors import ConfigurationError
from srforge.distributed.parts import listed, plain_name, reducers, trainable_names

_INDICES = re.compile(
    r"(?:did not receive grad for rank \d+|parameters? at ind(?:ex|ices)):?((?:\s*,?\s*\d+)+)", re.IGNORECASE
)
_READY_TWICE = re.compile(r"ready only once")
_UNUSED = re.compile(r"finished reduction in the prior iteration|did not receive grad")
_CHANGED = re.compile(r"training graph has changed|static_graph")
_FIRST_STEP = re.compile(r"expect_autograd_hooks_")
_IN_PLACE = re.compile(r"modified by an inplace operation")


@contextmanager
def explained_ddp_errors(model: nn.Module, *, static_graph: bool) -> Iterator[None]:
    """Raise DDP's errors from forward and backward again in terms of the model and of the options.

    Args:
        model: The model whose parts are wrapped.
        static_graph: The option in force.

    Raises:
        ConfigurationError: In place of DDP's error, which is its cause.
    """
    try:
        yield
    except RuntimeError as error:
        advice = _advice(str(error), model, static_graph=static_graph)
        if advice is None:
            raise
        raise ConfigurationError(advice) from error


def _advice(message: str, model: nn.Module, *, static_graph: bool) -> str | None:
    """Return what to tell the user, None for an error that is not DDP's."""
    names = _named(message, model)
    if _READY_TWICE.search(message):
        return (
            f"each parameter must be ready once per backward, but {names or 'one'} was ready twice. Call a wrapped "
            "part once per backward, reach it through strategy.unwrap(part) elsewhere, and keep `static_graph: true` "
            "for parameters that one forward uses several times."
        )
    if _UNUSED.search(message) or (static_graph and _CHANGED.search(message)):
        names = names or _without_gradient(model)
        if static_graph:
            return (
                f"`static_graph` must be false for a model whose steps use different parameters, but is "
                f"true{_of(names)}. Set `static_graph: false` and `find_unused_parameters: true`, or let "
                "every output that depends on parameters reach the loss in every step."
            )
        return (
            f"`find_unused_parameters` must be true where a step leaves parameters without gradient, but is false"
            f"{_of(names)}. Set `find_unused_parameters: true`, or freeze the parameters before setup_device."
        )
    if _FIRST_STEP.search(message):
        return (
            "the first micro-step after setup_device must be synced, but was under no_sync. Call "
            "rehearse(model, forward_backward) before training: after it no micro-step is special."
        )
    if _IN_PLACE.search(message) and any(True for _ in reducers(model)):
        return (
            "a tensor that backward needs must stay as it was, but was modified in place between forward and backward. "
            "Do not step an optimizer or write buffers between them; give a part that is called twice one joint batch."
        )
    return None


def _without_gradient(model: nn.Module) -> str:
    """Return the names of the parameters without gradient, unless no parameter has one (between two steps)."""
    parameters = [(plain_name(model, name), parameter.grad) for name, parameter in trainable_names(model)]
    empty = [name for name, gradient in parameters if gradient is None]
    return listed(empty) if len(empty) < len(parameters) else ""


def _of(names: str) -> str:
    return f" (without gradient here: {names})" if names else ""


def _named(message: str, model: nn.Module) -> str:
    """Return the names behind the parameter indices in DDP's message, which does not say which part it means."""
    match = _INDICES.search(message)
    if match is None:
        return ""
    indices = [int(index) for index in re.findall(r"\d+", match.group(1))]
    found: list[str] = []
    paths = {id(module): path for path, module in model.named_modules()}
    for part in reducers(model):
        parameters = trainable_names(part)
        if indices and max(indices) < len(parameters):
            path = paths[id(part)]
            found += [plain_name(model, f"{path}.{parameters[i][0]}" if path else parameters[i][0]) for i in indices]
    return listed(found)
