"""Weights alone, for whoever uses the trained model: safetensors, plain names, nothing that could run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import safetensors.torch
import torch

from srforge.training.checkpoint_files import CheckpointError, write_atomically

if TYPE_CHECKING:
    from collections.abc import Mapping


def export_weights(
    state_dict: Mapping[str, torch.Tensor], path: str | Path, *, metadata: Mapping[str, str] | None = None
) -> Path:
    """Write weights as a ``.safetensors`` file, in one rename.

    Args:
        state_dict: Names and tensors of the bare model (``strategy.unwrap`` or ``plain_state_dict``); names are kept.
        path: The file to write; it must end in ``.safetensors``.
        metadata: Texts to put into the file's header.

    Returns:
        The path.

    Raises:
        CheckpointError: A value is no dense tensor, the name has another ending, or the disk refused.
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        raise CheckpointError(f"`path` must end in .safetensors, but is {path}. Rename it.")
    tensors = {}
    for name, value in state_dict.items():
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            raise CheckpointError(
                f"state_dict[{name!r}] must be a dense tensor, but is {type(value).__name__}. Leave it out of the export."
            )
        # A copy each: the format has no shared storage, so tied weights are written twice.
        tensors[name] = value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    content = safetensors.torch.save(tensors, metadata={"format": "pt", **(metadata or {})})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda sink: sink.write(content))
    except OSError as error:
        raise CheckpointError(f"{path} could not be written: {error}. It is as it was.") from error
    return path
