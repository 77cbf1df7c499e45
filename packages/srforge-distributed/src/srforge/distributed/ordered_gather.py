"""Small per-sample results of all ranks, together again in the order of the data set."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from srforge.distributed.active import get_active_strategy
from srforge.distributed.errors import CollectiveError

if TYPE_CHECKING:
    from collections.abc import Sequence


def gather_in_order(values: Sequence[Any], indices: Sequence[int], *, num_samples: int | None = None) -> list[Any]:
    """Return every rank's per-sample values sorted by sample index, the same list on every rank.

    For scores, captions or small predictions: all of them travel to all ranks as objects.

    Args:
        values: This rank's values, one per sample; tensors arrive on the CPU, detached. May be empty.
        indices: The samples' positions in the data set, one per value.
        num_samples: Length of the data set; given, every one of its samples must have come.

    Returns:
        Values of all ranks by ascending index.

    Raises:
        CollectiveError: On every rank: a rank gave unequal numbers of values and indices, an index came twice, or
            one of ``num_samples`` did not come.

    Collective: every rank must call.
    """
    lengths = (len(values), len(indices))
    # A mismatch is sent, not raised: the other ranks are waiting.
    own = [(int(index), _portable(value)) for index, value in zip(indices, values, strict=False)]
    gathered = get_active_strategy().all_gather_object((lengths, own))
    by_index: dict[int, Any] = {}
    origin: dict[int, int] = {}
    for rank, ((num_values, num_indices), pairs) in enumerate(gathered):
        if num_values != num_indices:
            raise CollectiveError(
                f"`indices` must have one entry for each value, but rank {rank} gave {num_indices} for {num_values} "
                f"values. Collect both in the same loop."
            )
        for index, value in pairs:
            if index in by_index:
                raise CollectiveError(
                    f"each sample must be gathered once, but sample {index} came from rank {origin[index]} and from "
                    f"rank {rank}. Use a sampler that does not pad (make_sampler with training=False)."
                )
            by_index[index], origin[index] = value, rank
    if num_samples is not None and by_index.keys() != set(range(num_samples)):
        wrong = sorted(by_index.keys() ^ set(range(num_samples)))
        raise CollectiveError(
            f"samples 0 to {num_samples - 1} must be gathered, but {len(wrong)} of them are missing or unknown, the "
            f"first {wrong[0]}. Look for a rank that skipped a batch."
        )
    return [by_index[index] for index in sorted(by_index)]


def _portable(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value
