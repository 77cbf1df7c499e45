"""What to_plain lets through, weights_only=True loads; what it would refuse is named."""

import collections
import enum
import io
import pathlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from srforge.training.checkpoint_files import CheckpointError
from srforge.training.plain_state import to_plain

LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5))
NESTED = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.one_of(st.text(max_size=3), st.integers()), inner, max_size=3),
    ),
    max_leaves=10,
)


def round_trip(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text(max_size=4), NESTED, max_size=4))
def test_plain_values_pass_unchanged_and_load_back_equal(state):
    assert to_plain(state) == state
    assert round_trip(to_plain(state)) == state


def test_configuration_containers_and_numpy_scalars_become_what_they_hold():
    config = OmegaConf.create({"optimizer": {"betas": [0.9, 0.99], "lr": 2e-3, "again": "${optimizer.lr}"}})
    state = {
        "config": config,
        "betas": config.optimizer.betas,
        "best": np.float64(0.1),
        "count": np.int64(3),
        "flag": np.bool_(True),
        "single": np.float32(0.1),
        "counts": collections.Counter("aab"),
        "lists": collections.defaultdict(list, {"a": [np.float64(2.0)]}),
        "recent": collections.deque([1, 2]),
        "frozen": frozenset([1]),
    }
    expected = {
        "config": {"optimizer": {"betas": [0.9, 0.99], "lr": 2e-3, "again": 2e-3}},
        "betas": [0.9, 0.99],
        "best": 0.1,
        "count": 3,
        "flag": True,
        "single": float(np.float32(0.1)),
        "counts": {"a": 2, "b": 1},
        "lists": {"a": [2.0]},
        "recent": [1, 2],
        "frozen": {1},
    }
    with pytest.raises(Exception, match="Weights only load failed"):
        round_trip(state)
    assert round_trip(to_plain(state)) == expected


def test_an_optimizer_with_configuration_betas_loads_back_into_an_optimizer():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([weight], lr=1e-3, betas=OmegaConf.create([0.9, 0.99]))
    weight.sum().backward()
    optimizer.step()
    loaded = round_trip(to_plain({"optimizer": optimizer.state_dict()}))
    fresh = torch.optim.Adam([weight], lr=1e-3)
    fresh.load_state_dict(loaded["optimizer"])
    assert list(fresh.param_groups[0]["betas"]) == [0.9, 0.99]
    assert torch.equal(fresh.state[weight]["exp_avg"], optimizer.state[weight]["exp_avg"])


class Colour(enum.IntEnum):
    RED = 1


class Step(int):
    pass


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (pathlib.Path("x"), "pathlib"),
        (np.ones(2), "numpy.ndarray"),
        (Colour.RED, "Colour"),
        (Step(1), "Step"),
        (object(), "object"),
        (slice(1), "slice"),
        (lambda: None, "function"),
        (range(3), "range"),
        (b"", "bytes"),
    ],
)
def test_what_cannot_be_loaded_back_is_named_by_its_key_path(value, kind):
    with pytest.raises(CheckpointError, match=rf"state\['a'\]\[1\]\['b'\] must be .*, but is .*{kind}"):
        to_plain({"a": [0, {"b": value}]})


def test_a_key_that_cannot_be_loaded_back_is_named():
    with pytest.raises(CheckpointError, match=r"key .* of state\['a'\] must be .*, but is numpy\.int64"):
        to_plain({"a": {np.int64(1): 2}})


def test_a_view_does_not_drag_its_storage_into_the_file():
    whole = torch.zeros(1_000_000)
    buffer = io.BytesIO()
    torch.save(to_plain({"view": whole[:10]}), buffer)
    assert buffer.tell() < 10_000


def test_tied_weights_are_stored_once():
    weight = torch.zeros(100_000)
    buffer = io.BytesIO()
    torch.save(to_plain({"a": weight, "b": torch.nn.Parameter(weight)}), buffer)
    assert buffer.tell() < 500_000
