"""What a rank does at start-up and per epoch does not grow with the fleet: counted, not timed."""

import pytest

from harness import run_ranks


def work(rank: int, world_size: int) -> dict[str, int]:
    (result,) = run_ranks("scale_cases:work_of_rank", 1, rank, world_size, group=False)
    assert (result["rank"], result["world_size"]) == (rank, world_size)
    return result


@pytest.fixture(scope="module")
def small() -> dict[str, int]:
    return work(1, 2)


@pytest.mark.parametrize("rank", [0, 511, 1023])
def test_work_of_a_rank_of_1024_is_that_of_a_rank_of_2(rank: int, small: dict[str, int]) -> None:
    """Each rank receives a few dozen bytes from each other; that alone grows. Metrics are the reductions' own law."""
    large = work(rank, 1024)
    assert large["calls"] < 1.02 * small["calls"]
    assert large["bytes"] < small["bytes"] + 1024 * 64
