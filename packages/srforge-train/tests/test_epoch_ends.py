"""What is decided and said between epochs: the parts of an epoch that limits cut, speed, learning rates, settings kept."""

import time
import warnings

import numpy as np
import pytest
import torch
from toys import Lines, loader_of, make_model, make_runner, make_trainer, squared

from srforge.distributed import ConfigurationError, set_active_strategy
from srforge.training import (
    CheckpointError,
    CheckpointStore,
    Hook,
    LossLogger,
    NonFiniteGradientError,
    Objective,
    RunnerOptions,
    Schedule,
    TrainerOptions,
    TrainingRunner,
    hooks_into,
)
from srforge.training.resuming import explain_settings


def loaders():
    return loader_of(Lines(12)), loader_of(Lines(5), training=False)


class Contexts(Hook):
    """Keeps what the trainer gives its hooks."""

    def __init__(self):
        self.seen = []

    @hooks_into("on_epoch_finished")
    def keep(self, context):
        self.seen.append(context)


@pytest.mark.parametrize("is_new_launch", [False, True])
def test_a_raised_max_steps_says_which_samples_are_left_out(tmp_path, capsys, is_new_launch):
    trainer = make_trainer(checkpoints=CheckpointStore(tmp_path), options=TrainerOptions(max_steps=4))
    trainer.train(9, *loaders())
    assert "ends after 2 of 9 epochs: max_steps; epoch 1 took 1 of its 3 steps." in capsys.readouterr().err
    if is_new_launch:
        set_active_strategy(None)
        trainer = make_trainer(checkpoints=CheckpointStore(tmp_path))
        trainer.resume()
    trainer.options = TrainerOptions(max_steps=10)
    result = trainer.train(9, *loaders())
    said = capsys.readouterr().err
    assert "Going on with epoch 2: epoch 1 took 1 of its 3 steps, and the samples of the rest are left out." in said
    assert (result.epochs, result.global_step) == (4, 10), "4 steps before, then two epochs of 3"
    assert "Training ends after 4 of 9 epochs: max_steps." in said, "nothing was cut this time"


def test_a_cut_last_epoch_is_said_though_the_epochs_are_over(tmp_path, capsys):
    trainer = make_trainer(checkpoints=CheckpointStore(tmp_path), options=TrainerOptions(max_steps=4))
    trainer.train(2, *loaders())
    assert "ends after 2 of 2 epochs: epochs; epoch 1 took 1 of its 3 steps." in capsys.readouterr().err
    trainer.options = TrainerOptions(max_steps=6)
    trainer.train(2, *loaders())
    assert "finished after 2 epochs (epochs; epoch 1 took 1 of its 3 steps)" in capsys.readouterr().err


def test_a_stream_that_max_steps_ends_is_said_too(capsys):
    batches = [{"lr": torch.ones(4, 3).double(), "hr": torch.ones(4, 1).double()}] * 3
    make_trainer(validate=False, options=TrainerOptions(max_steps=2)).train(1, batches)
    assert "epochs; epoch 0 took 2 steps, and may have had more." in capsys.readouterr().err


def test_a_loader_that_can_be_run_through_only_once_is_an_error_and_not_an_epoch_of_nothing():
    batches = ({"lr": torch.ones(4, 3).double(), "hr": torch.ones(4, 1).double()} for _ in range(3))
    trainer = make_trainer(validate=False)
    with pytest.raises(ConfigurationError, match="must yield a batch in every epoch, but has none"):
        trainer.train(2, batches)
    assert (trainer.epoch, trainer.training_runner.global_step) == (1, 3)


def test_speed_is_that_of_training(monkeypatch, capsys):
    contexts, trainer = Contexts(), make_trainer(hooks=[LossLogger()])
    trainer.hooks.attach(contexts)
    run_epoch = trainer.validation_runner.run_epoch

    def slow(*arguments):
        time.sleep(0.5)
        return run_epoch(*arguments)

    monkeypatch.setattr(trainer.validation_runner, "run_epoch", slow)
    trainer.train(1, *loaders())
    (context,) = contexts.seen
    assert context.training_seconds <= context.seconds - 0.5
    assert f"{12 / context.training_seconds:.0f} samples/s" in capsys.readouterr().out


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_the_learning_rate_shown_is_the_one_that_the_next_step_uses(interval):
    runner, contexts = make_runner(), Contexts()
    runner.schedule = Schedule(torch.optim.lr_scheduler.ExponentialLR(runner.optimizer, 0.5), interval)
    trainer = make_trainer(runner, hooks=[contexts])
    trainer.train(2, *loaders())
    changes = {"step": 3, "epoch": 1}[interval]
    assert [c.learning_rates for c in contexts.seen] == [(0.05 * 0.5**changes,), (0.05 * 0.5 ** (2 * changes),)]


