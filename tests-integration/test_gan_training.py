"""Laws of adversarial training on fleets: equal replicas, the gradients of one process, each bucket reduced once."""

import itertools
from typing import Any

import pytest

from gan_training_cases import EPOCHS, interrupted_and_not, run_all

FACTORS: dict[str, tuple[Any, ...]] = {
    "norm": ("none", "batch", "spectral", "spectral by hook", "instance"),
    "criterion": ("vanilla", "hinge", "relativistic", "relativistic average"),
    "turns": ("together", "generator every second step", "generator first"),
    "penalty": (True, False),
    "accumulate": (1, 2),
    "static": (True, False),
}


def covering(factors: dict[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Return few cases in which each two values of any two factors meet; greedy, always the same."""
    everything = [dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())]
    missing = {pair for case in everything for pair in _pairs(case)}
    chosen = []
    while missing:
        best = max(everything, key=lambda case: len(missing & _pairs(case)))
        missing -= _pairs(best)
        chosen.append(best)
    return chosen


def _pairs(case: dict[str, Any]) -> set[Any]:
    return set(itertools.combinations(case.items(), 2))


def test_each_two_values_meet_in_a_case():
    cases = covering(FACTORS)
    for first, second in itertools.combinations(FACTORS, 2):
        met = {(case[first], case[second]) for case in cases}
        assert met == set(itertools.product(FACTORS[first], FACTORS[second]))
    assert len(cases) <= 30


@pytest.mark.timeout(1300)  # the fleet has its own limit; every case takes longer
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_replicas_are_equal_and_learn_what_one_process_learns(fleet, request, world_size):
    is_whole = request.config.getoption("--all-gan-cases")
    cases = (
        [dict(zip(FACTORS, values, strict=True)) for values in itertools.product(*FACTORS.values())]
        if is_whole
        else covering(FACTORS)
    )
    ranks = fleet(run_all, world_size, cases, timeout=1200 if is_whole else 110)
    for index, case in enumerate(cases):
        for results in ranks:
            found = results[index]
            assert found["steps"] == 2 * EPOCHS, case
            assert len(found["fingerprints"]) == 2 * EPOCHS, case
            assert all(len(set(all_ranks)) == 1 for all_ranks in found["fingerprints"]), case
            assert found["error"] < 1e-9, (case, found["error"])
            if found["buckets"] is not None:
                assert found["buckets"] == expected_buckets(case), case


def expected_buckets(case: dict[str, Any]) -> list[dict[str, list[int]]]:
    """One bucket holds all of such a small part: it is reduced once in each step of that part."""
    skipped = {
        "together": [],
        "generator every second step": [("generator", 0), ("generator", 2)],
        "generator first": [("discriminator", 0)],
    }[case["turns"]]
    return [
        {part: [] if (part, step) in skipped else [0] for part in ("generator", "discriminator")}
        for step in range(2 * EPOCHS)
    ]


def test_a_resumed_run_ends_on_the_same_bits_on_every_rank(fleet):
    case = {
        "norm": "spectral",
        "criterion": "relativistic average",
        "turns": "generator every second step",
        "penalty": True,
        "accumulate": 2,
        "static": True,
    }
    for straight, resumed in fleet(interrupted_and_not, 2, case, timeout=110):
        assert straight == resumed
        assert all(len(set(ranks)) == 1 for ranks in straight)
