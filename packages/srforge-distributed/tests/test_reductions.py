"""Reductions: ranks are stepped side by side in this process; what needs real processes is in tests-integration."""

import math
import random

import pytest
import torch

from srforge.distributed.errors import CollectiveError, ConfigurationError
from srforge.distributed.metric_tree import MetricSum
from srforge.distributed.reductions import reduce_metrics, reduction_steps


def reduce_together(trees):
    """What each rank gets (or raises), and the number of collectives."""
    running = [reduction_steps(tree) for tree in trees]
    messages = [next(steps) for steps in running]
    for collective in range(1, 10):
        shapes = {(tuple(message.shape), message.dtype) for message in messages}
        assert len(shapes) == 1, f"ranks would gather different shapes: {shapes}"
        gathered = torch.stack(messages)
        outcomes, messages = [], []
        for steps in running:
            try:
                messages.append(steps.send(gathered.clone()))
            except StopIteration as end:  # noqa: PERF203 - each rank ends in its own way
                outcomes.append(end.value)
            except (CollectiveError, ConfigurationError) as error:
                outcomes.append(error)
        assert not (outcomes and messages), "some ranks ended while others wait"
        if outcomes:
            return outcomes, collective
    raise AssertionError("no end")


def values_of(trees):
    outcomes, _ = reduce_together(trees)
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return outcomes[0][0]


def split(samples, world_size):
    return [samples[rank::world_size] for rank in range(world_size)]


def summed(values):
    return torch.tensor(values, dtype=torch.float64).sum() if values else torch.zeros((), dtype=torch.float64)


def test_mean_of_padded_validation_example_is_exact():
    for world_size in (1, 2, 3, 4):
        shares = split([0.0, 1.0, 2.0, 3.0, 4.0], world_size)
        assert values_of([{"id": MetricSum(sum(share), len(share))} for share in shares]) == {"id": 2.0}


def test_mean_weights_integer_counts_without_flooring():
    trees = [{"loss": MetricSum(5 * 1.0, 5)}, {"loss": MetricSum(2 * 4.0, torch.tensor(2))}]
    assert values_of(trees)["loss"] == pytest.approx(13 / 7, rel=1e-15)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("num_samples", [0, 1, 5, 7, 8, 97])
def test_fleet_value_is_the_single_process_value(num_samples, world_size):
    generator = random.Random(num_samples * 10 + world_size)
    bands = ("B02", "B03", "B8A")
    samples = {band: [generator.gauss(1, 3) for _ in range(num_samples)] for band in bands}
    trees = []
    for rank in range(world_size):
        share = {band: samples[band][rank::world_size] for band in bands}
        groups = {
            "validation": {
                "psnr": {band: MetricSum(summed(share[band]), len(share[band])) for band in bands},
                "seen": MetricSum(len(share["B02"]), len(share["B02"]), "sum"),
            },
            "training": {
                "worst": MetricSum(min(share["B03"], default=math.inf), len(share["B03"]), "min"),
                "best": MetricSum(max(share["B03"], default=-math.inf), len(share["B03"]), "max"),
            },
        }
        keys = list(groups)
        generator.shuffle(keys)
        trees.append({key: groups[key] for key in keys})
    outcomes, collectives = reduce_together(trees)
    assert collectives == 2
    for values, report in outcomes:
        assert report.missing == {}
        if not num_samples:
            assert values == {"validation": {"psnr": {}}, "training": {}}
            continue
        assert values["validation"]["seen"] == num_samples
        assert values["training"] == {"worst": min(samples["B03"]), "best": max(samples["B03"])}
        for band in bands:
            expected = math.fsum(samples[band]) / num_samples
            assert values["validation"]["psnr"][band] == pytest.approx(expected, rel=1e-12)
        assert values == outcomes[0][0]


def test_own_nesting_and_order_are_kept_on_each_rank():
    first = {"z": MetricSum(1, 1), "a": {"B03": MetricSum(2, 1), "B02": MetricSum(3, 1)}, "m": {}}
    second = {"m": {}, "a": {"B02": MetricSum(5, 1), "B03": MetricSum(4, 1)}, "z": MetricSum(3, 1)}
    outcomes, collectives = reduce_together([first, second])
    assert collectives == 2
    assert repr(outcomes[0][0]) == "{'z': 2.0, 'a': {'B03': 3.0, 'B02': 4.0}, 'm': {}}"
    assert repr(outcomes[1][0]) == "{'m': {}, 'a': {'B02': 4.0, 'B03': 3.0}, 'z': 2.0}"


