from dataclasses import dataclass, field
from typing import Any

import pytest
from omegaconf import OmegaConf

from assembly import num_steps_of
from building import BatchSizes, batch_sizes, build, plain
from srforge.data import DataLoaderFactory
from srforge.distributed import ConfigurationError


def sizes(world_size, batch_size=None, global_batch_size=None, accumulate=1, validation_batch_size=1):
    training = {"batch_size": batch_size, "global_batch_size": global_batch_size, "accumulate": accumulate}
    return batch_sizes({**training, "validation_batch_size": validation_batch_size}, world_size)


def test_the_batch_of_a_rank_is_multiplied_and_the_global_one_divided():
    assert sizes(2) == BatchSizes(16, 1, 32)
    assert sizes(3, batch_size=4, accumulate=2) == BatchSizes(4, 2, 24)
    assert sizes(4, global_batch_size=32, accumulate=2) == BatchSizes(4, 2, 32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 4, "global_batch_size": 8}, "must not both be given, but are 4 and 8"),
        ({"global_batch_size": 7}, r"multiple of ranks x accumulate = 2 x 1, but is 7. Choose [68]"),
        ({"global_batch_size": 1}, "Choose 2"),
        ({"batch_size": 0}, "`training.batch_size` must be at least 1, but is 0"),
        ({"accumulate": 0}, "`training.accumulate` must be at least 1, but is 0"),
        ({"validation_batch_size": 0}, "`training.validation_batch_size` must be at least 1, but is 0"),
    ],
)
def test_batches_that_cannot_be_are_refused_with_one_that_can(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        sizes(2, **arguments)


def test_what_a_node_names_is_built_and_nothing_stays_nothing():
    assert build(OmegaConf.create({"_target_": "builtins.complex", "real": 1.5, "imag": 2})) == 1.5 + 2j
    assert build(None) is None


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"_target_": "srforge.sr.Nothing"}, r"srforge\.sr\.Nothing"),
        ({"_target_": "srforge.sr.EDSR", "scale": 2, "num_blocs": 3}, "num_blocs"),
        ({"_target_": "srforge.sr.demo_photographs", "split": "test", "scale": 2}, "`split` must be 'train'"),
    ],
)
def test_what_cannot_be_built_is_one_error_of_ours(node, message):
    with pytest.raises(ConfigurationError, match=message) as caught:
        build(OmegaConf.create(node))
    chain, error = [], caught.value
    while error is not None:
        assert error not in chain
        chain.append(error)
        error = error.__cause__ or error.__context__


def test_a_missing_value_is_named_by_its_key():
    with pytest.raises(
        ConfigurationError, match=r"`data\.folder` must be given, but is missing\. Add data\.folder=VALUE"
    ):
        plain(OmegaConf.create({"data": {"folder": "???"}, "name": "a"}))


def test_an_interpolation_that_leads_nowhere_is_one_error_of_ours():
    with pytest.raises(ConfigurationError, match="Interpolation key 'nope' not found"):
        plain(OmegaConf.create({"scale": "${nope}"}))


@dataclass
class Section:
    epochs: int = 1


@dataclass
class Schema:
    training: Section = field(default_factory=Section)
    model: dict[str, Any] = field(default_factory=dict)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (
            "training.epcohs",
            r"`training\.epcohs` must be a key that exists, but is none\. Did you mean training\.epochs\?",
        ),
        ("colour", r"`colour` must be a key that exists, but is none\. Leave it out"),
    ],
)
def test_a_key_that_nothing_reads_is_refused_also_when_it_was_added_by_force(key, message):
    config = OmegaConf.structured(Schema)
    OmegaConf.update(config, "model.depth", 3, force_add=True)
    assert plain(config) == {"training": {"epochs": 1}, "model": {"depth": 3}}
    OmegaConf.update(config, key, 3, force_add=True)
    with pytest.raises(ConfigurationError, match=message):
        plain(config)


@pytest.mark.parametrize(("max_steps", "expected"), [(None, 9), (4, 4), (100, 9)])
def test_a_schedule_is_as_long_as_the_run(max_steps, expected):
    loader = DataLoaderFactory(list(range(6)), 2, shuffle=True, seed=0).get_loader()
    assert num_steps_of(loader, {"epochs": 3, "max_steps": max_steps}) == expected


def test_a_run_without_epochs_is_refused_by_its_key():
    loader = DataLoaderFactory(list(range(6)), 2, shuffle=True, seed=0).get_loader()
    with pytest.raises(ConfigurationError, match=r"`training\.epochs` must be at least 1, but is 0"):
        num_steps_of(loader, {"epochs": 0, "max_steps": None})
