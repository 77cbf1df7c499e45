"""Trainable parts of a model, and what wrappers do to a model's structure and names.

A wrapper is ``DistributedDataParallel``, ``DataParallel`` or the module that ``torch.compile`` returns. Whether a
token of a name belongs to a wrapper is read off the module tree, never off its spelling, so a module that is truly
called ``module`` keeps its name.
"""

import copy
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from srforge.distributed.errors import ConfigurationError

WRAPPER_TOKENS = ("module", "_orig_mod")


def wrapped_name(module: nn.Module) -> str | None:
    """Return the attribute under which a wrapper holds its module; None if ``module`` is no wrapper."""
    if isinstance(module, (DistributedDataParallel, DataParallel)):
        return "module"
    return "_orig_mod" if is_compiled(module) else None


def is_compiled(module: nn.Module) -> bool:
    """Say whether ``module`` is what ``torch.compile`` returns. Never imports the compiler, which takes seconds."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    return frames is not None and isinstance(module, frames.OptimizedModule)


def unwrap_module(module: nn.Module) -> nn.Module:
    """Return the bare module inside any number of wrappers around it."""
    while (name := wrapped_name(module)) is not None:
        inner = module._modules[name]  # noqa: SLF001 - a compiled module forwards attribute access to the inner one
        assert inner is not None
        module = inner
    return module


def copy_unwrapped(model: nn.Module) -> nn.Module:
    """Return a deep copy of a model without its wrappers; an average of the weights lives in one.

    Copying a wrapper itself would build a second reducer over the copy.

    Args:
        model: The model, wrapped or not, whole or by part; unchanged.
    """
    copies: dict[int, Any] = {}
    wrappers = [module for module in model.modules() if wrapped_name(module) is not None]
    for wrapper in reversed(wrappers):  # inner ones first: they are met again inside the outer ones
        copies[id(wrapper)] = copy.deepcopy(unwrap_module(wrapper), copies)
    return copy.deepcopy(unwrap_module(model), copies)


def plain_name(model: nn.Module, name: str) -> str:
    """Return the name that a parameter, buffer or state entry has in the unwrapped model.

    Args:
        model: The model, wrapped or not, whole or by part.
        name: Dotted name as ``model.state_dict()`` or ``model.named_parameters()`` spells it.
    """
    kept = []
    module: nn.Module | None = model
    for token in name.split("."):
        if module is None or token != wrapped_name(module):
            kept.append(token)
        module = None if module is None else module._modules.get(token)  # noqa: SLF001 - see unwrap_module
    return ".".join(kept)


def plain_state_dict(model: nn.Module) -> "OrderedDict[str, Any]":
    """Return ``model.state_dict()`` under plain names, as the unwrapped model would give it.

    Args:
        model: The model, wrapped or not, whole or by part.
    """
    state = model.state_dict()
    plain: OrderedDict[str, Any] = OrderedDict((plain_name(model, name), value) for name, value in state.items())
    assert len(plain) == len(state), "two entries have one plain name"
    metadata = getattr(state, "_metadata", {})
    # Versions of the modules travel along: BatchNorm, for one, reads its own at load.
    plain._metadata = {plain_name(model, name) if name else "": entry for name, entry in metadata.items()}  # type: ignore[attr-defined]  # noqa: SLF001
    return plain


def load_plain_state_dict(model: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> Any:
    """Load a state with plain names into a model, wrapped or not.

    A state that another program saved with its wrappers' names (``module.``, ``_orig_mod.``) loads too: if the names
    are not those of the model, both sides are compared without such tokens.

    Args:
        model: The model, wrapped or not, whole or by part.
        state: Name -> tensor.
        strict: Refuse missing and unexpected names, as ``nn.Module.load_state_dict`` does.

    Returns:
        What ``nn.Module.load_state_dict`` returns: the missing and the unexpected keys.

    Raises:
        RuntimeError: A name is missing or unexpected (``strict``), or a shape differs; torch's own message.
    """
    own = {plain_name(model, name): name for name in model.state_dict()}
    if not set(state) <= set(own):
        own |= _names_without_wrappers(own, state)
    renamed: OrderedDict[str, Any] = OrderedDict((own.get(name, name), value) for name, value in state.items())
    metadata = getattr(state, "_metadata", None)
    if metadata is not None:
        prefixes = {plain_name(model, name) if name else "": name for name, _ in model.named_modules()}
        renamed._metadata = {prefixes.get(name, name): entry for name, entry in metadata.items()}  # type: ignore[attr-defined]  # noqa: SLF001
    return model.load_state_dict(renamed, strict=strict)


def _names_without_wrappers(own: Mapping[str, str], state: Mapping[str, Any]) -> dict[str, str]:
    """Map foreign names to the model's, comparing without wrapper tokens; empty where that would be ambiguous."""
    stripped_own = {_stripped(plain): name for plain, name in own.items()}
    stripped_state = {_stripped(name): name for name in state}
    if len(stripped_own) != len(own) or len(stripped_state) != len(state):
        return {}
    return {name: stripped_own[key] for key, name in stripped_state.items() if key in stripped_own}