def test_key_of_one_rank_is_weighted_by_its_own_count_and_noted():
    trees = [
        {"loss": MetricSum(2.0, 2)},
        {"loss": MetricSum(9.0, 3), "extra": {"psnr": MetricSum(60.0, 2)}},
        {"loss": MetricSum(0.0, 1)},
    ]
    outcomes, collectives = reduce_together(trees)
    assert collectives == 3
    for values, report in outcomes:
        assert values == {"loss": 11 / 6, "extra": {"psnr": 30.0}}
        assert report.missing == {"extra/psnr": (0, 2)}


def test_rank_without_samples_or_metrics_changes_nothing():
    outcomes, _ = reduce_together([{"validation": {}}, {"validation": {"psnr": MetricSum(64.0, 2)}}, {}])
    for values, report in outcomes:
        assert values == {"validation": {"psnr": 32.0}}
        assert report.missing == {"validation/psnr": (0, 2)}
    assert values_of([{"psnr": MetricSum(0.0, 0)}, {"psnr": MetricSum(64.0, 2)}]) == {"psnr": 32.0}


@pytest.mark.parametrize("reduction", ["mean", "sum", "min", "max"])
def test_nothing_counted_is_absent(reduction):
    trees = [{"kept": MetricSum(1, 1), "empty": MetricSum(0.0, 0, reduction)}] * 3
    assert values_of(trees) == {"kept": 1.0}


def test_no_metrics_at_all_take_one_collective():
    outcomes, collectives = reduce_together([{}, {}])
    assert [values for values, _ in outcomes] == [{}, {}]
    assert collectives == 1


def test_integers_are_exact_up_to_two_to_the_53():
    half = 2**52
    for as_number in (int, torch.tensor):
        trees = [{"seen": MetricSum(as_number(half), 1, "sum")}, {"seen": MetricSum(as_number(half - 1), 1, "sum")}]
        assert values_of(trees)["seen"] == 2**53 - 1


def test_sum_does_not_depend_on_the_order_of_ranks():
    totals = [1e16, 1.0, -1e16, 1.0, 1e-3]
    forward = values_of([{"x": MetricSum(total, 1, "sum")} for total in totals])["x"]
    backward = values_of([{"x": MetricSum(total, 1, "sum")} for total in reversed(totals)])["x"]
    assert forward == backward == 2.001


