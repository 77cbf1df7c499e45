"""Every test starts as a single process with one thread, whatever the one before it left."""

import pytest
import torch

from srforge.distributed.active import set_active_strategy


@pytest.fixture(autouse=True)
def _alone():
    torch.set_num_threads(1)
    set_active_strategy(None)
    yield
    set_active_strategy(None)
