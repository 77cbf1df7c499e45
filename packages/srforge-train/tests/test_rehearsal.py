"""What the dry steps of a launch refuse: faults that would else show after the first epoch, or never."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from toys import Lines, loader_of, make_runner, make_trainer, squared

from srforge.distributed import ConfigurationError
from srforge.training import Metrics, RunnerOptions, Trainer, ValidationRunner


def is_close(prediction, target):
    return (prediction - target).abs().flatten(1).amax(1) < 1.0


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda p, t: 1.0, "Term `m` must return .* but returned float 1.0"),
        (lambda p, t: (p - t).abs(), r"Term `m` must return .* shape \(4, 1\)"),
        (lambda p, t: {"band": (p - t).abs()}, "Term `m/band` must return"),
    ],
)
def test_a_training_metric_of_no_documented_form_ends_the_launch_before_its_first_step(value, message):
    runner = make_runner(metrics=Metrics({"m": value}))
    with pytest.raises(ConfigurationError, match=message):
        make_trainer(runner, validate=False).train(1, loader_of(Lines(8)))
    assert runner.global_step == 0


def test_a_share_of_hits_is_a_metric_in_training_and_validation():
    runner = make_runner(metrics=Metrics({"hits": is_close}))
    trainer = Trainer(runner, ValidationRunner(runner.model, Metrics({"hits": is_close})), seed=0)
    data = Lines(7)
    result = trainer.train(1, loader_of(Lines(8)), loader_of(data, training=False))
    with torch.no_grad():
        expected = int(is_close(runner.model(data.lr), data.hr).sum()) / 7
    assert result.metrics["validation"]["hits"] == expected
    assert 0 <= result.metrics["training"]["hits"] <= 1


@pytest.mark.parametrize(
    ("inputs", "loader", "message"),
    [
        (
            ("image",),
            loader_of(Lines(8)),
            r"`inputs` .* must name entries of the batch, but is \('image',\), .* has \['hr', 'lr'\]",
        ),
        (
            ("lr",),
            DataLoader(TensorDataset(Lines(8).lr, Lines(8).hr), batch_size=4, generator=torch.Generator()),
            "`inputs` .* must name entries .* the batch is a list",
        ),
    ],
)
def test_inputs_that_the_batch_lacks_are_named(inputs, loader, message):
    runner = make_runner(options=RunnerOptions(inputs=inputs))
    with pytest.raises(ConfigurationError, match=message):
        make_trainer(runner, validate=False).train(1, loader)
    validator = ValidationRunner(runner.model, Metrics({"l2": squared}), options=RunnerOptions(inputs=inputs))
    with pytest.raises(ConfigurationError, match=message):
        Trainer(make_runner(), validator, seed=0).train(1, loader_of(Lines(8)), loader)
