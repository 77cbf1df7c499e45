import pytest
from omegaconf import OmegaConf

from building import BatchSizes, batch_sizes, build, plain
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