def test_a_stop_file_that_cannot_be_removed_is_said(tmp_path):
    folder = tmp_path / "stop"
    folder.mkdir()
    trainer = make_trainer(options=TrainerOptions(stop_file=folder))
    with pytest.warns(UserWarning, match="could not be removed and will end the next launch"):
        assert trainer.train(3, *loaders()).stop_reason == "stop_file"


def test_another_monitor_looks_for_its_best_anew(tmp_path, capsys):
    first = TrainerOptions(monitor="validation/l2", mode="min", patience=2)
    make_trainer(checkpoints=CheckpointStore(tmp_path), options=first).train(2, *loaders())
    second = TrainerOptions(monitor="training/num_samples", mode="min", patience=2)  # always 12, above any l2
    trainer = make_trainer(checkpoints=CheckpointStore(tmp_path), options=second)
    trainer.resume()
    assert "The best epoch by validation/l2 (min) is forgotten: another metric is followed." in capsys.readouterr().err
    result = trainer.train(9, *loaders())
    assert (result.best_value, result.best_epoch, result.epochs) == (12.0, 2, 5)


def scheduled(make, learning_rate=0.05, **optimizer):
    runner = make_runner(optimizer=lambda p: torch.optim.SGD(p, lr=learning_rate, momentum=0.9, **optimizer))
    interval = "step" if make is one_cycle else "epoch"
    monitor = "validation/l2" if make is plateau else None
    schedule = None if make is None else Schedule(make(runner.optimizer), interval, monitor)
    return TrainingRunner(runner.model, runner.optimizer, Objective({"l2": squared}), schedule=schedule)


def one_cycle(optimizer, total_steps=30):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total_steps)


def plateau(optimizer):
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, mode="max")


def steps(optimizer, step_size=1):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size)


def milestones(optimizer):
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3])


def restarts(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2, 2)


@pytest.mark.parametrize("make", [None, one_cycle, plateau, steps, milestones, restarts])
def test_the_same_configuration_brings_no_setting_of_its_own(tmp_path, make, capsys):
    make_trainer(scheduled(make), checkpoints=CheckpointStore(tmp_path)).train(3, *loaders())
    again = make_trainer(scheduled(make), checkpoints=CheckpointStore(tmp_path))
    again.resume()
    assert "settings of its own" not in capsys.readouterr().err
    again.train(4, *loaders())


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (lambda: scheduled(None), lambda: scheduled(None, 0.01), "group 0 of model has lr 0.05 instead of 0.01"),
        (
            lambda: scheduled(steps),
            lambda: scheduled(steps, 0.01, weight_decay=0.1),
            "has weight_decay 0 instead of 0.1; group 0 of model has initial_lr 0.05 instead of 0.01",
        ),
        (
            lambda: scheduled(steps),
            lambda: scheduled(lambda o: steps(o, 9)),
            "schedule of model has step_size 1 instead of 9",
        ),
    ],
)
def test_settings_that_a_checkpoint_keeps_are_said(tmp_path, before, after, message, capsys):
    make_trainer(before(), checkpoints=CheckpointStore(tmp_path)).train(1, *loaders())
    again = make_trainer(after(), checkpoints=CheckpointStore(tmp_path))
    again.resume()
    said = capsys.readouterr().err
    assert "epoch-00000.pt brings settings of its own, which are kept: " in said
    assert message in said


def test_nothing_is_said_of_a_state_without_optimizers():
    assert explain_settings({}, make_runner()) == ""


@pytest.mark.parametrize(("source", "found"), [("latest", "no file that exists"), ("", "a folder")])
def test_what_is_no_checkpoint_to_resume_is_named(tmp_path, source, found):
    with pytest.raises(CheckpointError, match=f"must be `auto`, `never`, or the path .* is {found}"):
        make_trainer(checkpoints=CheckpointStore(tmp_path)).resume(tmp_path / source if source == "" else source)


