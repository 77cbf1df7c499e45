"""Losses and metrics as named terms.

A term compares entries of the batch and the prediction and returns one of

* per-sample values, shape ``(N,)``;
* a mean over the batch, shape ``()``;
* a masked quantity as the pair ``(sum, count)``, both of shape ``()``;
* a mapping ``{band: any of these}``.

What becomes of them over an epoch is the accumulator's business, not this module's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, Union

import torch
from torch import Tensor

from srforge.distributed import ConfigurationError
from srforge.training.options import require_positive

Value: TypeAlias = Union[Tensor, tuple[Tensor, Tensor], Mapping[str, "Value"]]  # noqa: UP007  # it names itself
Weight: TypeAlias = float | Callable[[int], float]


@dataclass(frozen=True, kw_only=True)
class Term:
    """One named part of an objective, or one metric.

    Args:
        function: Called with the values of ``keys``, in order; returns a value as described in this module.
        weight: Factor of the term in the loss: a number, or a function of the epoch (0-based).
        keys: Entries to compare: ``prediction`` is the model's output, any other name is an entry of the batch.
        per_band: Call the function once for each band when its arguments are mappings ``{band: tensor}``. Turn it off
            for a function that wants the whole mapping.
    """

    function: Callable[..., Any]
    weight: Weight = 1.0
    keys: tuple[str, ...] = ("prediction", "hr")
    per_band: bool = True

    def __post_init__(self) -> None:
        keys: Any = self.keys  # from YAML it may be a list, or one name
        object.__setattr__(self, "keys", (keys,) if isinstance(keys, str) else tuple(keys))

    def weight_at(self, epoch: int) -> float:
        """Return the weight in the given epoch (0-based)."""
        return float(self.weight(epoch)) if callable(self.weight) else float(self.weight)

    def evaluate(self, prediction: Any, batch: Mapping[str, Any]) -> Value:
        """Compute the term for one batch.

        Raises:
            ConfigurationError: The batch has no entry of a name in ``keys``, or bands differ between arguments.
        """
        arguments = [prediction if key == "prediction" else _entry(batch, key) for key in self.keys]
        banded = [argument for argument in arguments if isinstance(argument, Mapping)]
        if not banded or not self.per_band:
            return self.function(*arguments)  # type: ignore[no-any-return]
        bands = list(banded[0])
        for argument in banded[1:]:
            if set(argument) != set(bands):
                raise ConfigurationError(
                    f"The bands of {self.keys} must be the same, but are {sorted(bands)} and {sorted(argument)}."
                )
        return {band: self.function(*(a[band] if isinstance(a, Mapping) else a for a in arguments)) for band in bands}


@dataclass(frozen=True)
class LinearRamp:
    """A weight that goes from one value to another over some epochs, and then stays.

    Args:
        start: Weight in epoch 0.
        end: Weight from epoch ``num_epochs`` on.
        num_epochs: Length of the ramp, > 0.

    Raises:
        ConfigurationError: ``num_epochs`` is not above 0.
    """

    start: float
    end: float
    num_epochs: int

    def __post_init__(self) -> None:
        require_positive("num_epochs", self.num_epochs)

    def __call__(self, epoch: int) -> float:
        """Return the weight in the given epoch (0-based)."""
        return self.start + (self.end - self.start) * min(1.0, epoch / self.num_epochs)


class TermValues:
    """The values of one batch's terms by name, and the loss that they add up to.

    A hook on ``on_post_forward`` may replace a value (``values["l1"] = ...``), or add a term with ``add``.
    """

    def __init__(self) -> None:
        self._values: dict[str, Value] = {}
        self._weights: dict[str, float] = {}
        self._scheduled: set[str] = set()

    def add(self, name: str, value: Value, weight: float = 1.0, *, scheduled: bool = False) -> None:
        """Add a term, or replace the one of this name together with its weight.

        Args:
            name: Of the term.
            value: As described in this module.
            weight: Factor in the loss.
            scheduled: The weight changes by epoch. Such a term stays in the graph while its weight is 0: a static graph
                must have the same parameters in every step.
        """
        self._values[name] = value
        self._weights[name] = weight
        if scheduled:
            self._scheduled.add(name)

    def __getitem__(self, name: str) -> Value:
        return self._values[name]

    def __setitem__(self, name: str, value: Value) -> None:
        self.add(name, value, self._weights.get(name, 1.0))

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def values(self) -> dict[str, Value]:
        """Return the values by name."""
        return dict(self._values)

    def total(self) -> Tensor:
        """Return the weighted sum of the terms' means, shape ``()``: the loss of this batch.

        Raises:
            ConfigurationError: No term has a weight.
        """
        parts = [
            mean_of(name, self._values[name]) * weight
            for name, weight in self._weights.items()
            if weight != 0 or name in self._scheduled
        ]
        if not parts:
            raise ConfigurationError("The objective must have at least one term with a weight other than 0.")
        return torch.stack(parts).sum() if len(parts) > 1 else parts[0]

    def without_gradient(self) -> list[str]:
        """Return the names of weighted terms from which no gradient flows to any parameter."""
        return [
            name for name, w in self._weights.items() if w != 0 and not mean_of(name, self._values[name]).requires_grad
        ]


class Objective:
    """Named terms whose weighted sum is minimised.

    Args:
        terms: ``{name: Term}``; a bare callable stands for ``Term(function=callable)``.

    Raises:
        ConfigurationError: There is no term.
    """

    def __init__(self, terms: Mapping[str, Term | Callable[..., Any]]) -> None:
        if not terms:
            raise ConfigurationError("`terms` must name at least one term, but is empty.")
        self.terms = {name: term if isinstance(term, Term) else Term(function=term) for name, term in terms.items()}

    def __call__(self, prediction: Any, batch: Mapping[str, Any], epoch: int = 0) -> TermValues:
        """Evaluate every term on one batch."""
        values = TermValues()
        for name, term in self.terms.items():
            value = term.evaluate(prediction, batch)
            values.add(name, value, term.weight_at(epoch), scheduled=callable(term.weight))
        return values


class Metrics(Objective):
    """Named terms that are reported and never minimised: weights play no part, no gradient is kept."""

    @torch.no_grad()
    def __call__(self, prediction: Any, batch: Mapping[str, Any], epoch: int = 0) -> TermValues:
        """Evaluate every term on one batch, without gradients."""
        return super().__call__(prediction, batch, epoch)


def refuse_dead_terms(values: TermValues) -> None:
    """Refuse weighted terms from which the model learns nothing.

    Raises:
        ConfigurationError: No gradient flows from a weighted term.
    """
    if dead := values.without_gradient():
        raise ConfigurationError(
            f"Every weighted term of the objective must depend on the model, but no gradient flows from {dead}. "
            "Report it as a metric instead, or look for detach() and no_grad() in it."
        )


# Names under which the loop itself reports.
OWN_NAMES = frozenset({"loss", "grad_norm", "num_samples", "skipped_steps", "skipped_samples"})


def refuse_taken_names(objective: Objective, metrics: Metrics | None) -> None:
    """Refuse terms that would hide another value of the same epoch.

    Raises:
        ConfigurationError: A term of a training loop has a name under which the loop reports, or a metric that of a term.
    """
    names = [*objective.terms, *(metrics.terms if metrics is not None else ())]
    if taken := sorted({name for name in names if name in OWN_NAMES or names.count(name) > 1}):
        raise ConfigurationError(
            f"Names of terms must be their own, but {', '.join(taken)} is reported already. Rename the term."
        )


def mean_of(name: str, value: Value) -> Tensor:
    """Return the mean that a term's value stands for, shape ``()``; of a mapping, the mean of its bands' means.

    A masked pair whose count is 0 gives 0: there is nothing to learn from. Booleans and integers (hits, counts) are
    numbers like any other.

    Raises:
        ConfigurationError: The value has none of the documented forms.
    """
    if isinstance(value, Mapping) and value:
        return torch.stack([mean_of(f"{name}/{band}", part) for band, part in value.items()]).mean()
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], Tensor) and value[0].ndim == 0:
        total, count = value[0], torch.as_tensor(value[1], device=value[0].device)
        return total / torch.where(count == 0, torch.ones_like(count), count)  # soft masks count to less than 1
    if not isinstance(value, Tensor) or value.ndim > 1 or value.is_complex():
        found = (
            f"{value.dtype} of shape {tuple(value.shape)}"
            if isinstance(value, Tensor)
            else f"{type(value).__name__} {value!r:.60}"
        )
        raise ConfigurationError(
            f"Term `{name}` must return real tensors: per-sample values (N,), a batch mean (), a pair (sum, count) or a "
            f"mapping of these, but returned {found}. Reduce it over all but the first dimension, without `.item()`."
        )
    value = value if value.is_floating_point() else value.to(torch.get_default_dtype())
    return value.mean() if value.ndim == 1 else value


def refuse_unusable(values: TermValues) -> None:
    """Refuse values of which no mean can be taken, also of terms that are only reported.

    Raises:
        ConfigurationError: A value has none of the documented forms.
    """
    for name, value in values.values().items():
        mean_of(name, value)


def _entry(batch: Mapping[str, Any], key: str) -> Any:
    if not isinstance(batch, Mapping) or key not in batch:
        found = f"has {sorted(batch)}" if isinstance(batch, Mapping) else f"is a {type(batch).__name__}, not a mapping"
        raise ConfigurationError(f"A term needs `{key}`, but the batch {found}. Correct the term's `keys`.")
    return batch[key]
