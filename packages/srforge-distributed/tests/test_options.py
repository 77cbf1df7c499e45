import dataclasses

import pytest

from srforge.distributed import ConfigurationError, DistributedOptions, refuse_fsdp


def test_options_are_frozen_and_keyword_only():
    with pytest.raises(dataclasses.FrozenInstanceError):
        DistributedOptions().strategy = "ddp"
    with pytest.raises(TypeError):
        DistributedOptions("ddp")


def test_mapping_gives_the_options_it_names():
    assert DistributedOptions.from_mapping(None) == DistributedOptions.from_mapping({}) == DistributedOptions()
    options = DistributedOptions.from_mapping({"timeout_minutes": 5, "static_graph": False})
    assert (options.timeout_minutes, options.static_graph, options.check_replicas) == (5, False, True)
    assert options.changed() == {"timeout_minutes": 5, "static_graph": False}


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"timeout_minute": 5}, "`timeout_minute` must be one of .*, but is unknown. Did you mean `timeout_minutes`?"),
        ({"sync_bn": True}, "Did you mean `sync_batchnorm`?"),
        ({1: True}, "`1` must be one of"),
        ({"strategy": "dpp"}, "`strategy` must be one of auto, .*, but is 'dpp'. Did you mean 'ddp'?"),
        ({"backend": "mpi"}, "`backend` must be one of auto, nccl, gloo, but is 'mpi'"),
        ({"gradient_compression": True}, "`gradient_compression` must be one of none, bf16, fp16, but is True"),
        ({"static_graph": "false"}, "`static_graph` must be true or false, but is 'false'"),
        ({"timeout_minutes": 0}, "`timeout_minutes` must be a number > 0, but is 0"),
        ({"timeout_minutes": float("nan")}, "`timeout_minutes` must be a number > 0, but is nan"),
        ({"timeout_minutes": True}, "`timeout_minutes` must be a number > 0, but is True"),
        ({"timeout_minutes": "30"}, "`timeout_minutes` must be a number > 0, but is '30'"),
    ],
)
def test_error_names_key_value_and_the_nearest_valid_one(mapping, message):
    with pytest.raises(ConfigurationError, match=message):
        DistributedOptions.from_mapping(mapping)


@pytest.mark.parametrize(
    ("config", "path"),
    [
        ({"strategy": "fsdp"}, "strategy"),
        ({"strategy": "FSDP2"}, "strategy"),
        ({"distributed": {"strategy": "fsdp"}}, "distributed.strategy"),
        ({"system": {"strategy": "fsdp"}}, "system.strategy"),
        ({"system": {"distributed": {"strategy": "fsdp"}}}, "system.distributed.strategy"),
    ],
)
def test_fsdp_fails_loudly_wherever_it_is_spelled(config, path):
    with pytest.raises(ConfigurationError, match=f"`{path}` must be one of .*FSDP is not offered"):
        refuse_fsdp(config)
    with pytest.raises(ConfigurationError, match="FSDP is not offered"):
        DistributedOptions.from_mapping(config)


def test_configuration_without_fsdp_passes():
    refuse_fsdp({"system": {"device": "cpu", "distributed": None}, "strategy": "ddp"})