@pytest.mark.parametrize("reduction", ["mean", "sum", "min", "max"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_non_finite_totals_are_named_by_rank(reduction, bad, rank):
    totals = [1.0, 2.0, 3.0]
    totals[rank] = bad
    outcomes, _ = reduce_together([{"a": {"loss": MetricSum(torch.tensor(t), 1, reduction)}} for t in totals])
    for values, report in outcomes:
        assert report.non_finite == {"a/loss": (rank,)}
        expected = {
            "mean": bad,
            "sum": bad,
            "min": min(totals) if not math.isnan(bad) else bad,
            "max": max(totals) if not math.isnan(bad) else bad,
        }[reduction]
        assert values["a"]["loss"] == pytest.approx(expected, nan_ok=True)


def test_an_extreme_of_nothing_is_not_reported_as_infinite():
    def trees(*starts):
        return [
            {"low": MetricSum(low, count, "min"), "high": MetricSum(high, count, "max")} for low, high, count in starts
        ]

    ((values, report), _), _ = reduce_together(trees((2.0, 3.0, 1), (math.inf, -math.inf, 0)))
    assert values == {"low": 2.0, "high": 3.0}
    assert report.non_finite == {}
    ((_, report), _), _ = reduce_together(trees((2.0, 3.0, 1), (math.inf, -math.inf, 1)))
    assert report.non_finite == {"low": (1,), "high": (1,)}


def test_opposite_infinities_give_nan_and_overflow_gives_infinity():
    assert math.isnan(values_of([{"x": MetricSum(math.inf, 1)}, {"x": MetricSum(-math.inf, 1)}])["x"])
    assert values_of([{"x": MetricSum(1.7e308, 1, "sum")}, {"x": MetricSum(1.7e308, 1, "sum")}])["x"] == math.inf
    assert values_of([{"x": MetricSum(10**400, 1, "sum")}, {"x": MetricSum(0, 1, "sum")}])["x"] == math.inf


def test_conflicting_reductions_are_refused_by_name_on_every_rank():
    trees = [
        {"a": {"psnr": MetricSum(1, 1)}},
        {"a": {"psnr": MetricSum(1, 1, "sum")}},
        {"a": {"psnr": MetricSum(1, 1)}},
    ]
    outcomes, _ = reduce_together(trees)
    assert len(outcomes) == 3
    for outcome in outcomes:
        with pytest.raises(CollectiveError, match=r"`a/psnr` must be the same kind.* mean on rank 0, 2, sum on rank 1"):
            raise outcome


def test_metric_that_is_a_group_elsewhere_is_refused_by_name_on_every_rank():
    for other in ({"psnr": {"B02": MetricSum(1, 1)}}, {"psnr": {}}):
        outcomes, _ = reduce_together([{"psnr": MetricSum(1, 1)}, other])
        for outcome in outcomes:
            with pytest.raises(CollectiveError, match=r"`psnr` must be the same kind.*mean on rank 0, group on rank 1"):
                raise outcome


@pytest.mark.parametrize("malformed", [{"loss": 1.0}, {("a", "b"): MetricSum(1, 1)}, {True: MetricSum(1, 1)}, [1]])
def test_malformed_tree_on_one_rank_ends_every_rank(malformed):
    outcomes, collectives = reduce_together([{"loss": MetricSum(1, 1)}, malformed])
    assert collectives == 2
    with pytest.raises(CollectiveError, match=r"metrics of rank 1 could not be reduced: .*must be"):
        raise outcomes[0]
    with pytest.raises(ConfigurationError, match="must be"):
        raise outcomes[1]


def test_malformed_tree_on_all_ranks_is_an_error_too():
    outcomes, _ = reduce_together([{"loss": 1.0}, {"loss": 1.0}])
    assert [type(outcome) for outcome in outcomes] == [ConfigurationError, ConfigurationError]
    with pytest.raises(ConfigurationError, match="`loss` must be a MetricSum, but is float"):
        raise outcomes[0]


@pytest.mark.parametrize("count", [-1, math.nan, math.inf])
def test_bad_counts_are_refused_by_name_and_rank(count):
    outcomes, _ = reduce_together([{"a": MetricSum(1, 1)}, {"a": MetricSum(1, count)}])
    for outcome in outcomes:
        with pytest.raises(CollectiveError, match=r"`count` of metric `a` must be finite.* on rank 1"):
            raise outcome


def test_total_without_count_is_refused_rather_than_dropped():
    outcomes, _ = reduce_together([{"a": MetricSum(1, 1)}, {"a": MetricSum(7, 0)}])
    for outcome in outcomes:
        with pytest.raises(CollectiveError, match=r"`total` of metric `a` must be 0 .* but is 7.0 on rank 1"):
            raise outcome


def test_string_and_integer_keys_do_not_mix():
    trees = [{"b": {1: MetricSum(1, 1), "1": MetricSum(5, 1)}}, {"b": {"1": MetricSum(7, 1), 1: MetricSum(3, 1)}}]
    assert values_of(trees) == {"b": {1: 2.0, "1": 6.0}}


def test_slash_in_a_key_is_no_group():
    assert values_of([{"a/b": MetricSum(1, 1), "a": {"b": MetricSum(2, 1)}}]) == {"a/b": 1.0, "a": {"b": 2.0}}


def test_reduce_metrics_gathers_twice_however_many_leaves():
    calls = []

    def all_gather(tensor):
        calls.append(tensor.dtype)
        return tensor.unsqueeze(0)

    leaves = {f"B{band:02}": MetricSum(torch.tensor(float(band)), 2) for band in range(12)}
    values, _ = reduce_metrics({"psnr": leaves, "ssim": leaves, "l1": leaves}, all_gather)
    assert calls == [torch.int64, torch.float64]
    assert values["ssim"]["B05"] == 2.5
