import pytest

from srforge.distributed import ConfigurationError
from srforge.training import RunnerOptions, Term, TrainerOptions


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "fp8"}, "`precision` must be one of fp32, tf32, bf16, fp16, but is 'fp8'"),
        ({"compile": False}, '`compile` must be one of off, .* Write it in quotes: "off"'),
        ({"compile": "max"}, "`compile` must be one of"),
        ({"non_finite": "stop"}, "`non_finite` must be one of raise, skip, ignore"),
        ({"max_norm": 0.0}, "`max_norm` must be above 0"),
        ({"max_norm": float("nan")}, "`max_norm` must be above 0"),
        ({"accumulate": 0}, "`accumulate` must be above 0"),
    ],
)
def test_a_value_out_of_range_is_named_with_its_rule(options, message):
    with pytest.raises(ConfigurationError, match=message):
        RunnerOptions(**options)


def test_inputs_may_come_as_a_list():
    assert RunnerOptions(inputs=["lr", "noise"]).inputs == ("lr", "noise")


def test_one_name_is_one_entry_and_not_its_letters():
    assert RunnerOptions(inputs="image").inputs == ("image",)
    assert Term(function=len, keys="prediction").keys == ("prediction",)
    assert Term(function=len, keys=["prediction", "hr"]).keys == ("prediction", "hr")


@pytest.mark.parametrize("value", [2.5, True, "7"])
def test_counts_are_whole_numbers(value):
    for name in ("validate_every", "max_steps", "patience"):
        with pytest.raises(ConfigurationError, match=f"`{name}` must be a whole number above 0, but is {value!r}"):
            TrainerOptions(monitor="training/loss", **{name: value})
    with pytest.raises(ConfigurationError, match="`accumulate` must be a whole number"):
        RunnerOptions(accumulate=value)
