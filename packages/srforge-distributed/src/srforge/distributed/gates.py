"""Gates: code that runs on rank 0 only, decided when it is called.

``main_process_only`` marks side effects (files, images, trackers); code that changes the model must run on every rank
and carries no gate. Other ranks skip the body and get ``None``.
"""

from __future__ import annotations

import functools
import inspect
import types
from typing import TYPE_CHECKING, Any, TypeVar, cast

from srforge.distributed.active import get_active_strategy
from srforge.distributed.errors import ConfigurationError
from srforge.distributed.gate_scope import gate_scope

if TYPE_CHECKING:
    from collections.abc import Callable

_Target = TypeVar("_Target")

_GATE = "__srforge_gate__"
_EVERY_RANK = "__srforge_every_rank__"
# What a class gate takes for a method. Nested classes, callable attributes and built-in methods are none.
_METHODS = (
    types.FunctionType,
    staticmethod,
    classmethod,
    functools.partialmethod,
    functools.singledispatchmethod,
    type(functools.lru_cache(lambda: None)),
)


def is_main_process() -> bool:
    """Return whether this process is rank 0; always true with one process."""
    return get_active_strategy().is_main


def main_process_only(target: _Target) -> _Target:
    """Gate a function, a method or a whole class: its body runs on rank 0 only, other ranks get ``None``.

    The decision is made at each call. The gate keeps name, signature, marks of other decorators (so the order with
    ``@hooks_into`` does not matter) and picklability; gating twice is gating once. Async functions stay async.

    On a class, every public method is gated, its own and inherited ones, static and class methods included. Dunder
    methods (the constructor too), private methods, properties and methods marked ``every_rank`` run everywhere. The
    class is changed in place, its bases are not; what a subclass defines anew is ungated until it is decorated itself.

    A collective of the active strategy inside a gate raises ``CollectiveError`` instead of hanging.

    Args:
        target: Function, static or class method, or class.

    Returns:
        The gated function, or the same class.

    Raises:
        ConfigurationError: The target is a property, a generator function or nothing callable.
    """
    if isinstance(target, type):
        return cast("_Target", _gate_class(target))
    if isinstance(target, functools.partialmethod):
        inner = main_process_only(target.func)
        return cast("_Target", functools.partialmethod(inner, *target.args, **target.keywords))
    if isinstance(target, (staticmethod, classmethod)):
        gated = type(target)(_gate_function(target.__func__))
        vars(gated).update(vars(target))  # marks that another decorator left on the descriptor itself
        return cast("_Target", gated)
    return cast("_Target", _gate_function(cast("Callable[..., Any]", target)))


def every_rank(function: _Target) -> _Target:
    """Exempt a method from a gate on its class: it runs on every rank, overridden in subclasses too.

    For the plumbing of a class whose other methods are side effects, such as loading its state.
    """
    inner = function.__func__ if isinstance(function, (staticmethod, classmethod)) else function
    setattr(inner, _EVERY_RANK, True)
    return function


def _gate_function(function: Callable[..., Any], like: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Return ``function`` behind a gate that looks like ``like`` (default: like the function itself)."""
    like = function if like is None else like
    _refuse_ungateable(like)
    # The mark is the gate itself: a decorator above the gate copies the mark too, and is no gate.
    if getattr(function, _GATE, None) is function:
        return function  # type: ignore[no-any-return]
    name = getattr(like, "__qualname__", repr(like))

    if inspect.iscoroutinefunction(like):

        @functools.wraps(like)
        async def gate(*args: Any, **kwargs: Any) -> Any:
            strategy = get_active_strategy()
            if strategy.world_size == 1:
                return await function(*args, **kwargs)
            if not strategy.is_main:
                return None
            token = gate_scope.set(name)
            try:
                return await function(*args, **kwargs)
            finally:
                gate_scope.reset(token)

    else:

        @functools.wraps(like)
        def gate(*args: Any, **kwargs: Any) -> Any:
            strategy = get_active_strategy()
            if strategy.world_size == 1:
                return function(*args, **kwargs)
            if not strategy.is_main:
                return None
            token = gate_scope.set(name)
            try:
                return function(*args, **kwargs)
            finally:
                gate_scope.reset(token)

    setattr(gate, _GATE, gate)
    return gate


def _refuse_ungateable(target: Any) -> None:
    name = getattr(target, "__qualname__", None) or type(target).__name__
    if isinstance(target, (property, functools.cached_property)):
        raise ConfigurationError(
            "`main_process_only` must mark something that is called, but is on a property: reading it would give None "
            "on every other rank. Gate the method that uses the value."
        )
    if inspect.isgeneratorfunction(target) or inspect.isasyncgenfunction(target):
        raise ConfigurationError(
            f"`main_process_only` must mark a plain function, but `{name}` is a generator function: other ranks would "
            f"iterate over None. Gate the function that consumes it, or mark this one with every_rank."
        )
    if not callable(target):
        raise ConfigurationError(
            f"`main_process_only` must mark a function, a method or a class, but is on a {type(target).__name__}. "
            f"Gate a function that calls it, or mark it with every_rank."
        )


def _gate_class(cls: type) -> type:
    for name in dir(cls):
        attribute = inspect.getattr_static(cls, name)
        if name.startswith("_") or not isinstance(attribute, _METHODS) or _runs_on_every_rank(cls, name):
            continue
        if name in vars(cls):
            setattr(cls, name, main_process_only(attribute))
        else:
            setattr(cls, name, _gate_inherited(cls, name, attribute))
    return cls


def _runs_on_every_rank(cls: type, name: str) -> bool:
    found = (vars(base)[name] for base in cls.__mro__ if name in vars(base))
    return any(getattr(getattr(attribute, "__func__", attribute), _EVERY_RANK, False) for attribute in found)


def _gate_inherited(cls: type, name: str, inherited: Any) -> Any:
    """Return a gated method of ``cls`` that calls the inherited one through ``super``.

    A gated copy of the inherited function would shadow another base's override where ``cls`` is one of several bases.
    """
    if isinstance(inherited, staticmethod):  # it gets neither instance nor class to look further from
        return main_process_only(inherited)

    def call_inherited(owner: Any, /, *args: Any, **kwargs: Any) -> Any:
        return getattr(super(cls, owner), name)(*args, **kwargs)

    if isinstance(inherited, classmethod):
        return classmethod(_gate_function(call_inherited, like=inherited.__func__))
    return _gate_function(call_inherited, like=getattr(cls, name))
