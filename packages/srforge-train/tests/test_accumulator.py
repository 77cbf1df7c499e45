import math

import pytest
import torch

from srforge.distributed import ConfigurationError
from srforge.training import MetricAccumulator

CPU = torch.device("cpu")


def value(leaf):
    return float(leaf.total) / float(leaf.count)


def test_per_sample_values_means_and_pairs_are_weighted_by_what_they_count():
    accumulated = MetricAccumulator(CPU)
    accumulated.update({"a": torch.tensor([1.0, 2.0, 3.0]), "b": torch.tensor(10.0), "c": (torch.tensor(8.0), 4)}, 3)
    accumulated.update({"a": torch.tensor([8.0]), "b": torch.tensor(2.0), "c": (torch.tensor(1.0), torch.tensor(1))}, 1)
    tree = accumulated.result()
    assert value(tree["a"]) == pytest.approx((1 + 2 + 3 + 8) / 4)
    assert value(tree["b"]) == pytest.approx((3 * 10 + 2) / 4)
    assert value(tree["c"]) == pytest.approx(9 / 5)


def test_bands_keep_their_structure():
    accumulated = MetricAccumulator(CPU)
    accumulated.update({"l1": {"red": torch.tensor([1.0]), "nir": torch.tensor([3.0])}}, 1)
    tree = accumulated.result()
    assert {band: value(leaf) for band, leaf in tree["l1"].items()} == {"red": 1.0, "nir": 3.0}


def test_a_batch_that_repeats_other_ranks_samples_counts_nothing():
    accumulated = MetricAccumulator(CPU)
    accumulated.update({"a": torch.tensor([math.nan])}, 0)
    assert accumulated.result() == {}


def test_names_may_come_and_go_between_steps():
    accumulated = MetricAccumulator(CPU)
    accumulated.update({"a": torch.tensor([1.0])}, 1)
    accumulated.update({"b": torch.tensor([5.0]), "a": torch.tensor([3.0])}, 1)
    accumulated.update({"a": torch.tensor([5.0])}, 1)
    tree = accumulated.result()
    assert (value(tree["a"]), tree["a"].count, value(tree["b"])) == (3.0, 3, 5.0)


def test_a_million_small_values_keep_their_sum():
    accumulated = MetricAccumulator(CPU)
    values = torch.full((1000,), 0.1)
    for _ in range(1000):
        accumulated.update({"a": values}, 1000)
    exact = float(torch.tensor(0.1, dtype=torch.float32).double())
    assert value(accumulated.result()["a"]) == pytest.approx(exact, rel=1e-12)


def test_a_value_of_no_documented_form_is_named_with_its_group():
    with pytest.raises(ConfigurationError, match=r"Term `band/x` must return .* but returned float 1.5"):
        MetricAccumulator(torch.device("cpu")).update({"band": {"x": 1.5}}, 3)
