"""Optimizers and settings that would train nothing, or something else, without a word."""

import pytest
import torch
from gan_toys import make_runner as make_gan_runner
from toys import make_model, make_runner, squared

from srforge.distributed import ConfigurationError, set_active_strategy, setup_device
from srforge.distributed.testing import FakeStrategy
from srforge.training import Objective, RunnerOptions, Schedule, TrainingRunner
from srforge.training.optimizer_checks import refuse_unfit_optimizers


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def test_an_optimizer_of_another_models_parameters_is_refused():
    model, _ = setup_device(make_model(), "cpu")
    with pytest.raises(
        ConfigurationError, match=r"'model' must have parameters of the model .* 4 of its 4 .* not be trained"
    ):
        TrainingRunner(model, sgd(make_model().parameters()), Objective({"l2": squared}))


def test_a_loss_with_weights_of_its_own_is_for_one_rank_only():
    model = make_model()
    optimizer = sgd([*model.parameters(), torch.nn.Parameter(torch.ones(()))])
    refuse_unfit_optimizers(model, {"model": optimizer}, RunnerOptions())
    set_active_strategy(FakeStrategy(0, 2))
    with pytest.raises(ConfigurationError, match="1 of its 5 are not: they would differ between ranks"):
        refuse_unfit_optimizers(model, {"model": optimizer}, RunnerOptions())


def test_an_optimizer_that_a_hook_will_fill_is_taken():
    model, _ = setup_device(make_model(), "cpu")
    optimizer = sgd(list(model.parameters())[:1])
    optimizer.param_groups[0]["params"].clear()
    TrainingRunner(model, optimizer, Objective({"l2": squared}))


def test_a_scheduler_that_does_not_tell_its_optimizer_is_taken():
    class Plain:
        def step(self):
            pass

    model, _ = setup_device(make_model(), "cpu")
    TrainingRunner(model, sgd(model.parameters()), Objective({"l2": squared}), schedule=Schedule(Plain(), "step"))


def test_an_optimizer_that_needs_a_closure_is_refused():
    with pytest.raises(ConfigurationError, match="must step without a closure, but LBFGS"):
        make_runner(optimizer=torch.optim.LBFGS)


def test_settings_by_optimizer_name_one():
    with pytest.raises(ConfigurationError, match=r"`max_norm` must name optimizers \(model\), but names modle"):
        make_runner(options=RunnerOptions(max_norm={"modle": 1.0}))
    with pytest.raises(
        ConfigurationError, match=r"`schedules` must name optimizers \(generator, discriminator\), .* gen,"
    ):
        make_gan_runner(schedules={"gen": Schedule()})


def test_a_schedule_of_another_optimizer_is_refused():
    model, _ = setup_device(make_model(), "cpu")
    other = sgd(model.parameters())
    schedule = Schedule(torch.optim.lr_scheduler.StepLR(other, 1))
    with pytest.raises(ConfigurationError, match="schedule of 'model' must be of its optimizer"):
        TrainingRunner(model, sgd(model.parameters()), Objective({"l2": squared}), schedule=schedule)
    TrainingRunner(model, other, Objective({"l2": squared}), schedule=schedule)
