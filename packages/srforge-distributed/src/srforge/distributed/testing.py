"""A stand-in for any rank of any fleet, in one process, for unit tests: yours as much as ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from srforge.distributed.errors import ConfigurationError
from srforge.distributed.gate_scope import refuse_inside_gate
from srforge.distributed.reductions import reduction_steps
from srforge.distributed.strategy import TrainingStrategy
from srforge.distributed.topology import Topology

if TYPE_CHECKING:
    from srforge.distributed.options import DistributedOptions

Peers = Sequence[Any] | Callable[[str, int, Any], Any] | None


class FakeStrategy(TrainingStrategy):
    """Rank ``rank`` of ``world_size``, without processes: collectives answer at once.

    What the other ranks say is up to ``peers``:

    - None: what this rank says.
    - A list of ``world_size - 1`` values, one for each other rank in rank order: metric trees for ``reduce_metrics``,
      tensors for ``all_gather``, any other value for ``all_gather_object`` and ``broadcast_object``. In a collective
      that wants another kind of value the rank says what this one says.
    - A function ``(operation, rank, own_value) -> value``, asked for each other rank.

    Metrics go through the real reduction, step by step for every rank. Models are moved, never wrapped.

    Make it the active one with ``set_active_strategy(FakeStrategy(1, 4))``, and undo that with
    ``set_active_strategy(None)``.

    Args:
        rank: The rank to be, ``0 <= rank < world_size``.
        world_size: Number of ranks to pretend.
        device: Device of the rank.
        peers: What the other ranks say.
        options: Options in force.

    Attributes:
        calls: Names of the primitive collectives that were called, in order.

    Raises:
        ConfigurationError: ``rank`` is out of range, or ``peers`` is a list of another length.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        device: str | torch.device = "cpu",
        peers: Peers = None,
        options: DistributedOptions | None = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ConfigurationError(f"`rank` must be in [0, world_size={world_size}), but is {rank}. Lower it.")
        if isinstance(peers, Sequence) and len(peers) != world_size - 1:
            raise ConfigurationError(
                f"`peers` must hold one value for each of the {world_size - 1} other ranks, but holds {len(peers)}. "
                f"Leave this rank's own value out."
            )
        topology = Topology(rank=rank, local_rank=rank, world_size=world_size, local_world_size=world_size)
        super().__init__(topology, torch.device(device), options)
        self.name = "single" if world_size == 1 else "ddp"
        self.peers = peers
        self.calls: list[str] = []
        self._ranks = range(world_size)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return the ranks' tensors, shape ``(world_size, *shape)``."""
        return torch.stack([value.detach() for value in self._exchange("all_gather", tensor, Tensor)])

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the ranks' values."""
        return self._exchange("all_gather_object", value, object)

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """Return what rank ``source`` says."""
        return self._exchange("broadcast_object", value, object)[source]

    def barrier(self) -> None:
        """Return at once, as if all ranks had been waiting."""
        self._exchange("barrier", None, type(None))

    def reduce_metrics(self, tree: Mapping[Any, Any]) -> dict[Any, Any]:
        """Return the fleet's metrics, by the real reduction stepped for all ranks side by side."""
        refuse_inside_gate("reduce_metrics")
        running = [reduction_steps(tree) for tree in self._answers("reduce_metrics", tree, Mapping)]
        messages = [next(steps) for steps in running]
        while True:
            self.calls.append("all_gather")
            gathered = torch.stack(messages)
            try:
                own_message = running[self.rank].send(gathered)
            except StopIteration as end:
                reduced, self.last_reduction = end.value
                return dict(reduced)
            messages = [own_message if rank == self.rank else step.send(gathered) for rank, step in enumerate(running)]

    def abort(self, exit_code: int) -> NoReturn:
        """Raise ``SystemExit``: the process is the test's."""
        raise SystemExit(exit_code)

    def _replicate(self, model: nn.Module) -> None:
        """Take the other ranks' weights to be equal."""

    def _exchange(self, operation: str, value: Any, kind: type) -> list[Any]:
        refuse_inside_gate(operation)
        self.calls.append(operation)
        return self._answers(operation, value, kind)

    def _answers(self, operation: str, value: Any, kind: type) -> list[Any]:
        return [value if rank == self.rank else self._answer(operation, rank, value, kind) for rank in self._ranks]

    def _answer(self, operation: str, rank: int, value: Any, kind: type) -> Any:
        if self.peers is None:
            return value
        if not isinstance(self.peers, Sequence):
            return self.peers(operation, rank, value)
        said = self.peers[rank - (rank > self.rank)]
        is_tensor_among_objects = kind is object and isinstance(said, Tensor)
        return said if isinstance(said, kind) and not is_tensor_among_objects else value
