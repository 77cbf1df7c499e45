"""The plan against an oracle that cuts lists: `torch.tensor_split` for ranks, slices for steps and micro-batches."""

import dataclasses
import pickle
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from srforge.distributed.errors import ConfigurationError
from srforge.distributed.shard_plan import ShardPlan, even_share

law = settings(database=None, deadline=None, max_examples=150)
plans = st.builds(
    lambda num_samples, world_size, batch_size, accumulate, tail, repeat, filler: {
        "num_samples": num_samples + (world_size * batch_size * accumulate if tail == "drop" else 0),
        "world_size": world_size,
        "batch_size": batch_size,
        "accumulate": accumulate,
        "tail": tail,
        "repeat": repeat,
        "filler": filler,
    },
    st.integers(1, 60),
    st.integers(1, 9),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from(["exact", "pad", "drop"]),
    st.integers(1, 3),
    st.integers(1, 2),
)


def cut(plan):
    """Positions of each step, by rank, by micro-batch: nested lists."""
    steps = torch.arange(plan.stream_length).split(plan.global_batch_size)
    return [
        [
            list(share.split(plan.batch_size)) if len(share) else []
            for share in torch.tensor_split(step, plan.world_size)
        ]
        for step in steps
    ]


@law
@given(plans)
def test_counts_equal_those_of_cut_lists(fields):
    plan = ShardPlan(**fields)
    micro_batch = 0
    for number, ranks in enumerate(cut(plan)):
        rows = max(len(share) for share in ranks)
        for row in range(rows):
            assert plan.step_of(micro_batch) == number
            assert plan.ends_window(micro_batch) == (row == rows - 1)
            assert plan.window_count(micro_batch) == sum(len(part) for share in ranks for part in share)
            for rank, share in enumerate(ranks):
                assert plan.local_count(micro_batch, rank) == (len(share[row]) if row < len(share) else 0)
            micro_batch += 1
    assert micro_batch == plan.num_micro_batches
    assert plan.num_steps == len(cut(plan))


@law
@given(plans)
def test_loss_scales_make_the_mean_over_the_real_samples_of_each_step(fields):
    plan = ShardPlan(**fields)
    values = [Fraction(position**2 + 1, 7) for position in range(plan.stream_length)]
    micro_batch = 0
    for ranks in cut(plan):
        real = [values[position] for share in ranks for part in share for position in part]
        total = Fraction(0)
        for row in range(max(len(share) for share in ranks)):
            for rank, share in enumerate(ranks):
                exact = Fraction(plan.local_count(micro_batch, rank) * plan.world_size, plan.window_count(micro_batch))
                assert plan.loss_scale(micro_batch, rank) == float(exact)
                row_values = [values[position] for position in share[row]] if row < len(share) else [Fraction(999)]
                # summed over micro-batches and averaged over ranks, as gradients are
                total += exact * sum(row_values) / len(row_values) / plan.world_size
            micro_batch += 1
        assert total == sum(real) / len(real)


@law
@given(plans)
def test_only_the_last_row_of_an_epoch_is_short(fields):
    plan = ShardPlan(**fields)
    for rank in range(plan.world_size):
        counts = [plan.local_count(micro_batch, rank) for micro_batch in range(plan.num_micro_batches)]
        assert all(count == plan.batch_size for count in counts[:-1])


@law
@given(plans)
def test_each_tail_gives_its_length(fields):
    plan = ShardPlan(**fields)
    length, batch = plan.num_samples * plan.repeat, plan.global_batch_size
    if plan.tail == "exact":
        assert plan.stream_length == length
    elif plan.tail == "pad":
        assert plan.stream_length % batch == 0
        assert 0 <= plan.stream_length - length < batch
    else:
        assert plan.stream_length % batch == 0
        assert 0 <= length - plan.stream_length < batch


