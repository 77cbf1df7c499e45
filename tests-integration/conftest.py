"""Options and fixtures of the tests that start processes.

The same list of cases runs under gloo on the CPU (the default), under gloo on CUDA tensors, where ranks may share a
GPU (``--device cuda``), and under NCCL (``--backend nccl --device cuda``), with as many ranks as there are GPUs.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

# The import mode puts no folder on the path: the harness is imported by name, here and in the ranks.
sys.path.insert(0, str(Path(__file__).resolve().parent))

import harness


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--backend", choices=("gloo", "nccl"), default="gloo", help="backend of the fleets in tests")
    parser.addoption("--device", choices=("cpu", "cuda"), default="cpu", help="device of the fleets in tests")
    parser.addoption("--all-gan-cases", action="store_true", help="every adversarial case, not only a covering subset")


@pytest.fixture(scope="session")
def fleet(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """Return ``run_ranks`` for the backend and device of this session; skips worlds that the host cannot hold."""
    backend, device = request.config.getoption("--backend"), request.config.getoption("--device")
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("the session asks for CUDA, which this host lacks")
    run = partial(harness.run_ranks, backend=backend, device=device)

    def run_that_fits(function: str | Callable[..., Any], world_size: int, *args: Any, **options: Any) -> list[Any]:
        if backend == "nccl" and world_size > torch.cuda.device_count():
            pytest.skip(f"NCCL takes one rank per device: {world_size} ranks need as many GPUs")
        return run(function, world_size, *args, **options)

    return run_that_fits
