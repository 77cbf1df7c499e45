"""Start a new run from weights that exist: another run's, or published ones with names of their own.

Apart from resume: nothing but weights is taken, and every difference is reported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from srforge.training.checkpoint_files import CheckpointError
from srforge.training.published_weights import read_weights

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

# Left in names by wrappers (DataParallel and DDP, torch.compile, FSDP) when the wrapped module was saved.
_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module")
_LISTED = 10


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """The outcome of a warm start.

    Attributes:
        state: The model's state with the matched tensors replaced, ready for ``load_state_dict``.
        source: Key under which the weights lay in the file, empty at the top.
        matched: Names of the model that got a tensor from the file.
        missing: Names of the model, in the parts asked for, that the file lacks.
        unexpected: Names in the file that the model lacks.
        mismatched: Names with other shapes: (in the model, in the file).
    """

    state: dict[str, torch.Tensor]
    source: str
    matched: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]

    def __str__(self) -> str:
        """One line for people."""
        return (
            f"{len(self.matched)} matched, {len(self.missing)} missing{_listed(self.missing)}, "
            f"{len(self.unexpected)} unexpected{_listed(self.unexpected)}, "
            f"{len(self.mismatched)} of other shape{_listed(self.shapes)}"
        )

    @property
    def shapes(self) -> tuple[str, ...]:
        """The mismatches as text, model first."""
        return tuple(f"{name} {model} against {file}" for name, (model, file) in self.mismatched.items())


def warm_start(
    model_state: Mapping[str, torch.Tensor],
    path: str | Path,
    *,
    prefixes: Mapping[str, str] | None = None,
    strict: bool = True,
    parts: Sequence[str] | None = None,
    nest: str | None = None,
) -> WarmStart:
    """Match the tensors of a file with a model's names. The model itself is not touched: load the returned ``state``.

    Names are matched as they are, then without what wrappers put into them (``module.``, ``_orig_mod.``), but only
    where that gives a name of the model: a parameter that is really named ``module.x`` stays one.

    Args:
        model_state: Plain state of the model.
        path: Local ``.safetensors``, ``.pt``, ``.pth``, ``.ckpt`` or ``.bin`` file.
        prefixes: Rules ``{prefix in the file: prefix in the model}``, the longest that fits is used; ``""`` fits all.
        strict: Whether a missing, unexpected or mismatched name is an error; else it is reported only.
        parts: Attributes of the model to take (``["generator"]`` of a GAN); names of other parts in the file are left
            alone. With a single part, a file of that part alone is recognised.
        nest: Key under which the weights lie in the file; None looks for the usual ones (``params_ema``, ``params``,
            ``state_dict``, ...).

    Raises:
        CheckpointError: The file cannot be read, nothing matches, two names fall on one, or ``strict`` is violated.
    """
    file_state, source = read_weights(path, nest=nest)
    wanted = {name for name in model_state if parts is None or name.split(".")[0] in parts}
    if not wanted:
        raise CheckpointError(f"`parts` must name parts of the model, but is {list(parts or ())}. Check the spelling.")
    renamed, unexpected = _renamed(file_state, model_state, wanted, prefixes or {}, parts)
    if twice := [name for name, tensors in renamed.items() if len(tensors) > 1]:
        raise CheckpointError(f"{path} must have one tensor for {twice[0]}, but has several. Narrow it by `prefixes`.")
    found = {name: tensors[0] for name, tensors in renamed.items()}
    mismatched = {
        name: (tuple(model_state[name].shape), tuple(tensor.shape))
        for name, tensor in found.items()
        if model_state[name].shape != tensor.shape
    }
    matched = tuple(name for name in model_state if name in found and name not in mismatched)
    result = WarmStart(
        state={
            name: found[name].to(value.dtype) if name in found and name not in mismatched else value
            for name, value in model_state.items()
        },
        source=source,
        matched=matched,
        missing=tuple(name for name in model_state if name in wanted and name not in found),
        unexpected=tuple(unexpected),
        mismatched=mismatched,
    )
    if not matched or (strict and (result.missing or result.unexpected or result.mismatched)):
        cure = "Map names by `prefixes`, choose `parts`, or pass strict=False." if matched else "Is it another model's?"
        raise CheckpointError(f"{path} must fit the model, but: {result}. {cure}")
    return result


def _renamed(
    file_state: Mapping[str, torch.Tensor],
    model_state: Mapping[str, torch.Tensor],
    wanted: set[str],
    prefixes: Mapping[str, str],
    parts: Sequence[str] | None,
) -> tuple[dict[str, list[torch.Tensor]], list[str]]:
    """Return the file's tensors by the model's names, and the names that the model does not have."""
    renamed: dict[str, list[torch.Tensor]] = {}
    unexpected = []
    for name, tensor in file_state.items():
        target = _target(_by_rule(name, prefixes), model_state, parts)
        if target is None:
            unexpected.append(name)
        elif target in wanted:
            renamed.setdefault(target, []).append(tensor)
    return renamed, unexpected


def _by_rule(name: str, prefixes: Mapping[str, str]) -> str:
    fitting = [prefix for prefix in prefixes if name.startswith(prefix)]
    if not fitting:
        return name
    prefix = max(fitting, key=len)
    return prefixes[prefix] + name[len(prefix) :]


def _target(name: str, model_state: Mapping[str, torch.Tensor], parts: Sequence[str] | None) -> str | None:
    """Return the model's name for a name of the file, or None."""
    places = ("", f"{parts[0]}.") if parts is not None and len(parts) == 1 else ("",)
    for place in places:
        for candidate in _unwrapped(name):
            if place + candidate in model_state:
                return place + candidate
    return None


def _unwrapped(name: str) -> Iterator[str]:
    """Yield the name as it is, then with one wrapper's word less each time."""
    words = name.split(".")
    yield name
    while wrapper := next((word for word in words if word in _WRAPPERS), None):
        words.remove(wrapper)
        yield ".".join(words)


def _listed(names: tuple[str, ...]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f" ({', '.join(names[:_LISTED])}{more})"
