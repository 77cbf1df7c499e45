"""Hooks: methods that run at named lines of the loop, and nowhere else.

A hook is attached to a runner or to the trainer, and that is its scope. All hooks fire on all ranks, in the order in
which they were attached; gate side effects with ``main_process_only``.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from srforge.distributed import ConfigurationError, every_rank

HandlerT = TypeVar("HandlerT", bound=Callable[..., Any])

RUNNER_POINTS = (
    "on_epoch_start",
    "on_pre_step",
    "on_post_forward",
    "on_post_backward",
    "on_post_step",
    "on_epoch_end",
)
GAN_POINTS = (
    *RUNNER_POINTS,
    "on_post_g_forward",
    "on_post_g_backward",
    "on_post_d_forward",
    "on_post_d_backward",
)
VALIDATION_POINTS = ("on_epoch_start", "on_pre_step", "on_post_forward", "on_post_step", "on_epoch_end")
TRAINER_POINTS = ("on_training_began", "on_epoch_finished", "on_training_finished")

_MARK = "__hook_points__"


def hooks_into(*points: str) -> Callable[[HandlerT], HandlerT]:
    """Mark a method of a ``Hook`` as the handler of one or more points.

    Args:
        points: Names of points; whether they exist is checked when the hook is attached.

    Raises:
        ConfigurationError: No point is named.
    """
    if not points or not all(isinstance(point, str) for point in points):
        raise ConfigurationError('`hooks_into` must be given the names of points, as in @hooks_into("on_post_step").')

    def mark(handler: HandlerT) -> HandlerT:
        setattr(handler, _MARK, points)
        return handler

    return mark


class Hook:
    """Base of hooks: methods marked with ``hooks_into`` take one context record each.

    Override ``state_dict`` and ``load_state_dict`` for what must survive a resume: it travels in the checkpoint, so it
    may hold tensors, numbers, text, and lists and mappings of these.
    """

    # On every rank also in a class that is a rank-0 side effect as a whole: a restored hook is the same everywhere.
    @every_rank
    def state_dict(self) -> dict[str, Any]:
        """Return what the checkpoint is to keep of this hook."""
        return {}

    @every_rank
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what ``state_dict`` returned."""


class HookPoints:
    """The points of one runner or trainer, and the handlers attached to them.

    Args:
        owner: Name of the class that fires the points, for messages.
        points: The points that exist.
    """

    def __init__(self, owner: str, points: Iterable[str]) -> None:
        self._owner = owner
        self._handlers: dict[str, list[Callable[[Any], None]]] = {point: [] for point in points}
        self.hooks: list[Hook] = []

    def attach(self, hook: Hook) -> None:
        """Attach a hook; its handlers run after those attached before.

        Raises:
            ConfigurationError: The object is no ``Hook``, has no handler, names a point that does not exist here, has a
                handler that does not take exactly one argument, or is attached already.
        """
        if not isinstance(hook, Hook):
            raise ConfigurationError(f"A hook must derive from Hook, but is {type(hook).__name__}.")
        if any(hook is attached for attached in self.hooks):
            raise ConfigurationError(f"A hook must be attached once, but {type(hook).__name__} is attached already.")
        handlers = list(_handlers_of(hook))
        if not handlers:
            raise ConfigurationError(
                f'{type(hook).__name__} must have a handler, but has none. Mark one: @hooks_into("on_post_step").'
            )
        for point, handler in handlers:
            self._check(hook, point, handler)
        for point, handler in handlers:
            self._handlers[point].append(handler)
        self.hooks.append(hook)

    def has_handlers(self, point: str) -> bool:
        """Say whether any attached hook handles a point."""
        return bool(self._handlers[point])

    def fire(self, point: str, context: Any) -> None:
        """Run the handlers of a point, in attach order."""
        for handler in self._handlers[point]:
            handler(context)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the attached hooks, by position and class name."""
        return {f"{i}.{type(hook).__name__}": hook.state_dict() for i, hook in enumerate(self.hooks)}

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Give each hook its state back.

        Raises:
            ConfigurationError: A state that is not empty belongs to no attached hook.
        """
        attached = {f"{i}.{type(hook).__name__}": hook for i, hook in enumerate(self.hooks)}
        for key, state in states.items():
            if key in attached:
                attached[key].load_state_dict(state)
            elif state:
                raise ConfigurationError(
                    f"The checkpoint holds state of hook {key} of {self._owner}, but attached are {sorted(attached)}. "
                    "Attach the same hooks in the same order."
                )

    def _check(self, hook: Hook, point: str, handler: Callable[[Any], None]) -> None:
        where = f"{type(hook).__name__}.{getattr(handler, '__name__', handler)}"
        if point not in self._handlers:
            near = difflib.get_close_matches(point, self._handlers, n=1)
            advice = f"Did you mean {near[0]}?" if near else f"It fires {', '.join(self._handlers)}."
            raise ConfigurationError(f"{where} must hook into a point of {self._owner}, but names {point!r}. {advice}")
        try:
            inspect.signature(handler).bind(None)
        except TypeError as error:
            raise ConfigurationError(f"{where} must take exactly one argument, the context. ({error})") from error


def _handlers_of(hook: Hook) -> Iterable[tuple[str, Callable[[Any], None]]]:
    """Yield ``(point, bound handler)`` in the order of definition, base classes first, overridden ones once."""
    names = dict.fromkeys(name for base in reversed(type(hook).__mro__) for name in vars(base))
    for name in names:
        marked = next((vars(base)[name] for base in type(hook).__mro__ if name in vars(base)), None)
        # An override without a mark of its own keeps the points of the method that it overrides.
        points = next(
            (getattr(vars(base)[name], _MARK) for base in type(hook).__mro__ if hasattr(vars(base).get(name), _MARK)),
            (),
        )
        if callable(marked):
            for point in points:
                yield point, getattr(hook, name)
