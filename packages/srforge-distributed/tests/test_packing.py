import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from srforge.distributed import ConfigurationError
from srforge.distributed.packing import as_integers, flatten, named_tensors, packs, unflatten

TYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
]


def any_tensor(dtype, shape, seed):
    values = torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).to(torch.float64)
    return values.to(dtype)


def same_bits(a, b):
    return torch.equal(as_integers(a), as_integers(b))


@given(
    st.lists(st.tuples(st.sampled_from(TYPES), st.lists(st.integers(0, 4), max_size=3)), max_size=8), st.integers(1, 99)
)
def test_packs_bring_every_tensor_back_bit_for_bit(kinds, limit):
    tensors = [any_tensor(dtype, shape, seed) for seed, (dtype, shape) in enumerate(kinds)]
    targets = [torch.zeros_like(tensor) for tensor in tensors]
    sent = [flatten(pack) for pack in packs(tensors, limit)]
    for flat, pack in zip(sent, packs(targets, limit), strict=True):
        unflatten(flat, pack)
    assert all(same_bits(a, b) for a, b in zip(tensors, targets, strict=True))


def test_pack_holds_at_most_the_limit_unless_one_tensor_is_larger():
    tensors = [torch.zeros(n) for n in (2, 2, 9, 1, 1)]
    assert [[t.numel() for t in pack] for pack in packs(tensors, limit=16)] == [[2, 2], [9], [1, 1]]


def test_views_conjugates_and_not_a_number_keep_their_bits():
    odd = torch.tensor([float("nan"), -0.0, float("inf")])
    tensors = [torch.arange(6.0).reshape(2, 3).t(), torch.tensor([1 + 2j, 3 - 4j]).conj(), odd, torch.tensor(7.0)]
    targets = [torch.empty(3, 2), torch.zeros(2, dtype=torch.complex64), torch.empty(3), torch.empty(())]
    for pack, target in zip(packs(tensors), packs(targets), strict=True):
        unflatten(flatten(pack), target)
    assert all(same_bits(a, b) for a, b in zip(tensors, targets, strict=True))


def test_tied_tensors_come_once_and_unsaved_buffers_too():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    model.register_buffer("table", torch.zeros(3), persistent=False)
    assert [name for name, _ in named_tensors(model)] == ["0.weight", "table"]
    assert [name for name, _ in named_tensors(model, buffers=False)] == ["0.weight"]


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.eye(3).to_sparse(), "`table` must be a dense tensor with storage, but is sparse"),
        (torch.zeros(3, device="meta"), "`table` must be a dense tensor with storage, but is on the meta device"),
        (nn.UninitializedBuffer(), r"`table` must have a shape, but is uninitialised \(lazy\)"),
    ],
)
def test_what_cannot_travel_is_refused_by_name(tensor, message):
    model = nn.Module()
    model.register_buffer("table", tensor)
    with pytest.raises(ConfigurationError, match=message):
        named_tensors(model)


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_lazy_parameter_is_refused_by_name():
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(ConfigurationError, match=r"`0\.weight` must have a shape"):
        named_tensors(model)
