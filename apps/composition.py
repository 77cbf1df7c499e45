"""Errors of the configuration are the same on every rank: shown once.

Hydra composes the configuration before ``main`` runs, and prints what is wrong with it itself. All ranks but the first
keep quiet until then.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import sys
from collections.abc import Callable, Iterator
from typing import TypeVar

from omegaconf import DictConfig

from srforge.distributed import LaunchEnvironmentError, Topology

ResultT = TypeVar("ResultT")

_shown = sys.stderr


@contextlib.contextmanager
def compose_quietly() -> Iterator[None]:
    """Hide standard error of every rank but rank 0, until ``main`` begins."""
    try:
        rank = Topology.from_environment().rank
    except LaunchEnvironmentError:  # every rank says so itself
        rank = 0
    if rank == 0:
        yield
        return
    with open(os.devnull, "w", encoding="utf-8") as nowhere:  # noqa: PTH123  # a device, not a file of ours
        sys.stderr = nowhere
        try:
            yield
        finally:
            sys.stderr = _shown


def print_any_name() -> None:
    """Let standard output show any name of a folder or a metric, escaped where its encoding has no such letter."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def announced_once(main: Callable[[DictConfig], ResultT]) -> Callable[[DictConfig], ResultT]:
    """Give a rank its standard error back when its ``main`` begins."""

    @functools.wraps(main)
    def begin(config: DictConfig) -> ResultT:
        sys.stderr = _shown
        return main(config)

    return begin
