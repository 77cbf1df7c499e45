"""Law 3: the number of ranks does not change what is learned. The oracle is a plain torch loop in this process."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import parity_cases
from srforge.distributed import ShardedSampler

CASES = {
    "float64": "float64",
    "float64_accumulated": "float64",
    "float32_sgd": "float32-sgd",
    "float32_sgd_accumulated": "float32-sgd",
    "float32_adamw": "float32-adamw",
}


@cache
def oracle(recipe: str) -> dict[str, Tensor]:
    """Train alone on the order of one rank; that the order is the same for every fleet is the sampler's own law."""
    sampler = ShardedSampler(
        parity_cases.NUM_SAMPLES,
        world_size=1,
        rank=0,
        batch_size=parity_cases.GLOBAL_BATCH,
        shuffle=True,
        training=True,
        seed=parity_cases.SEED,
    )
    order = []
    for epoch in range(parity_cases.EPOCHS):
        sampler.set_epoch(epoch)
        order.append([int(key) for key in sampler])
        assert sorted(order[-1]) == list(range(parity_cases.NUM_SAMPLES))
    return parity_cases.trained_alone(recipe, order)


@pytest.fixture(scope="session")
def trained(fleet: Callable[..., list[Any]]) -> Callable[[int], list[dict[str, Any]]]:
    """Return what every rank of a fleet has learned, by case, from one start of the processes."""

    @cache
    def by_world(world_size: int) -> list[dict[str, Any]]:
        names = [f"parity_cases:{case}" for case in CASES]
        return fleet("fleet_cases:run_cases", world_size, names, timeout=100)

    return by_world


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("case", CASES)
def test_weights_equal_those_of_one_process(
    case: str, world_size: int, trained: Callable[[int], list[dict[str, Any]]]
) -> None:
    """Three epochs, a short last step and accumulation included, end on one process's weights up to rounding."""
    expected = oracle(CASES[case])
    tolerance = parity_cases.RECIPES[CASES[case]][3]
    for rank, results in enumerate(trained(world_size)):
        result = results[f"parity_cases:{case}"]
        assert not isinstance(result, str), f"rank {rank}: {result}"
        assert result["state"].keys() == expected.keys()
        for name, weight in expected.items():
            torch.testing.assert_close(result["state"][name], weight, rtol=0, atol=tolerance)
    # Law 5: the replicas are equal to the bit at each epoch end.
    assert len({tuple(results[f"parity_cases:{case}"]["fingerprints"]) for results in trained(world_size)}) == 1
