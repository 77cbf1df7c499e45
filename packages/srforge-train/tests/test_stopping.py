import math

import pytest

from srforge.distributed import ConfigurationError
from srforge.training import TrainerOptions
from srforge.training.stopping import Standing, stop_reason


def taken(values, **options):
    standing = Standing()
    settings = TrainerOptions(monitor="validation/psnr", **options)
    return standing, [standing.take(e, {"validation/psnr": v}, settings) for e, v in enumerate(values)]


def test_the_best_epoch_is_the_first_of_equal_values_and_never_nan():
    standing, best = taken([1.0, math.nan, 3.0, 3.0, 2.0])
    assert best == [True, False, True, False, False]
    assert (standing.best_value, standing.best_epoch, standing.num_without_improvement) == (3.0, 2, 2)
    assert taken([3.0, 1.0, 2.0], mode="min")[1] == [True, True, False]


def test_epochs_without_validation_do_not_count():
    standing, settings = Standing(), TrainerOptions(monitor="validation/psnr", patience=1)
    standing.take(0, {"validation/psnr": 1.0}, settings)
    standing.take(1, {"training/loss": 0.5}, settings)
    assert standing.num_without_improvement == 0


def test_a_monitor_that_is_not_reported_is_an_error_that_lists_what_is():
    with pytest.raises(ConfigurationError, match=r"validation/psnr.*'validation/ssim'"):
        Standing().take(0, {"validation/ssim": 1.0}, TrainerOptions(monitor="validation/psnr"))


def reason(tmp_path, standing=None, **facts):
    options = TrainerOptions(monitor="m", patience=2, max_steps=100, max_minutes=5.0, stop_file=tmp_path / "stop")
    return stop_reason(
        options, standing or Standing(), **{"epochs_left": 3, "global_step": 10, "minutes": 1.0, **facts}
    )


def test_each_limit_stops_by_its_name(tmp_path):
    assert reason(tmp_path) is None
    assert reason(tmp_path, epochs_left=0) == "epochs"
    assert reason(tmp_path, global_step=100) == "max_steps"
    assert reason(tmp_path, minutes=5.0) == "max_minutes"
    assert reason(tmp_path, Standing(num_without_improvement=2)) == "patience"
    (tmp_path / "stop").touch()
    assert reason(tmp_path) == "stop_file"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "best"}, "`mode` must be one of max, min"),
        ({"patience": 3}, "`monitor` must be set"),
        ({"max_steps": 0}, "`max_steps` must be above 0"),
        ({"validate_every": 0}, "`validate_every` must be above 0"),
    ],
)
def test_options_are_checked_when_they_are_made(options, message):
    with pytest.raises(ConfigurationError, match=message):
        TrainerOptions(**options)