@law
@given(st.integers(1, 50), st.integers(1, 60), st.sampled_from([1, 2, 3, 4, 6, 12]))
def test_steps_do_not_depend_on_how_a_global_batch_is_shared(num_samples, steps_per_epoch, world_size):
    alone = ShardPlan(num_samples=num_samples, world_size=1, batch_size=12, steps_per_epoch=steps_per_epoch)
    shared = ShardPlan(
        num_samples=num_samples, world_size=world_size, batch_size=12 // world_size, steps_per_epoch=steps_per_epoch
    )
    assert shared.stream_length == alone.stream_length == 12 * steps_per_epoch
    assert shared.num_steps == alone.num_steps == steps_per_epoch
    assert shared.num_micro_batches == steps_per_epoch


@law
@given(st.integers(0, 100), st.integers(1, 12))
def test_even_shares_are_those_of_tensor_split(count, world_size):
    for rank, share in enumerate(torch.tensor_split(torch.arange(count), world_size)):
        assert list(even_share(count, rank, world_size)) == share.tolist()


@pytest.mark.parametrize("rank", [0, 511, 1023])
def test_a_plan_of_a_thousand_ranks_is_arithmetic(rank):
    plan = ShardPlan(num_samples=10**12 + 1, world_size=1024, batch_size=16, accumulate=2)
    assert plan.num_steps == 10**12 // 32768 + 1
    last = plan.num_micro_batches - 1
    rest = (10**12 + 1) % 32768  # 4097: four samples for each rank and a fifth for the first
    assert plan.window_count(last) == rest
    assert plan.local_count(last, rank) == rest // 1024 + (rank < rest % 1024)
    assert plan.loss_scale(0, rank) == 0.5  # two micro-batches of equal weight
    assert plan.loss_scale(last, rank) == plan.local_count(last, rank) * 1024 / rest


def test_a_plan_is_a_value():
    plan = ShardPlan(num_samples=10, world_size=2, batch_size=3)
    assert plan.num_micro_batches == 2
    assert pickle.loads(pickle.dumps(plan)) == plan == dataclasses.replace(plan)
    assert dataclasses.replace(plan, batch_size=1).num_micro_batches == 5
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.batch_size = 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_samples": 0}, "`num_samples` must be an integer >= 1, but is 0"),
        ({"world_size": 0}, "`world_size` must be an integer >= 1, but is 0"),
        ({"batch_size": -1}, "`batch_size` must be an integer >= 1, but is -1"),
        ({"batch_size": 2.0}, "`batch_size` must be an integer >= 1, but is 2.0"),
        ({"accumulate": True}, "`accumulate` must be an integer >= 1, but is True"),
        ({"repeat": 0}, "`repeat` must be an integer >= 1, but is 0"),
        ({"filler": 0}, "`filler` must be an integer >= 1, but is 0"),
        ({"steps_per_epoch": 0}, "`steps_per_epoch` must be an integer >= 1, but is 0"),
        ({"tail": "cut"}, "`tail` must be one of exact, pad, drop, but is 'cut'"),
        ({"tail": "drop", "num_samples": 7}, "`num_samples` must fill one global batch of 8 when `tail` is drop"),
    ],
)
def test_fields_that_cannot_work_are_refused(fields, message):
    with pytest.raises(ConfigurationError, match=message):
        ShardPlan(**{"num_samples": 10, "world_size": 2, "batch_size": 4, **fields})


@pytest.mark.parametrize("fields", [{"repeat": 2}, {"tail": "pad"}, {"tail": "drop"}])
def test_an_option_without_effect_is_told(fields):
    with pytest.warns(UserWarning, match="no effect beside `steps_per_epoch`"):
        ShardPlan(num_samples=10, world_size=1, batch_size=4, steps_per_epoch=1, **fields)


@pytest.mark.parametrize("micro_batch", [-1, 2])
def test_a_micro_batch_outside_the_epoch_is_refused(micro_batch):
    plan = ShardPlan(num_samples=10, world_size=2, batch_size=3)
    for ask in (plan.ends_window, plan.step_of, plan.window_count):
        with pytest.raises(ConfigurationError, match=r"`micro_batch` must be in \[0, 2\)"):
            ask(micro_batch)
    with pytest.raises(ConfigurationError, match=r"`micro_batch` must be in \[0, 2\)"):
        plan.loss_scale(micro_batch, 0)
