"""Weights from anywhere find their names, or the difference is listed."""

import os

import pytest
import safetensors.torch
import torch
from torch import nn

from srforge.training.checkpoint_files import CheckpointError
from srforge.training.warm_start import warm_start
from srforge.training.weights_export import export_weights


def network(seed=0, width=3):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, width, 1), nn.BatchNorm2d(width))


class GAN(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        self.generator = network(seed)
        self.discriminator = network(seed + 1)


def prefixed(state, prefix):
    return {prefix + name: value for name, value in state.items()}


def saved(tmp_path, content, name="weights.pth"):
    torch.save(content, tmp_path / name)
    return tmp_path / name


def equal(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


PUBLISHED = network(seed=5).state_dict()


@pytest.mark.parametrize(
    ("content", "source"),
    [
        (PUBLISHED, ""),
        (prefixed(PUBLISHED, "module."), ""),
        (prefixed(PUBLISHED, "_orig_mod."), ""),
        (prefixed(PUBLISHED, "_orig_mod.module."), ""),
        ({"params": PUBLISHED}, "params"),
        ({"params": network(seed=6).state_dict(), "params_ema": PUBLISHED}, "params_ema"),
        ({"epoch": 3, "state_dict": prefixed(PUBLISHED, "module.")}, "state_dict"),
        (
            {"model": {"state_dict": PUBLISHED}, "optimizer": {"state": {0: {"step": torch.ones(1)}}}},
            "model.state_dict",
        ),
        ({"epoch": 3, "model": PUBLISHED, "seed": 1}, "model"),
    ],
)
def test_the_usual_forms_of_published_files_load_into_a_bare_model(tmp_path, content, source):
    model = network(seed=1)
    result = warm_start(model.state_dict(), saved(tmp_path, content))
    assert result.source == source
    assert result.missing == result.unexpected == ()
    model.load_state_dict(result.state)
    assert equal(model.state_dict(), PUBLISHED)


def test_safetensors_round_trips_through_the_export(tmp_path):
    path = export_weights(PUBLISHED, tmp_path / "out" / "model.safetensors", metadata={"scale": "2"})
    assert equal(safetensors.torch.load_file(path), PUBLISHED)
    assert equal(warm_start(network(seed=1).state_dict(), path).state, PUBLISHED)
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "scale": "2"}


def test_a_parameter_really_named_module_keeps_its_name(tmp_path):
    model = nn.ModuleDict({"module": nn.Linear(2, 2), "other": nn.Linear(2, 2)})
    state = {name: torch.rand_like(value) for name, value in model.state_dict().items()}
    assert equal(warm_start(model.state_dict(), saved(tmp_path, state)).state, state)
    assert equal(warm_start(model.state_dict(), saved(tmp_path, prefixed(state, "module."))).state, state)


def test_rules_rename_prefixes_and_the_longest_wins(tmp_path):
    content = {"netG.body.0.weight": torch.ones(1), "netG.weight": torch.zeros(1)}
    model = {"body.first.weight": torch.full((1,), 9.0), "tail.weight": torch.full((1,), 9.0)}
    rules = {"netG.": "tail.", "netG.body.0.": "body.first."}
    result = warm_start(model, saved(tmp_path, content), prefixes=rules)
    assert equal(result.state, {"body.first.weight": torch.ones(1), "tail.weight": torch.zeros(1)})


def test_strict_lists_every_difference(tmp_path):
    content = {"0.weight": torch.zeros(3, 3, 1, 1), "0.bias": torch.zeros(4), "extra": torch.zeros(1)}
    path = saved(tmp_path, content)
    with pytest.raises(
        CheckpointError,
        match=r"1 matched, 5 missing \(1\.weight, .*\), 1 unexpected \(extra\), 1 of other shape "
        r"\(0\.bias \(3,\) against \(4,\)\)\. Map names by `prefixes`",
    ):
        warm_start(network().state_dict(), path)
    model = network().state_dict()
    result = warm_start(model, path, strict=False)
    assert result.matched == ("0.weight",)
    assert result.unexpected == ("extra",)
    assert result.mismatched == {"0.bias": ((3,), (4,))}
    assert torch.equal(result.state["0.weight"], content["0.weight"])
    assert torch.equal(result.state["0.bias"], model["0.bias"])


def test_a_file_of_which_nothing_fits_is_an_error_even_when_not_strict(tmp_path):
    with pytest.raises(CheckpointError, match="0 matched"):
        warm_start(network().state_dict(), saved(tmp_path, {"a": torch.ones(1)}), strict=False)


@pytest.mark.parametrize("content", [PUBLISHED, {"params_ema": PUBLISHED}, GAN(seed=5).state_dict()])
def test_one_part_of_a_gan_is_taken_and_the_other_left_alone(tmp_path, content):
    model = GAN(seed=1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    result = warm_start(model.state_dict(), saved(tmp_path, content), parts=["generator"])
    model.load_state_dict(result.state)
    assert equal(model.generator.state_dict(), PUBLISHED)
    assert equal(model.discriminator.state_dict(), {k[14:]: v for k, v in before.items() if k.startswith("discr")})


def test_two_names_that_fall_on_one_are_an_error(tmp_path):
    content = PUBLISHED | prefixed(PUBLISHED, "module.")
    with pytest.raises(CheckpointError, match=r"must have one tensor for 0\.weight, but has several"):
        warm_start(network().state_dict(), saved(tmp_path, content))


def test_the_models_dtype_is_kept(tmp_path):
    result = warm_start(network().state_dict(), saved(tmp_path, network(seed=5).double().state_dict()), strict=True)
    assert result.state["0.weight"].dtype == torch.float32


def test_an_unknown_part_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"`parts` must name parts of the model, but is \['genrator'\]"):
        warm_start(GAN().state_dict(), saved(tmp_path, PUBLISHED), parts=["genrator"])


def test_a_nest_can_be_chosen_and_a_wrong_one_lists_what_is_there(tmp_path):
    path = saved(tmp_path, {"params": network(seed=6).state_dict(), "last": {"net": PUBLISHED}})
    assert equal(warm_start(network().state_dict(), path, nest="last.net").state, PUBLISHED)
    with pytest.raises(CheckpointError, match=r"`nest` must .* but is .first.\. The file has: params, last"):
        warm_start(network().state_dict(), path, nest="first")


def test_a_file_without_weights_lists_what_is_there(tmp_path):
    with pytest.raises(CheckpointError, match=r"must hold weights .*, but has: epoch, note"):
        warm_start(network().state_dict(), saved(tmp_path, {"epoch": 1, "note": "x"}))


class Hostile:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.system, (f"touch {self.target}",)


def test_a_hostile_file_is_refused_and_never_runs(tmp_path):
    path = saved(tmp_path, {"state_dict": PUBLISHED, "extra": Hostile(tmp_path / "it-ran")})
    with pytest.raises(CheckpointError, match="must hold only tensors and plain values"):
        warm_start(network().state_dict(), path)
    assert not (tmp_path / "it-ran").exists()


@pytest.mark.parametrize("name", ["weights.pth", "weights.safetensors"])
def test_a_cut_file_is_refused_by_name(tmp_path, name):
    path = tmp_path / name
    if name.endswith("pth"):
        torch.save(PUBLISHED, path)
    else:
        export_weights(PUBLISHED, path)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match=rf"{name} must"):
        warm_start(network().state_dict(), path)


