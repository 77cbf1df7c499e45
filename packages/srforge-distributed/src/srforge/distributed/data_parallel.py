"""One process, several devices: ``DataParallel`` around each trainable part, the batch split by step.

The oldest way, and the slowest; kept because it needs no launcher.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.nn.parallel import DataParallel

from srforge.distributed.options import DistributedOptions
from srforge.distributed.parts import has_trainable_parameters, replace_part
from srforge.distributed.single_device import SingleDeviceStrategy
from srforge.distributed.topology import Topology


class DataParallelStrategy(SingleDeviceStrategy):
    """Training in one process over a list of devices; ``device`` is the first, where outputs and losses live.

    Attributes:
        devices: All devices, the first of which holds the model.
    """

    name = "data_parallel"

    def __init__(self, devices: Sequence[torch.device], options: DistributedOptions | None = None) -> None:
        super().__init__(Topology.single(), devices[0], options)
        self.devices = list(devices)

    def _wrap(self, model: nn.Module, parts: Mapping[str, nn.Module]) -> nn.Module:
        for name, part in parts.items():
            if not has_trainable_parameters(part):
                continue
            wrapped: DataParallel[nn.Module] = DataParallel(part, device_ids=self.devices)
            if name == "":
                return wrapped
            replace_part(model, name, wrapped)
        return model
