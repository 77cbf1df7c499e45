import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from srforge.distributed import ReplicaDivergenceError
from srforge.distributed.replicas import check_replicas, fingerprint, refuse_different_structures


def digits(*tensors):
    return tuple(fingerprint(tensors).tolist())


def test_every_single_bit_counts():
    base = torch.zeros(5, dtype=torch.int32)
    seen = {digits(base)}
    for position in range(5):
        for bit in range(32):
            changed = base.clone()
            changed[position] = 1 << bit if bit < 31 else -(2**31)
            seen.add(digits(changed))
    assert len(seen) == 1 + 5 * 32


def test_both_lanes_depend_on_every_position():
    base = torch.zeros(64)
    lanes = {digits(base)}
    for position in range(64):
        changed = base.clone()
        changed[position] = 1.0
        lanes.add(digits(changed))
    assert len({lane[0] for lane in lanes}) == len({lane[1] for lane in lanes}) == 65


@given(st.integers(2, 40), st.data())
def test_order_counts(length, data):
    """Sums are equal, places are not."""
    values = torch.arange(float(length))
    i, j = data.draw(st.lists(st.integers(0, length - 1), min_size=2, max_size=2, unique=True))
    swapped = values.clone()
    swapped[[i, j]] = values[[j, i]]
    assert digits(values) != digits(swapped)


def test_two_sign_flips_of_float64_do_not_cancel():
    """Each adds 2**63 to its word: in a linear hash with odd multipliers both together would add nothing."""
    values = torch.randn(16, dtype=torch.float64)
    flipped = values.clone()
    flipped[[3, 7]] *= -1
    lanes = zip(digits(values), digits(flipped), strict=True)
    assert all(a != b for a, b in lanes)


def test_zero_padding_and_signed_zero_count():
    assert digits(torch.zeros(3, dtype=torch.uint8)) != digits(torch.zeros(4, dtype=torch.uint8))
    assert digits(torch.tensor([0.0])) != digits(torch.tensor([-0.0]))
    assert digits(torch.tensor(0.0)) != digits()


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.float8_e4m3fn, torch.bfloat16, torch.complex64, torch.float64, torch.int16]
)
def test_every_type_is_covered(dtype):
    one = torch.tensor([1, 0, 1]).to(torch.float32).to(dtype)
    other = torch.tensor([1, 1, 1]).to(torch.float32).to(dtype)
    assert digits(one) == digits(one.clone())
    assert digits(one) != digits(other)


def test_layout_does_not_count():
    values = torch.randn(2, 3, 4, 4)
    assert digits(values) == digits(values.to(memory_format=torch.channels_last))
    assert digits(values[:, ::2]) == digits(values[:, ::2].contiguous())


def fleet_of(models):
    """Return rank 0's view of a fleet whose ranks hold ``models``: what each collective would answer."""
    tensors = [[*model.parameters(), *model.buffers()] for model in models]

    def all_gather(tensor):
        if tensor.shape == (2,) and tensor.dtype == torch.int64:
            return torch.stack([fingerprint(own) for own in tensors])
        if tensor.dim() == 2 and tensor.dtype == torch.int64:
            return torch.stack([torch.stack([fingerprint([t]) for t in own]) for own in tensors])
        if tensor.dtype == torch.uint8:
            return torch.stack([tensor] * len(models))
        position = next(i for i, own in enumerate(tensors[0]) if own is tensor)
        return torch.stack([own[position].detach() for own in tensors])

    return all_gather


def models_of(*changes):
    models = [nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)) for _ in changes]
    for model, change in zip(models, changes, strict=True):
        model.load_state_dict(models[0].state_dict())
        with torch.no_grad():
            change(model)
    return models


def nothing(model):
    return None


def test_equal_replicas_pass_in_one_collective():
    models = models_of(nothing, nothing)
    calls = []
    gather = fleet_of(models)
    check_replicas(models[0], lambda t: calls.append(t.shape) or gather(t), None)
    assert calls == [(2,)]


def test_divergence_names_tensors_ranks_and_the_largest_difference():
    def shift(model):
        model[0].bias[1] += 0.5
        model[1].running_var[0] = 3.0

    models = models_of(nothing, nothing, shift)
    message = (
        r"2 of 7 tensors differ from rank 0's: `0.bias` on rank 2 \(largest difference 0.5\); "
        r"`1.running_var` on rank 2 \(largest difference 2\)"
    )
    with pytest.raises(ReplicaDivergenceError, match=message):
        check_replicas(models[0], fleet_of(models), None)


def test_not_a_number_on_one_rank_is_named():
    models = models_of(nothing, lambda model: model[0].weight.fill_(float("nan")))
    with pytest.raises(ReplicaDivergenceError, match=r"`0.weight` on rank 1 \(NaN or inf among them\)"):
        check_replicas(models[0], fleet_of(models), None)


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        (nn.Linear(2, 3), r"rank 0 has weight: \(2, 2\) torch.float32 trainable where rank 1 has weight: \(3, 2\)"),
        (nn.Linear(2, 2, bias=False), "rank 0 has bias: .* where rank 1 has nothing"),
        (nn.Linear(2, 2).double(), "rank 1 has weight: .* torch.float64"),
        (nn.Linear(2, 2).requires_grad_(False), "rank 0 has weight: .* trainable where rank 1 has"),
    ],
)
def test_different_structure_is_refused(theirs, message):
    own = list(nn.Linear(2, 2).named_parameters())
    digests = []

    def all_gather(digest):
        digests.append(digest)
        return torch.stack([digest, digest + 1])

    other = []
    with pytest.raises(ReplicaDivergenceError):
        refuse_different_structures(list(theirs.named_parameters()), all_gather, lambda v: other.append(v) or [[], v])
    with pytest.raises(ReplicaDivergenceError, match=message):
        refuse_different_structures(own, all_gather, lambda value: [value, other[0]])
