"""The laws of the strategies on real processes. Cases are data: a function of the ranks, worlds, what must hold."""

from collections.abc import Callable
from typing import Any

import pytest

from harness import free_port


def equal_on_all_ranks(results: list[Any]) -> None:
    assert all(result == results[0] for result in results)


def replicas_equal(results: list[dict[str, Any]]) -> None:
    assert len({result["fingerprint"] for result in results}) == 1
    for result in results:
        assert all(0 < loss < 10 for loss in result["losses"])


def rounding_only(results: list[dict[str, float]]) -> None:
    assert all(result["error"] < 1e-12 for result in results)


def batch_of_the_fleet(results: list[dict[str, float]]) -> None:
    rounding_only(results)
    for result in results:
        assert result["ranks_apart"] == 0
        assert (result["local_apart"] > 0) == (len(results) > 1)


def one_round_per_window(results: list[list[int]]) -> None:
    """Each of two parts reduces once, after the three micro-batches that stayed local."""
    assert results == [[3, 3]] * len(results)


def buffers_equal(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["now"] == result["expected"]
        assert result["own"] == [0, 7]
        assert result["batches"] == 2


def divergence_named(results: list[list[list[str]]]) -> None:
    for weight, order, none in results:
        assert "`2.weight` on rank 1 (largest difference 0.25)" in weight[0]
        assert "`2.weight` on rank 1" in order[0]
        assert none == []


def models_refused(results: list[list[list[str]]]) -> None:
    for shapes, names in results:
        assert "rank 0 has weight: (4, 3) torch.float32 trainable where rank 1 has weight: (5, 3)" in shapes[0]
        assert "rank 0 has bias: (4,) torch.float32 trainable where rank 1 has nothing" in names[0]


def primitives_right(results: list[dict[str, Any]]) -> None:
    ranks = range(len(results))
    for result in results:
        assert result["flags"] == [[True, rank == 0] for rank in ranks]
        assert result["strided"] == [[[rank, 3 + rank], [1 + rank, 4 + rank], [2 + rank, 5 + rank]] for rank in ranks]
        assert result["scalar"] == list(map(float, ranks))
        assert result["complex"] == [[1j * rank] for rank in ranks]
        assert result["empty"] == (len(results), 0, 3)
        assert result["broadcast"] == len(results) - 1 + 7
        assert result["object"] == {"rank": 0}
        assert result["objects"] == list(ranks)


def advice(*words: str) -> Callable[[list[list[str]]], None]:
    def check(results: list[list[str]]) -> None:
        for messages in results:
            assert len(messages) == 1
            assert all(word in messages[0] for word in words), messages[0]

    return check


def trains(results: list[list[str]]) -> None:
    assert results == [[]] * len(results)


def rounded_to_their_type(results: list[dict[str, float]]) -> None:
    """8 and 11 significant bits: a mean of rounded gradients is off by a few of their units."""
    for errors in results:
        assert errors["none"] < 1e-6
        assert 1e-4 < errors.get("bf16", 2**-7) < 2**-6
        assert 1e-6 < errors["fp16"] < 2**-9


def same_bits(results: list[dict[str, Any]]) -> None:
    assert all(result["differing"] == [] for result in results)


CASES: list[tuple[str, tuple[int, ...], Callable[[list[Any]], None]]] = [
    ("gan_cases:batchnorm_discriminator_called_twice", (1, 2), replicas_equal),
    ("gan_cases:spectral_norm_by_parametrization", (1, 2, 8), replicas_equal),
    ("gan_cases:spectral_norm_by_hook", (1, 2), replicas_equal),
    ("gan_cases:two_optimizers_at_a_ratio", (1, 2), replicas_equal),
    ("gan_cases:r1_penalty_every_step", (1, 2), replicas_equal),
    (
        "gan_cases:wrapped_discriminator_in_the_generator_step",
        (2,),
        advice("replicas must be identical", "discriminator."),
    ),
    ("gan_cases:wrapped_forward_for_the_penalty", (2,), advice("replicas must be identical", "discriminator.")),
    ("gan_cases:r1_penalty_gradients", (1, 2, 3), rounding_only),
    ("strategy_cases:start_sends_every_tensor_of_rank_0", (1, 2, 8), equal_on_all_ranks),
    ("strategy_cases:primitives_carry_every_type", (1, 2, 8), primitives_right),
    ("strategy_cases:buffers_after_sync", (1, 2, 3, 8), buffers_equal),
    ("strategy_cases:divergence_is_named", (2, 3), divergence_named),
    ("strategy_cases:different_models_are_refused", (2,), models_refused),
    ("strategy_cases:accumulated_gradients", (1, 2, 3), batch_of_the_fleet),
    ("strategy_cases:rounds_per_window", (2, 3), one_round_per_window),
    ("strategy_cases:preview_on_rank_0", (1, 2), equal_on_all_ranks),
    ("strategy_cases:encoder_called_per_band", (1, 2, 3), rounding_only),
    ("strategy_cases:compiled_model", (1, 2), equal_on_all_ranks),
    ("branch_cases:branches_under_a_static_graph", (2,), advice("static_graph", "find_unused_parameters: true")),
    (
        "branch_cases:branches_without_looking_for_unused",
        (2,),
        advice("`find_unused_parameters` must be true", "odd.weight, odd.bias"),
    ),
    ("branch_cases:branches_with_unused_parameters", (2,), trains),
    ("branch_cases:output_that_the_loss_ignores", (2,), advice("`static_graph` must be false", "odd.weight, odd.bias")),
    ("branch_cases:compressed_gradients", (2, 3), rounded_to_their_type),
    ("branch_cases:resumed_bits", (1, 2, 3, 4), same_bits),
]


@pytest.fixture(scope="session")
def results_by_world(fleet: Callable[..., list[Any]]) -> Callable[[int], list[dict[str, Any]]]:
    """Return the results of all cases of one world size, from one start of the processes."""
    known: dict[int, list[dict[str, Any]]] = {}

    def results(world_size: int) -> list[dict[str, Any]]:
        if world_size not in known:
            names = [name for name, worlds, _ in CASES if world_size in worlds]
            known[world_size] = fleet("fleet_cases:run_cases", world_size, names, timeout=100)
        return known[world_size]

    return results


@pytest.mark.parametrize(
    ("name", "world_size", "holds"),
    [
        pytest.param(name, world_size, holds, id=f"{name.partition(':')[2]}-{world_size}")
        for name, worlds, holds in CASES
        for world_size in worlds
    ],
)
def test_law_holds(
    name: str,
    world_size: int,
    holds: Callable[[list[Any]], None],
    results_by_world: Callable[[int], list[dict[str, Any]]],
) -> None:
    """What the case's check states holds for the results of all ranks."""
    results = [result[name] for result in results_by_world(world_size)]
    for rank, result in enumerate(results):
        assert not isinstance(result, str), f"rank {rank}: {result}"
    holds(results)


def test_group_of_another_launcher_is_adopted_and_left_open(fleet: Callable[..., list[Any]]) -> None:
    """Rank and size are the group's, without any variable of the launcher."""
    results = fleet("branch_cases:group_of_another_launcher", 2, free_port(), group=False)
    assert [result["rank"] for result in results] == [0, 1]
    for result in results:
        assert result["name"] == "ddp"
        assert result["objects"] == [0, 1]
        assert result["open"]


def test_collective_waits_no_longer_than_the_option_says(fleet: Callable[..., list[Any]]) -> None:
    """The default of half an hour is no fate: three seconds were asked for, the peer came after eight."""
    messages, _ = fleet("branch_cases:peer_that_does_not_come", 2)
    assert len(messages) == 1
    assert "`barrier` must be reached by every rank within `timeout_minutes`=0.05, but failed on rank 0" in messages[0]
