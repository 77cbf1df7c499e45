"""Which gate the running code is inside of; the collectives ask it before they wait for ranks that will not come.

Kept apart from ``gates``, which needs the active strategy, so that strategies can import it without a cycle.
"""

from __future__ import annotations

from contextvars import ContextVar

from srforge.distributed.errors import CollectiveError

# A context variable follows asyncio tasks started inside a gate, and never leaks into another thread.
gate_scope: ContextVar[str | None] = ContextVar("srforge_gate_scope", default=None)


def inside_gate() -> str | None:
    """Return the qualified name of the innermost gated function that is running, or None.

    With one process nothing is ever "inside a gate": every rank there is runs the gated code.
    """
    return gate_scope.get()


def refuse_inside_gate(operation: str) -> None:
    """Refuse a collective inside a gate, where only rank 0 would arrive and wait for ever.

    Args:
        operation: The collective's name, for the message.

    Raises:
        CollectiveError: A function gated by ``main_process_only`` is running and there are several ranks.
    """
    gate = gate_scope.get()
    if gate is not None:
        raise CollectiveError(
            f"`{operation}` must be called on every rank, but is called inside `{gate}`, which main_process_only "
            f"runs on rank 0 alone: it would hang. Call it before the gated function and pass the result in."
        )
