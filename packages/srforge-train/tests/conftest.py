import sys
from pathlib import Path

import pytest
import torch

from srforge.distributed import set_active_strategy

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def alone():
    """Each test begins with one thread and without a strategy."""
    torch.set_num_threads(1)
    set_active_strategy(None)
    yield
    set_active_strategy(None)
