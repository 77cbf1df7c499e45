"""From samples to a batch: torch's own way, with an error that names what does not fit together."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.utils.data import default_collate

from srforge.distributed.errors import ConfigurationError

_SHOWN = 4
_ONE_AT_A_TIME = "load one sample at a time (a batch size of 1, for validation perhaps)"
# Images of these types are divided by their type's largest value, on the device.
_RESCALED = ("uint8", "uint16")


def collate_samples(samples: list[Any]) -> Any:
    """Return ``torch.utils.data.default_collate(samples)``.

    Raises:
        ConfigurationError: Samples of one batch have other keys, lengths, shapes or integer types than each other, or one
            holds None; the message names the entry.
    """
    for reason in _mixed_ranges(samples, "sample"):
        raise ConfigurationError(reason)
    try:
        return default_collate(samples)
    except (RuntimeError, TypeError, KeyError) as error:
        for reason in _misfits(samples, "sample"):
            raise ConfigurationError(reason) from error
        raise


def _mixed_ranges(values: Sequence[Any], path: str) -> Iterator[str]:
    """Yield which images torch would bring to one type without a word: 255 of a uint8 file is not 255.0 of a float one."""
    first = values[0]
    if not all(isinstance(value, type(first)) for value in values):
        return
    if isinstance(first, Mapping):
        for key in first:
            if all(key in value for value in values):
                yield from _mixed_ranges([value[key] for value in values], f"{path}[{key!r}]")
    elif isinstance(first, Sequence) and not isinstance(first, str | bytes):
        for position, parts in enumerate(zip(*values, strict=False)):
            yield from _mixed_ranges(parts, f"{path}[{position}]")
    elif getattr(first, "ndim", 0) >= 2:
        dtypes = dict.fromkeys(value.dtype for value in values)
        if len(dtypes) > 1 and any(str(dtype).removeprefix("torch.") in _RESCALED for dtype in dtypes):
            shown = ", ".join(map(str, dtypes))
            yield f"{path} must have one dtype in a batch, but has {shown}. Convert the data set once."


def _misfits(values: Sequence[Any], path: str) -> Iterator[str]:
    """Yield why the values of one entry, one a sample, do not make a batch."""
    first = values[0]
    if any(value is None for value in values):
        yield f"{path} must hold something in every sample of a batch, but is None. Leave the entry out of all samples."
        return
    if len({type(value) for value in values}) > 1 and not all(hasattr(value, "shape") for value in values):
        kinds = ", ".join(dict.fromkeys(type(value).__name__ for value in values))
        yield f"{path} must be of one type in a batch, but is {kinds}. Make them alike, or pass a collate_fn."
    elif isinstance(first, Mapping):
        yield from _misfits_of_mappings(values, path)
    elif hasattr(first, "shape"):
        shapes = list(dict.fromkeys(tuple(value.shape) for value in values))
        if len(shapes) > 1:
            more = f" and {len(shapes) - _SHOWN} more" if len(shapes) > _SHOWN else ""
            yield (
                f"{path} must have one shape in a batch, but has {', '.join(map(str, shapes[:_SHOWN]))}{more}. "
                f"Crop them to one size, or {_ONE_AT_A_TIME}."
            )
    elif isinstance(first, Sequence) and not isinstance(first, str | bytes):
        lengths = sorted({len(value) for value in values})
        if len(lengths) > 1:
            yield f"{path} must have one length in a batch, but has {lengths}. Pad them, or {_ONE_AT_A_TIME}."
            return
        for position in range(len(first)):
            yield from _misfits([value[position] for value in values], f"{path}[{position}]")


def _misfits_of_mappings(values: Sequence[Mapping[Any, Any]], path: str) -> Iterator[str]:
    keys = [set(value) for value in values]
    if uneven := sorted(map(str, set.union(*keys) - set.intersection(*keys))):
        yield (
            f"{path} must have the same keys in all samples of a batch, but only some have {', '.join(uneven)}. Give every "
            "sample the same."
        )
        return
    for key in values[0]:
        yield from _misfits([value[key] for value in values], f"{path}[{key!r}]")