@pytest.mark.parametrize(("name", "message"), [("absent.pth", "cannot be read"), ("x.onnx", "must end in")])
def test_a_missing_file_or_another_kind_is_named(tmp_path, name, message):
    with pytest.raises(CheckpointError, match=message):
        warm_start(network().state_dict(), tmp_path / name)


def test_tied_and_strided_weights_are_exported_as_they_are(tmp_path):
    weight = torch.rand(3, 4)
    path = export_weights({"a": weight, "b": weight, "c": weight.T, "d": weight[1]}, tmp_path / "w.safetensors")
    assert equal(safetensors.torch.load_file(path), {"a": weight, "b": weight, "c": weight.T, "d": weight[1]})


@pytest.mark.parametrize(
    ("state", "name", "message"),
    [({"x": 3}, "w.safetensors", r"state_dict\['x'\] must be a dense tensor, but is int"), ({}, "w.pt", "must end in")],
)
def test_what_cannot_be_exported_is_named(tmp_path, state, name, message):
    with pytest.raises(CheckpointError, match=message):
        export_weights(state, tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_an_export_that_the_disk_refuses_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path = export_weights(PUBLISHED, tmp_path / "w.safetensors")
    before = path.read_bytes()
    monkeypatch.setattr("os.fsync", lambda descriptor: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(CheckpointError, match=r"could not be written: .*No space left"):
        export_weights(network(seed=6).state_dict(), path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["w.safetensors"]