def _stripped(name: str) -> str:
    return ".".join(token for token in name.split(".") if token not in WRAPPER_TOKENS)


def declared_parts(model: nn.Module) -> dict[str, nn.Module]:
    """Return the parts that a model wants stepped on their own: attribute -> module; ``{"": model}`` for a plain one.

    Args:
        model: An unwrapped model. A composite has ``trainable_modules() -> {attribute: module}``.

    Raises:
        ConfigurationError: ``trainable_modules()`` is empty, or names what is not the model's attribute.
    """
    method = getattr(model, "trainable_modules", None)
    if not callable(method):
        return {"": model}
    parts = dict(method())
    if not parts:
        raise ConfigurationError(
            f"`{type(model).__name__}.trainable_modules()` must name at least one part, but is empty. "
            "Return {attribute: module}, or remove the method to have the model wrapped whole."
        )
    for name, part in parts.items():
        try:
            attribute = model.get_submodule(name)
        except AttributeError:
            attribute = None
        if not name or attribute is None or attribute is not part:
            raise ConfigurationError(
                f"`{type(model).__name__}.trainable_modules()` must name the model's own attributes, but {name!r} is "
                f"{'not the module that it returns' if attribute is not None and name else 'no module of the model'}. "
                "Return {attribute: getattr(self, attribute)}."
            )
    return parts


def refuse_stray_parameters(model: nn.Module, parts: Mapping[str, nn.Module]) -> None:
    """Refuse trainable parameters in no part, which nothing would sync, and in two, which two reducers would claim.

    Args:
        model: The unwrapped model.
        parts: Its parts, as ``declared_parts`` returns them.

    Raises:
        ConfigurationError: Names the parameters, and the parts that share them.
    """
    owners: dict[int, list[str]] = {}
    for part_name, part in parts.items():
        for parameter in part.parameters():
            owners.setdefault(id(parameter), []).append(part_name)
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    stray = [name for name, parameter in trainable if id(parameter) not in owners]
    if stray:
        raise ConfigurationError(
            f"`{listed(stray)}` must be in one of the model's trainable parts ({', '.join(parts)}), but is in none: "
            "its gradient would never be synced. Move it into a part, add its module to trainable_modules(), "
            "or freeze it."
        )
    shared = [(name, owners[id(parameter)]) for name, parameter in trainable if len(owners[id(parameter)]) > 1]
    if shared:
        raise ConfigurationError(
            f"`{listed([name for name, _ in shared])}` must be in one trainable part, but is in "
            f"{' and '.join(shared[0][1])}. Give each part parameters of its own, or make one part of them."
        )


def replace_part(model: nn.Module, name: str, part: nn.Module) -> None:
    """Set ``part`` as the attribute ``name`` (dotted for a nested one) of the model."""
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, part)


def has_trainable_parameters(module: nn.Module) -> bool:
    """Say whether any parameter of the module takes a gradient."""
    return any(parameter.requires_grad for parameter in module.parameters())


def reducers(model: nn.Module) -> Iterator[DistributedDataParallel]:
    """Yield every ``DistributedDataParallel`` wrapper in a model, compiled or not."""
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            yield module


def trainable_names(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return name and tensor of the parameters that take a gradient, in the order in which DDP counts them."""
    return [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]


def listed(names: list[str], limit: int = 5) -> str:
    """Return the first names in words, and how many more there are."""
    rest = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {rest} more" if rest > 0 else "")
