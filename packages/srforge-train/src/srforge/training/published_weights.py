"""Read the weights out of a file that somebody else may have written, without running anything in it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

import safetensors.torch
import torch
from safetensors import SafetensorError

from srforge.training.checkpoint_files import CheckpointError
from srforge.training.checkpoint_reading import load_plain

# Where published files keep their weights, the better choice first: ESRGAN-style files hold both an average and the last.
_NESTS = ("params_ema", "ema", "params", "state_dict", "model_state_dict", "model", "weights", "generator")


def read_weights(path: str | Path, *, nest: str | None = None) -> tuple[dict[str, torch.Tensor], str]:
    """Read names and tensors from a local ``.safetensors``, ``.pt``, ``.pth``, ``.ckpt`` or ``.bin`` file.

    Args:
        path: The file.
        nest: Key under which the weights lie, dots for deeper ones; None looks for the usual ones.

    Returns:
        The tensors by name, as in the file, on the CPU; and the key that they were found under, empty at the top.

    Raises:
        CheckpointError: The file is missing, is of another kind, holds no weights, or holds more than plain values.
    """
    path = Path(path)
    if path.suffix not in {".safetensors", ".pt", ".pth", ".ckpt", ".bin"}:
        raise CheckpointError(f"`path` must end in .safetensors, .pt, .pth, .ckpt or .bin, but is {path}. Convert it.")
    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load(path.read_bytes()), ""
        with path.open("rb") as file:
            content = load_plain(file, path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    except SafetensorError as error:
        raise CheckpointError(f"{path} must be a safetensors file, but: {error}. Download it again.") from error
    return _find(content, path, nest)


def _find(content: Any, path: Path, nest: str | None) -> tuple[dict[str, torch.Tensor], str]:
    if nest is not None:
        found = content
        for key in nest.split("."):
            found = found.get(key) if isinstance(found, Mapping) else None
        if not _is_weights(found):
            keys = ", ".join(map(str, content)) if isinstance(content, Mapping) else type(content).__name__
            raise CheckpointError(f"`nest` must lead to weights in {path}, but is {nest!r}. The file has: {keys:.400}.")
        return _tensors(found), nest
    if _is_weights(content):
        return _tensors(content), ""
    if isinstance(content, Mapping):
        for key in _NESTS:
            inner = content.get(key)
            if _is_weights(inner):
                return _tensors(inner), key
            if isinstance(inner, Mapping):
                try:
                    tensors, deeper = _find(inner, path, None)
                except CheckpointError:
                    continue
                return tensors, f"{key}.{deeper}"
    keys = ", ".join(map(str, content)) if isinstance(content, Mapping) else type(content).__name__
    raise CheckpointError(
        f"{path} must hold weights at the top or under a usual key, but has: {keys:.400}. Pass `nest`."
    )


def _is_weights(value: Any) -> TypeGuard[Mapping[str, Any]]:
    """Whether this is a flat mapping of names with a tensor in it.

    Batch norm's counters may be plain numbers, and a module's extra state (torch's name for it) may be anything.
    """
    if not isinstance(value, Mapping):
        return False
    items = [item for name, item in value.items() if not str(name).endswith("_extra_state")]
    return any(isinstance(item, torch.Tensor) for item in items) and not any(
        isinstance(item, Mapping) and item for item in items
    )


def _tensors(found: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {str(name): value for name, value in found.items() if isinstance(value, torch.Tensor)}
