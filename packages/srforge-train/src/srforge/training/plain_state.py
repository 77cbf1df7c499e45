"""Turn training state into values that ``torch.load(weights_only=True)`` accepts, or say which value it would refuse.

Checked before a byte is written: a file that no launch can read is worse than an error.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from srforge.training.checkpoint_files import CheckpointError

# Exact types: a subclass pickles as a global of its own, which the loader refuses. So does empty bytes.
_PLAIN_TYPES = (type(None), bool, int, float, complex, str, torch.Size, torch.dtype, torch.device)
_TENSOR_TYPES = (Tensor, nn.Parameter)


def to_plain(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``state`` with containers as plain dicts, lists and tuples and NumPy scalars as Python numbers.

    Configuration containers (OmegaConf's, also inside an optimizer's groups) become what they hold. Tensors are passed
    on without a copy, except a view of a larger storage, which would drag all of it into the file.

    Args:
        state: Nested mapping of tensors and plain values.

    Raises:
        CheckpointError: A value cannot be loaded back with ``weights_only=True``; the message has its key path.
    """
    return {_plain_key(key, "state"): _plain(value, f"state[{key!r}]") for key, value in state.items()}


def _plain(value: Any, path: str) -> Any:
    if isinstance(value, Tensor):
        return _plain_tensor(value, path)
    if type(value) in _PLAIN_TYPES:
        return value
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        return _plain(value.item(), path) if not isinstance(value.item(), numpy.generic) else _refuse(value, path)
    if isinstance(value, Mapping):
        return {_plain_key(key, path): _plain(item, f"{path}[{key!r}]") for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return {_plain(item, f"{path}{{...}}") for item in value}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray, range)):
        items = [_plain(item, f"{path}[{index}]") for index, item in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    return _refuse(value, path)


def _plain_key(key: Any, path: str) -> Any:
    if type(key) in _PLAIN_TYPES or (type(key) is tuple and all(type(part) in _PLAIN_TYPES for part in key)):
        return key
    return _refuse(key, f"key {key!r} of {path}")


def _plain_tensor(tensor: Tensor, path: str) -> Tensor:
    if type(tensor) not in _TENSOR_TYPES:
        _refuse(tensor, path)
    if tensor.layout is torch.strided and tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size():
        return tensor.detach().clone()
    return tensor.detach()


def _refuse(value: Any, path: str) -> Any:
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    raise CheckpointError(
        f"{path} must be a tensor, a number, a string or a container of these, but is {kind}: {value!r:.80}. "
        "Store its plain form (float(x), str(path), torch.as_tensor(array)) and rebuild the object when loading."
    )
