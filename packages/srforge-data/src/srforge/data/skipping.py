"""Going on without unreadable files: by a rule that keeps ranks in step, and counted.

A file that cannot be read ends the run by default. Where that is not wanted, ``SkipUnreadable`` puts the next readable
sample in its place: every key still gives exactly one sample, so no rank has fewer than the others, and which one it
gives depends on the data set only, not on workers, ranks or a resume.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch.utils.data import Dataset

from srforge.data.image_formats import ImageReadError
from srforge.data.seeded import inner_datasets
from srforge.distributed.errors import ConfigurationError

MAX_UNREADABLE_IN_A_ROW = 100
"""So many unreadable samples in a row are no accident (a missing mount, a wrong folder) and end the run."""


class SkipUnreadable(Dataset[Any]):
    """A data set whose unreadable samples are replaced by the next readable ones.

    Sample ``i``, where making it raises ``ImageReadError``, becomes the first of ``i + 1``, ``i + 2``, ... (modulo the
    length) that does not. Training sees that one twice; so in evaluation ``on_error="raise"`` is the right choice, as
    a replaced sample changes the mean.

    Args:
        dataset: A map-style data set whose samples come from ``read_image``.
        on_error: ``"raise"``: errors pass through, nothing is counted. ``"skip"``: the rule above.

    Raises:
        ConfigurationError: ``on_error`` is neither.
    """

    def __init__(self, dataset: Any, *, on_error: Literal["raise", "skip"] = "raise") -> None:
        if on_error not in ("raise", "skip"):
            raise ConfigurationError(f"`on_error` must be raise or skip, but is {on_error!r}. Choose one of them.")
        self.dataset = dataset
        self.on_error = on_error
        # One flag per sample in memory that workers share: setting one needs no lock, and setting it twice is once.
        self._replaced = torch.zeros(len(dataset) if on_error == "skip" else 0, dtype=torch.bool).share_memory_()  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        """Return the sample, or its replacement.

        Args:
            index: Of the sample.

        Raises:
            ImageReadError: It cannot be read and ``on_error`` is ``"raise"``, or neither it nor the
                ``MAX_UNREADABLE_IN_A_ROW`` samples after it can be read.
        """
        if self.on_error == "raise":
            return self.dataset[index]
        attempts = min(len(self), MAX_UNREADABLE_IN_A_ROW)
        first_error: ImageReadError | None = None
        for step in range(attempts):
            try:
                sample = self.dataset[(index + step) % len(self)]
            except ImageReadError as error:  # noqa: PERF203 - the rule is to try again, and reading costs far more
                first_error = first_error or error
                self._replaced[index] = True
            else:
                return sample
        raise ImageReadError(
            f"one of {attempts} samples from {index} on must be readable, but none is. Check the data set's folder; "
            f"the first error: {first_error}"
        ) from first_error

    def take_skipped(self) -> list[int]:
        """Return the indices of the samples replaced since the last call, by this process and its workers."""
        indices: list[int] = self._replaced.nonzero().flatten().tolist()
        self._replaced.zero_()
        return indices


def take_skipped(source: Any) -> list[int]:
    """Return the indices of samples that this rank replaced since the last call.

    For one number over the fleet, put ``MetricSum(len(take_skipped(loader)), 1, "sum")`` under a name of its own
    (``skipped_samples``) into the tree that ``reduce_metrics`` gets at the end of the epoch: no collective more.

    Args:
        source: A loader or a data set; the ``SkipUnreadable`` in its wrappers, subsets and concatenations are found.

    Returns:
        Indices within each ``SkipUnreadable``, ascending; empty if there is none, or nothing was skipped.
    """
    if isinstance(source, SkipUnreadable):
        return source.take_skipped()
    return [index for _, dataset in inner_datasets(source) for index in take_skipped(dataset)]