@pytest.mark.parametrize(
    ("monitor", "message"),
    [
        ("l2", "must be training/<name> or validation/<name>, but is 'l2'. Write validation/l2"),
        ("validation", "must be training/<name> or validation/<name>, but is 'validation'"),
        ("training/", "must be training/<name> or validation/<name>, but is 'training/'"),
        ("training/l3", "must be a metric of training, but is 'training/l3'. There are training/l2, .*training/loss"),
        ("validation/l3", "must be a metric of validation, but is 'validation/l3'. There are validation/l2"),
    ],
)
def test_a_monitor_that_nothing_reports_ends_the_launch_and_not_the_first_epoch(monitor, message):
    trainer = make_trainer(options=TrainerOptions(monitor=monitor))
    with pytest.raises(ConfigurationError, match=message):
        trainer.train(2, *loaders())
    assert trainer.training_runner.global_step == 0


def test_validation_data_without_a_sample_are_refused():
    with pytest.raises(ConfigurationError, match="validation data must have at least one sample, but is empty"):
        make_trainer().train(1, loader_of(Lines(8)), loader_of(Lines(0), training=False))


def test_validation_data_of_unknown_length_in_an_order_of_its_own_are_measured():
    class Unsized(torch.utils.data.Dataset):
        def __getitem__(self, index):
            return Lines(8)[index]

    order = torch.utils.data.DataLoader(Unsized(), batch_size=4, sampler=[0, 3, 5], generator=torch.Generator())
    assert "l2" in make_trainer().train(1, loader_of(Lines(8)), order).metrics["validation"]


def test_a_stop_file_is_removed_also_where_the_launch_ends_for_another_reason(tmp_path):
    stop = tmp_path / "stop"
    stop.touch()
    assert make_trainer(options=TrainerOptions(stop_file=stop)).train(1, *loaders()).stop_reason == "epochs"
    assert not stop.exists()


def test_epochs_may_be_counted_with_numpy():
    assert make_trainer().train(np.int64(2), *loaders()).epochs == 2


def test_a_process_without_a_console_trains(monkeypatch):
    monkeypatch.setattr("sys.stderr", None)
    monkeypatch.setattr("sys.stdout", None)
    with warnings.catch_warnings():
        assert make_trainer(hooks=[LossLogger(show_replicas=True)]).train(1, *loaders()).epochs == 1


def test_a_stream_that_only_writes_is_no_terminal(monkeypatch):
    class OnlyWrites:
        lines = ()

        def write(self, text):
            self.lines += (text,)

        def flush(self):
            pass

    stream = OnlyWrites()
    monkeypatch.setattr("sys.stderr", stream)
    make_trainer().train(1, *loaders())
    assert any("training 3/3" in line for line in stream.lines)


class Poison(Hook):
    @hooks_into("on_post_forward")
    def poison(self, context):
        context.terms["l2"] = context.terms["l2"] * float("nan")


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_fp16_that_skips_every_step_ends_by_name_and_not_with_an_untrained_model(policy):
    runner = make_runner(make_model(dtype=torch.float32), options=RunnerOptions(precision="fp16", non_finite=policy))
    runner.hooks.attach(Poison())
    trainer = make_trainer(runner, validate=False)
    if policy == "skip":
        assert trainer.train(2, loader_of(Lines(80, torch.float32))).metrics["training"]["skipped_steps"] == 20
        return
    with pytest.raises(NonFiniteGradientError, match=r"loss scale must stay above .* in training epoch 1"):
        trainer.train(4, loader_of(Lines(80, torch.float32)))


def test_parameters_that_a_hook_gives_the_optimizer_are_clipped_with_the_others():
    class Unfreeze(Hook):
        @hooks_into("on_epoch_start")
        def unfreeze(self, context):
            runner.optimizer.add_param_group({"params": list(context.model[0].parameters())})

    model = make_model()
    before = model[0].weight.detach().clone()
    runner = make_runner(model)
    runner = TrainingRunner(
        runner.model,
        torch.optim.SGD(model[2].parameters(), lr=1.0),
        Objective({"l2": squared}),
        options=RunnerOptions(max_norm=1e-6),
    )
    runner.hooks.attach(Unfreeze())
    make_trainer(runner, validate=False).train(1, loader_of(Lines(4)))
    assert 0 < float((model[0].weight.detach() - before).norm()) <= 1e-6
