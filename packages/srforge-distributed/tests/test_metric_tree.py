import pytest
import torch

from srforge.distributed.errors import ConfigurationError
from srforge.distributed.metric_tree import MetricSum, flatten, pack, rebuild, spell


def test_flatten_keeps_order_and_empty_groups():
    tree = {"b": {"y": MetricSum(1, 1), "x": {}}, "a": MetricSum(2, 1)}
    assert list(flatten(tree)) == [("b", "y"), ("b", "x"), ("a",)]
    assert flatten(tree)[("b", "x")] is None
    assert flatten({}) == {}


def test_rebuild_appends_what_other_ranks_have_and_leaves_out_the_uncounted():
    tree = {"b": {"y": MetricSum(1, 1)}, "a": MetricSum(2, 1)}
    union = [("a",), ("b", "y"), ("b", "z"), ("c", "d"), ("e",)]
    values = {("a",): None, ("b", "y"): 1.0, ("b", "z"): 2.0, ("c", "d"): 3.0}
    assert repr(rebuild(tree, union, values)) == "{'b': {'y': 1.0, 'z': 2.0}, 'c': {'d': 3.0}, 'e': {}}"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.int32, torch.int64, torch.bool])
def test_pack_takes_numbers_and_tensors_of_any_dtype_in_order(dtype):
    leaves = [
        MetricSum(torch.tensor(1, dtype=dtype), 3),
        None,
        MetricSum(0.5, torch.tensor(2)),
        MetricSum(2**53 - 1, 1),
    ]
    packed = pack(leaves)
    assert packed.dtype == torch.float64
    assert packed.tolist() == [[1.0, 3.0], [0.0, 0.0], [0.5, 2.0], [2.0**53 - 1, 1.0]]
    assert pack([]).shape == (0, 2)


def test_pack_detaches_totals_that_need_gradients():
    total = torch.ones(3, dtype=torch.float64, requires_grad=True).sum()
    packed = pack([MetricSum(total, 1)])
    assert not packed.requires_grad
    assert packed.tolist() == [[3.0, 1.0]]


def test_unknown_reduction_is_refused():
    with pytest.raises(ConfigurationError, match="`reduction` must be one of mean, sum, min, max, but is 'median'"):
        MetricSum(1, 1, "median")


def test_tensors_with_a_shape_are_refused():
    with pytest.raises(ConfigurationError, match=r"`total` must be a real tensor of shape \(\), but is .*\(2,\)"):
        MetricSum(torch.zeros(2), 1)
    with pytest.raises(ConfigurationError, match="`total` must be a real tensor"):
        MetricSum(torch.zeros((), dtype=torch.complex64), 1)
    with pytest.raises(ConfigurationError, match=r"`count` must be a number or a tensor .* but is str"):
        MetricSum(1, "3")


def test_spell_joins_keys():
    assert spell(("validation", "psnr", 2)) == "validation/psnr/2"
