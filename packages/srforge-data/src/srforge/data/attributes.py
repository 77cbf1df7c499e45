"""What an object holds, with the text that leads to it: for messages that name an attribute path."""

import functools
import random
import sys
import types
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch

_MAX_ELEMENTS = 64  # of one list or dict that is searched for generators: a list of file names may hold millions
_MAX_OBJECTS = 10_000


def pickled_children(obj: Any) -> Iterator[tuple[str, Any]]:
    """Yield what pickling the object would pickle too, with the text that leads from it to there.

    Args:
        obj: Any object.

    Yields:
        Suffix of the path (``.handle``, ``[3]``) and the object there.
    """
    if isinstance(obj, defaultdict):
        yield ".default_factory", obj.default_factory
    if isinstance(obj, dict | list | tuple | AbstractSet):
        yield from _elements(obj)
        yield from ((f".{key}", value) for key, value in _attributes(obj).items())
        return
    if isinstance(obj, functools.partial):
        yield ".func", obj.func
        yield from ((f".args[{position}]", value) for position, value in enumerate(obj.args))
        yield from ((f".keywords[{key!r}]", value) for key, value in obj.keywords.items())
        return
    if isinstance(obj, types.MethodType):
        yield ".__self__", obj.__self__
        return
    if isinstance(obj, type | types.FunctionType | types.ModuleType | str | bytes | int | float | None):
        return
    yield from _reduced(obj)


def find_generators(root: Any, name: str) -> list[tuple[str, Any]]:
    """Find random generators that are stored in an object.

    Args:
        root: The data set; its attributes, lists, dicts and what they hold are searched, the first elements of each.
        name: What to call it.

    Returns:
        Path and generator of each: python's, numpy's or torch's.
    """
    kinds: tuple[type, ...] = (random.Random, torch.Generator)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kinds += (numpy.random.Generator, numpy.random.RandomState, numpy.random.BitGenerator)
    found: list[tuple[str, Any]] = []
    visited: dict[int, Any] = {}
    waiting = [(name, root)]
    while waiting and len(visited) < _MAX_OBJECTS:
        path, obj = waiting.pop()
        if id(obj) in visited or isinstance(obj, str | bytes | int | float | type | types.ModuleType | torch.Tensor):
            continue
        visited[id(obj)] = obj
        if isinstance(obj, kinds):
            found.append((path, obj))
        elif isinstance(obj, dict | list | tuple | set | frozenset):  # others may read files, or be closed ones
            waiting.extend((path + suffix, child) for suffix, child in _elements(obj, _MAX_ELEMENTS))
        waiting.extend((f"{path}.{key}", child) for key, child in _attributes(obj).items())
    return sorted(found, key=lambda pair: pair[0])


def _elements(obj: Any, limit: int | None = None) -> Iterator[tuple[str, Any]]:
    if isinstance(obj, Mapping):
        pairs = ((f"[{key!r}]", value) for key, value in obj.items())
    elif isinstance(obj, Sequence):
        pairs = ((f"[{position}]", value) for position, value in enumerate(obj))
    else:
        pairs = (("{...}", value) for value in obj)
    for count, pair in enumerate(pairs):
        if count == limit:
            return
        yield pair


def _attributes(obj: Any) -> dict[str, Any]:
    held = dict(getattr(obj, "__dict__", {}))
    for cls in type(obj).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if hasattr(obj, slot):
                held[slot] = getattr(obj, slot)
    return held


def _reduced(obj: Any) -> Iterator[tuple[str, Any]]:
    try:
        reduced = obj.__reduce_ex__(4)
    except Exception:  # noqa: BLE001 - the object itself refuses to be pickled: it is the end of the path
        return
    if not isinstance(reduced, tuple):
        return
    _, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
    for part in state if isinstance(state, tuple) else (state,):
        if isinstance(part, Mapping):
            yield from ((f".{key}", value) for key, value in part.items())
        elif part is not None:
            yield ".__getstate__()", part
    yield from ((f"[{position}]", value) for position, value in enumerate(items or ()))
    yield from ((f"[{key!r}]", value) for key, value in pairs or ())
    yield from (
        (f".__reduce__()[1][{position}]", value)
        for position, value in enumerate(arguments)
        if not isinstance(value, type)
    )
