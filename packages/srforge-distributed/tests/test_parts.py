import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel

from srforge.distributed import (
    ConfigurationError,
    DDPStrategy,
    Topology,
    load_plain_state_dict,
    plain_state_dict,
    unwrap_module,
)
from srforge.distributed.parts import copy_unwrapped, declared_parts, plain_name, refuse_stray_parameters

# The wrapper is what matters here; its usual backend would take seconds to import.
compiled = partial(torch.compile, backend="eager")


class Truly(nn.Module):
    """Has modules and parameters that are really called as wrappers call theirs."""

    def __init__(self):
        super().__init__()
        self.module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.inner = nn.ModuleDict({"_orig_mod": nn.Linear(2, 2)})
        self.x = nn.Parameter(torch.randn(2))

    def forward(self, batch):
        return self.inner["_orig_mod"](self.module(batch)) + self.x


PLAIN = list(Truly().state_dict())


@pytest.fixture
def ddp():
    """Return what wraps in DDP: a fleet of one over a store in memory."""
    strategy = DDPStrategy(Topology.single(), torch.device("cpu"))
    strategy.setup()
    yield strategy.prepare
    strategy.teardown()


@pytest.fixture(params=["plain", "ddp", "compiled", "compiled ddp", "data parallel"])
def wrap(request, ddp):
    return {
        "plain": lambda model: model,
        "ddp": ddp,
        "compiled": compiled,
        "compiled ddp": lambda model: compiled(ddp(model)),
        "data parallel": DataParallel,
    }[request.param]


def test_plain_state_has_the_bare_names_and_values(wrap):
    bare = Truly()
    expected = {name: value.clone() for name, value in bare.state_dict().items()}
    state = plain_state_dict(wrap(bare))
    assert list(state) == PLAIN
    assert all(torch.equal(state[name], expected[name]) for name in PLAIN)
    assert state._metadata == bare.state_dict()._metadata


@pytest.mark.parametrize("target", ["plain", "ddp", "compiled", "compiled ddp", "data parallel"])
def test_state_of_any_wrapping_loads_into_any_other(wrap, target, ddp):
    saved = plain_state_dict(wrap(Truly()))
    bare = Truly()
    wraps = {"ddp": ddp, "compiled": compiled, "compiled ddp": lambda m: compiled(ddp(m))}
    wraps |= {"data parallel": DataParallel, "plain": lambda m: m}
    result = load_plain_state_dict(wraps[target](bare), saved)
    assert result.missing_keys == result.unexpected_keys == []
    assert all(torch.equal(bare.state_dict()[name], saved[name]) for name in PLAIN)


def test_state_that_another_program_saved_with_its_wrappers_names_loads(wrap):
    foreign = wrap(Truly()).state_dict()
    bare = Truly()
    load_plain_state_dict(bare, foreign)
    assert all(torch.equal(a, b) for a, b in zip(bare.state_dict().values(), foreign.values(), strict=True))


def test_missing_and_unexpected_names_are_torchs_own_error():
    state = plain_state_dict(Truly())
    state["y"] = state.pop("x")
    with pytest.raises(RuntimeError, match=r'Missing key.*"x"(.|\n)*Unexpected key.*"y"'):
        load_plain_state_dict(Truly(), state)
    result = load_plain_state_dict(Truly(), state, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["x"], ["y"])


def test_unwrap_reaches_the_bare_module(wrap):
    bare = Truly()
    assert unwrap_module(wrap(bare)) is bare


def test_names_of_a_composite_are_plain_by_part(ddp):
    model = nn.ModuleDict({"first": Truly(), "second": nn.Linear(2, 2)})
    expected = list(model.state_dict())
    model.trainable_modules = lambda: dict(model.items())
    prepared = ddp(model)
    assert list(plain_state_dict(prepared)) == expected
    assert plain_name(prepared, "first.module.module.0.weight") == "first.module.0.weight"
    fresh = nn.ModuleDict({"first": Truly(), "second": nn.Linear(2, 2)})
    load_plain_state_dict(fresh, plain_state_dict(prepared))


def test_unwrapped_copy_is_bare_deep_and_keeps_ties(ddp):
    model = nn.ModuleDict({"first": nn.Linear(2, 2), "second": nn.Linear(2, 2)})
    model["first"].note = model["first"].weight
    model.trainable_modules = dict  # not asked for: the parts are wrapped by hand
    model["first"] = ddp(model["first"])
    twin = copy_unwrapped(compiled(model))
    assert [type(module) for module in twin.children()] == [nn.Linear, nn.Linear]
    assert twin["first"].note is twin["first"].weight
    assert torch.equal(twin["first"].weight, unwrap_module(model["first"]).weight)
    assert twin["first"].weight is not unwrap_module(model["first"]).weight


def composite(**parts):
    model = nn.ModuleDict({"first": nn.Linear(2, 2), "second": nn.Linear(2, 2)})
    model.trainable_modules = lambda: {name: part if part is not True else model[name] for name, part in parts.items()}
    return model


def test_plain_model_is_one_part():
    model = nn.Linear(2, 2)
    assert declared_parts(model) == {"": model}


def test_declared_parts_may_be_nested():
    model = nn.Module()
    model.inner = composite()
    model.trainable_modules = lambda: {"inner.first": model.inner["first"]}
    assert declared_parts(model) == {"inner.first": model.inner["first"]}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (composite(), "must name at least one part, but is empty"),
        (composite(first=nn.Linear(2, 2)), "'first' is not the module that it returns"),
        (composite(third=nn.Linear(2, 2)), "'third' is no module of the model"),
    ],
)
def test_wrong_declaration_is_refused(model, message):
    with pytest.raises(ConfigurationError, match=message):
        declared_parts(model)


def test_trainable_parameter_in_no_part_is_refused_by_name():
    model = composite(first=True)
    with pytest.raises(
        ConfigurationError, match=r"`second.weight, second.bias` must be in one .*\(first\), but is in none"
    ):
        refuse_stray_parameters(model, declared_parts(model))
    model["second"].requires_grad_(False)
    refuse_stray_parameters(model, declared_parts(model))


def test_trainable_parameter_in_two_parts_is_refused_by_name():
    model = composite(first=True, second=True)
    model["second"].weight = model["first"].weight
    with pytest.raises(ConfigurationError, match=r"`first\.weight` must be in one trainable part, but is in first and"):
        refuse_stray_parameters(model, declared_parts(model))


def test_deep_copy_of_a_bare_model_is_what_an_unwrapped_copy_of_it_is():
    model = Truly()
    assert str(copy_unwrapped(model)) == str(copy.deepcopy(model))
