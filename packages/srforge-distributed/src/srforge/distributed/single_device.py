"""One process, one device, no process group."""

from typing import Any

from torch import Tensor

from srforge.distributed.strategy import TrainingStrategy


class SingleDeviceStrategy(TrainingStrategy):
    """Training alone: nothing is wrapped, every collective is a fleet of one."""

    name = "single"

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return ``(1, *shape)``."""
        return tensor.detach().unsqueeze(0)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return a list of this value."""
        return [value]

    def broadcast_object(self, value: Any, source: int = 0) -> Any:  # noqa: ARG002 - there is one rank
        """Return the value."""
        return value

    def barrier(self) -> None:
        """Return at once."""
