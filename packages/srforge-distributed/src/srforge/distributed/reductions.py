"""Metrics of the fleet from metrics of the ranks: the single-process value, the same bits on every rank.

Two collectives however many metrics there are: one of fixed size in which the ranks compare what they are about to
send, and one packed float64 gather that each rank reduces itself, in rank order. Only when the ranks' keys differ is
there a third, which exchanges the keys, so that different keys can never be mixed up or leave a rank waiting.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from srforge.distributed.errors import CollectiveError, ConfigurationError
from srforge.distributed.metric_tree import MetricSum, Path, flatten, pack, rebuild, spell

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from torch import Tensor

_GROUP = "group"  # stands where a leaf has its reduction: an empty group is kept as one


@dataclass(frozen=True)
class ReductionReport:
    """What a reduction saw besides the values; the same on every rank.

    Attributes:
        missing: Key (``validation/psnr``) -> ranks whose metrics lacked it, though another rank had it.
        non_finite: Key -> ranks whose total was NaN or infinite.
    """

    missing: dict[str, tuple[int, ...]] = field(default_factory=dict)
    non_finite: dict[str, tuple[int, ...]] = field(default_factory=dict)


def reduce_metrics(
    tree: Mapping[Any, Any], all_gather: Callable[[Tensor], Tensor]
) -> tuple[dict[Any, Any], ReductionReport]:
    """Return the fleet's value of each metric, and a report.

    The value is the one a single process would have computed over all samples: means are weighted by count, whatever
    each rank's share; a rank without samples changes nothing. Nesting and order are those of ``tree``; keys that only
    other ranks have are appended to their groups; a key that no rank counted is left out.

    Args:
        tree: Nested mapping with ``MetricSum`` leaves; keys are strings or integers.
        all_gather: ``(*shape) -> (world_size, *shape)`` in rank order, for int64, uint8 and float64 CPU tensors.

    Returns:
        The same nesting with float leaves, and the report.

    Raises:
        CollectiveError: On every rank: a rank's tree is malformed, ranks disagree about a key's reduction, or a count
            is negative or not finite.
        ConfigurationError: On the rank whose tree is malformed.

    Collective: every rank must call. Two collectives when the ranks' keys agree in any order, else three.
    """
    steps = reduction_steps(tree)
    message = next(steps)
    try:
        while True:
            message = steps.send(all_gather(message))
    except StopIteration as end:
        reduced: tuple[dict[Any, Any], ReductionReport] = end.value
        return reduced


def reduction_steps(
    tree: Mapping[Any, Any],
) -> Generator[Tensor, Tensor, tuple[dict[Any, Any], ReductionReport]]:
    """Yield what this rank sends and receive what all ranks sent, ``(world_size, *shape)``: the protocol without IO.

    ``FakeStrategy`` steps the generators of several ranks side by side.
    """
    leaves: dict[Path, MetricSum | None] = {}
    failure: ConfigurationError | None = None
    try:
        leaves = flatten(tree)
    except ConfigurationError as error:  # told to the other ranks before it is raised: they are waiting
        failure = error
    schema = sorted([json.dumps(path), leaf.reduction if leaf else _GROUP] for path, leaf in leaves.items())
    letter = json.dumps(schema if failure is None else {"failure": str(failure)}).encode()
    headers = (yield _header(letter, is_failure=failure is not None)).tolist()
    if any(header[0] for header in headers) or any(header != headers[0] for header in headers):
        letters = yield torch.tensor(list(letter.ljust(max(header[1] for header in headers))), dtype=torch.uint8)
        texts = [bytes(row[: header[1]]) for row, header in zip(letters.tolist(), headers, strict=True)]
        if failure is not None:
            raise failure
        schemas = [json.loads(text) for text in texts]
    else:
        schemas = [schema] * len(headers)
    reductions, missing = _agree(schemas)

    paths = [path for path, reduction in reductions.items() if reduction != _GROUP]
    if not paths:  # every rank knows that
        return rebuild(tree, list(reductions), {}), ReductionReport(missing)
    gathered = (yield pack([leaves.get(path) for path in paths])).tolist()
    values: dict[Path, float | None] = {}
    non_finite: dict[str, tuple[int, ...]] = {}
    for position, path in enumerate(paths):
        totals, counts = zip(*(rank[position] for rank in gathered), strict=True)
        _refuse_bad_counts(path, totals, counts, reductions[path])
        values[path] = _reduce(reductions[path], totals, counts)
        # A rank that counted nothing has no extreme: infinity is what its minimum starts from.
        starts = {"min": math.inf, "max": -math.inf}
        voids = {
            rank for rank, count in enumerate(counts) if count == 0 and totals[rank] == starts.get(reductions[path])
        }
        bad = tuple(rank for rank, total in enumerate(totals) if not math.isfinite(total) and rank not in voids)
        if bad:
            non_finite[spell(path)] = bad
    return rebuild(tree, list(reductions), values), ReductionReport(missing, non_finite)


def _header(letter: bytes, *, is_failure: bool) -> Tensor:
    """Return ``(failed, length, digest, digest)``, int64: 128 bits stand for the whole schema."""
    digest = hashlib.blake2b(letter, digest_size=16).digest()
    halves = [int.from_bytes(half, "big", signed=True) for half in (digest[:8], digest[8:])]
    return torch.tensor([int(is_failure), len(letter), *halves], dtype=torch.int64)


def _agree(schemas: Sequence[Any]) -> tuple[dict[Path, str], dict[str, tuple[int, ...]]]:
    """Return path -> reduction over all ranks in one order, and who lacks what; refuse what contradicts itself."""
    failures = {rank: schema["failure"] for rank, schema in enumerate(schemas) if isinstance(schema, dict)}
    if failures:
        rank, text = next(iter(failures.items()))
        raise CollectiveError(f"the metrics of rank {rank} could not be reduced: {text}")
    owners: dict[Path, dict[str, list[int]]] = {}
    for rank, schema in enumerate(schemas):
        for text, reduction in schema:
            owners.setdefault(tuple(json.loads(text)), {}).setdefault(reduction, []).append(rank)
    reductions: dict[Path, str] = {}
    missing: dict[str, tuple[int, ...]] = {}
    for path in sorted(owners, key=json.dumps):
        if len(owners[path]) > 1:
            _refuse_conflict(path, owners[path])
        ((reduction, ranks),) = owners[path].items()
        reductions[path] = reduction
        if len(ranks) < len(schemas) and reduction != _GROUP:
            missing[spell(path)] = tuple(rank for rank in range(len(schemas)) if rank not in ranks)
    _refuse_metrics_that_are_groups_elsewhere(reductions, owners)
    return reductions, missing


def _refuse_metrics_that_are_groups_elsewhere(
    reductions: Mapping[Path, str], owners: Mapping[Path, Mapping[str, Sequence[int]]]
) -> None:
    groups = {path[:length]: path for path in reductions for length in range(1, len(path))}
    for path, reduction in reductions.items():
        if path in groups and reduction != _GROUP:  # a group may be empty on one rank and filled on another
            ranks = sorted(rank for ranks in owners[groups[path]].values() for rank in ranks)
            _refuse_conflict(path, {**owners[path], _GROUP: ranks})


def _refuse_conflict(path: Path, owners: Mapping[str, Sequence[int]]) -> None:
    said = ", ".join(f"{what} on rank {', '.join(map(str, ranks))}" for what, ranks in owners.items())
    raise CollectiveError(
        f"metric `{spell(path)}` must be the same kind of value on every rank, but is {said}. "
        f"Report it with one reduction everywhere."
    )


def _refuse_bad_counts(path: Path, totals: Sequence[float], counts: Sequence[float], reduction: str) -> None:
    for rank, (total, count) in enumerate(zip(totals, counts, strict=True)):
        if not 0 <= count < math.inf:
            raise CollectiveError(
                f"`count` of metric `{spell(path)}` must be finite and >= 0, but is {count} on rank {rank}. "
                f"Count the samples in the total."
            )
        if count == 0 and reduction in ("mean", "sum") and math.isfinite(total) and total != 0:
            raise CollectiveError(
                f"`total` of metric `{spell(path)}` must be 0 where nothing was counted, but is {total} on rank {rank}."
                f" Count the samples in the total."
            )


def _reduce(reduction: str, totals: Sequence[float], counts: Sequence[float]) -> float | None:
    """Return one metric over all ranks, or None when no rank counted anything."""
    counted = [total for total, count in zip(totals, counts, strict=True) if count > 0]
    if not counted:
        return None
    if reduction in ("min", "max"):
        # min() and max() return NaN or not by its position.
        return math.nan if any(map(math.isnan, counted)) else {"min": min, "max": max}[reduction](counted)
    total = _sum(counted)
    return total / _sum(counts) if reduction == "mean" else total


def _sum(numbers: Sequence[float]) -> float:
    """Return the sum, rounded once (so any number of ranks gives the same bits); NaN and infinities propagate."""
    try:
        return math.fsum(numbers)
    except (OverflowError, ValueError):  # beyond the largest double, or inf - inf
        return sum(numbers)
