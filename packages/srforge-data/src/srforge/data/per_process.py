"""Handles that must not travel between processes: opened in each process, when first asked for."""

import os
from collections.abc import Callable
from typing import Generic, TypeVar

Handle = TypeVar("Handle")


class OncePerProcess(Generic[Handle]):
    """A handle that every process opens for itself: a file, an HDF5 file, an LMDB environment, a connection.

    Only the factory is pickled, so a data set that keeps its handles this way works under every start method.

    Args:
        factory: Called without arguments, at most once in a process; a module-level function, a class or a
            ``functools.partial`` of one, so that it can be pickled.

    Example:
        >>> from functools import partial
        >>> from srforge.data import OncePerProcess
        >>> numbers = OncePerProcess(partial(list, range(3)))
        >>> numbers()
        [0, 1, 2]
    """

    def __init__(self, factory: Callable[[], Handle]) -> None:
        self.factory = factory
        self._owner = -1
        self._opened: list[Handle] = []

    def __call__(self) -> Handle:
        """Return this process's handle, opening it on the first call."""
        if self._owner != os.getpid():
            # A handle inherited through fork stays referenced: closing it here could flush or unlock the parent's.
            self._opened.append(self.factory())
            self._owner = os.getpid()
        return self._opened[-1]

    def __reduce__(self) -> tuple[type["OncePerProcess[Handle]"], tuple[Callable[[], Handle]]]:
        return type(self), (self.factory,)
