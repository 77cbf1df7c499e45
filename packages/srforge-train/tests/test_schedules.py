import math

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from srforge.distributed import ConfigurationError
from srforge.training import Schedule, warmup_cosine


def sgd(rate=1.0):
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)


def rate_of(optimizer):
    return optimizer.param_groups[0]["lr"]


def test_a_schedule_steps_at_its_own_interval_only():
    by_step, by_epoch = sgd(), sgd()
    stepwise, epochwise = Schedule(StepLR(by_step, 1, 0.5), "step"), Schedule(StepLR(by_epoch, 1, 0.5), "epoch")
    for optimizer in (by_step, by_epoch):
        optimizer.step()
    for schedule in (stepwise, epochwise):
        schedule.after_step()
        schedule.after_step()
        schedule.after_epoch({})
    assert (rate_of(by_step), rate_of(by_epoch)) == (0.25, 0.5)


def test_a_plateau_follows_the_reduced_metric():
    optimizer = sgd()
    schedule = Schedule(ReduceLROnPlateau(optimizer, "max", factor=0.1, patience=0), "epoch", "validation/psnr")
    schedule.after_epoch({"validation/psnr": 1.0})
    schedule.after_epoch({"validation/psnr": 2.0})
    assert rate_of(optimizer) == 1.0
    schedule.after_epoch({"validation/psnr": 2.0})
    assert rate_of(optimizer) == pytest.approx(0.1)
    schedule.after_epoch({"training/loss": 1.0})  # not validated in this epoch: it does not count
    assert schedule.scheduler.num_bad_epochs == 0
    assert rate_of(optimizer) == pytest.approx(0.1)
    with pytest.raises(ConfigurationError, match=r"validation/psnr.*\['validation/ssim'\]"):
        schedule.after_epoch({"validation/ssim": 1.0})


def test_no_scheduler_changes_nothing():
    schedule = Schedule()
    schedule.after_step()
    schedule.after_epoch({})
    assert schedule.state_dict() == {}


def test_warmup_then_half_a_cosine():
    optimizer = sgd(2.0)
    scheduler = warmup_cosine(optimizer, total_steps=100, warmup=0.1, floor=0.01)
    rates = []
    for _ in range(101):
        rates.append(rate_of(optimizer))
        optimizer.step()
        scheduler.step()
    for step, rate in enumerate(rates):
        cosine = 0.01 + 0.99 * (1 + math.cos(math.pi * (step - 10) / 90)) / 2
        expected = 2.0 * ((step + 1) / 11 if step < 10 else cosine)
        assert rate == pytest.approx(expected), step
    assert rates[100] == pytest.approx(0.02)


def test_a_restored_schedule_goes_on_where_it_was():
    first, second = sgd(), sgd()
    old, new = (Schedule(warmup_cosine(o, total_steps=20), "step") for o in (first, second))
    first.step()
    second.step()
    for _ in range(7):
        old.after_step()
    new.load_state_dict(old.state_dict())
    old.after_step()
    new.after_step()
    assert rate_of(first) == rate_of(second) != 1.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Schedule(None, "batch"), "`interval` must be one of step, epoch"),
        (lambda: Schedule(ReduceLROnPlateau(sgd())), "`monitor` must name a metric"),
        (lambda: warmup_cosine(sgd(), total_steps=0), "`total_steps` must be >= 1"),
        (lambda: warmup_cosine(sgd(), total_steps=5, warmup=1.0), r"`warmup` in \[0, 1\)"),
    ],
)
def test_what_cannot_work_is_refused(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_a_chained_scheduler_steps_each_of_its_own(monkeypatch):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    parts = [torch.optim.lr_scheduler.ExponentialLR(optimizer, factor) for factor in (0.5, 0.1)]
    schedule = Schedule(torch.optim.lr_scheduler.ChainedScheduler(parts, optimizer), "step")
    optimizer.step()
    schedule.after_step()
    # Filters of warnings are for the first step alone: they belong to the process, and cost time.
    monkeypatch.delattr("warnings.catch_warnings")
    optimizer.step()
    schedule.after_step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05**2)
