"""Two runs compared to the last bit: what the laws of resume are tested with."""

from pathlib import Path
from typing import Any

import torch

from srforge.training import CheckpointStore


def differences(left: Any, right: Any, where: str = "state") -> list[str]:
    """Return where two states differ in a bit."""
    if type(left) is not type(right):
        return [where]
    if isinstance(left, torch.Tensor):
        same = left.dtype == right.dtype and left.shape == right.shape
        bits = [value.contiguous().reshape(-1).view(torch.uint8) for value in (left, right)] if same else []
        return [] if same and torch.equal(*bits) else [where]
    if isinstance(left, dict):
        if list(left) != list(right):
            return [f"keys of {where}"]
        return [found for key in left for found in differences(left[key], right[key], f"{where}.{key}")]
    if isinstance(left, (list, tuple)):
        if len(left) != len(right):
            return [f"length of {where}"]
        pairs = zip(left, right, strict=True)
        return [found for i, (a, b) in enumerate(pairs) for found in differences(a, b, f"{where}[{i}]")]
    return [] if left == right or left != left else [where]  # noqa: PLR0124  # NaN


def compare_runs(reference: Path, folder: Path) -> list[str]:
    """Return the differences of two finished runs: every kept checkpoint, the history, and the names of all files."""
    found = []
    stores = [CheckpointStore(run / "checkpoints") for run in (reference, folder)]
    records = [store.records() for store in stores]
    names = [sorted(str(path.relative_to(run)) for path in run.rglob("*")) for run in (reference, folder)]
    if names[0] != names[1]:
        found.append(f"files {sorted(set(names[0]) ^ set(names[1]))}")
    for left, right in zip(*records, strict=False):
        states = [store.load(record) for store, record in zip(stores, (left, right), strict=True)]
        found += differences(*states, where=left.path.stem)
        if (left.metrics, left.is_best, left.finished) != (right.metrics, right.is_best, right.finished):
            found.append(f"record {left.path.stem}")
    if (reference / "metrics.jsonl").read_bytes() != (folder / "metrics.jsonl").read_bytes():
        found.append("metrics.jsonl")
    return found
