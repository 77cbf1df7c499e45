import json

import pytest
import torch
from torch import nn
from toys import Lines, loader_of, make_model, make_runner, make_trainer, squared

from srforge.distributed import CollectiveError, ConfigurationError, get_active_strategy, set_active_strategy
from srforge.distributed.testing import FakeStrategy
from srforge.training import (
    CheckpointError,
    CheckpointStore,
    ExponentialMovingAverage,
    Hook,
    LossLogger,
    Objective,
    Schedule,
    Trainer,
    TrainerOptions,
    TrainingRunner,
    UnpreparedModelError,
    hooks_into,
    warmup_cosine,
)


class Noisy(nn.Module):
    """Dropout, BatchNorm and a buffer: everything that a resume could get wrong."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1)).double()

    def forward(self, lr):
        return self.body(lr)


class Counter(Hook):
    def __init__(self):
        self.count = 0

    @hooks_into("on_epoch_finished")
    def add(self, context):
        self.count += 1

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def noisy_trainer(folder, **options):
    torch.manual_seed(0)
    model = Noisy()
    ema = ExponentialMovingAverage(model, 0.9)
    runner = make_runner(model, optimizer=lambda p: torch.optim.AdamW(p, lr=0.01), ema=ema)
    runner.schedule = Schedule(warmup_cosine(runner.optimizer, total_steps=24), "step")
    return make_trainer(
        runner, checkpoints=CheckpointStore(folder), hooks=[Counter()], options=TrainerOptions(**options)
    )


def loaders():
    return loader_of(Lines(22), accumulate=1), loader_of(Lines(6), training=False)


def assert_same(left, right, where="state"):
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, right), where
    elif isinstance(left, dict):
        assert left.keys() == right.keys(), where
        for key in left:
            assert_same(left[key], right[key], f"{where}.{key}")
    else:
        assert left == right, where


@pytest.mark.parametrize("stops", [[1], [2, 3]])
def test_a_resumed_run_ends_on_the_same_bits(tmp_path, stops):
    whole = noisy_trainer(tmp_path / "whole")
    whole.train(4, *loaders())
    for epochs in [*stops, 4]:
        torch.manual_seed(epochs)  # a new process starts from another random state
        part = noisy_trainer(tmp_path / "parts")
        part.resume("auto")
        part.train(epochs, *loaders())
    states = [CheckpointStore(tmp_path / name).load(tmp_path / name / "epoch-00003.pt") for name in ("whole", "parts")]
    assert_same(*states)
    assert states[0]["hooks"]["Trainer"]["0.Counter"] == {"count": 4}


def test_the_rehearsal_leaves_no_trace(tmp_path):
    trainer = noisy_trainer(tmp_path)
    seen = []

    class Seeing(Hook):
        @hooks_into("on_pre_step", "on_post_forward", "on_post_backward", "on_post_step")
        def see(self, context):
            seen.append(context)

    trainer.training_runner.hooks.attach(Seeing())
    model = trainer.training_runner.model
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    trainer.rehearse(*loaders())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert_same(dict(model.state_dict()), before)
    assert all(p.grad is None for p in model.parameters())
    assert not trainer.training_runner.optimizer.state
    assert seen == []
    assert trainer.training_runner.global_step == 0


def test_a_weighted_term_without_gradient_stops_the_run_before_it_begins(tmp_path):
    runner = make_runner()
    runner.objective = Objective({"l2": squared, "dead": lambda p, t: squared(p.detach(), t)})
    with pytest.raises(ConfigurationError, match=r"no gradient flows from \['dead'\]"):
        make_trainer(runner, checkpoints=CheckpointStore(tmp_path)).train(1, *loaders())
    assert list(tmp_path.iterdir()) == []


def test_an_unprepared_model_is_refused_under_a_distributed_strategy():
    set_active_strategy(FakeStrategy(0, 2))
    model = make_model()
    runner = TrainingRunner(model, torch.optim.SGD(model.parameters(), lr=0.1), Objective({"l2": squared}))
    with pytest.raises(UnpreparedModelError, match="must come from setup_device"):
        Trainer(runner, seed=0).train(1, loader_of(Lines(8)))


def test_a_monitor_that_nothing_measures_is_refused_before_the_first_epoch(tmp_path):
    trainer = noisy_trainer(tmp_path, monitor="validation/l3")
    with pytest.raises(ConfigurationError, match=r"is 'validation/l3'\. There are validation/l2"):
        trainer.train(1, *loaders())

    class Adding(Hook):
        @hooks_into("on_post_forward")
        def add(self, context):
            context.terms.add("l3", context.terms["l2"])

    trainer.validation_runner.hooks.attach(Adding())
    assert trainer.train(1, *loaders()).best_epoch == 0


def test_an_empty_loader_is_an_error():
    with pytest.raises(ConfigurationError, match="at least one batch"):
        make_trainer().train(1, [])


def test_a_finished_run_does_nothing_and_says_so(tmp_path, capsys):
    noisy_trainer(tmp_path).train(2, *loaders())
    again = noisy_trainer(tmp_path)
    again.resume()
    result = again.train(2, *loaders())
    assert "This run is finished after 2 epochs" in capsys.readouterr().err
    assert (result.epochs, result.global_step) == (2, 12)
    assert result.metrics["validation"]["l2"] > 0


def test_more_epochs_continue_a_run_that_ended_by_its_number_of_epochs(tmp_path):
    noisy_trainer(tmp_path).train(2, *loaders())
    more = noisy_trainer(tmp_path)
    assert more.resume() == 2
    assert more.train(3, *loaders()).epochs == 3


def test_patience_ends_the_run_for_good(tmp_path):
    class Worse(Hook):
        @hooks_into("on_post_forward")
        def worsen(self, context):
            context.terms["l2"] = context.terms["l2"] + 10.0 * context.epoch

    def make():
        trainer = noisy_trainer(tmp_path, monitor="validation/l2", mode="min", patience=2)
        trainer.validation_runner.hooks.attach(Worse())
        return trainer

    result = make().train(9, *loaders())
    assert (result.epochs, result.best_epoch, result.stop_reason) == (3, 0, "patience")
    again = make()
    again.resume()
    assert again.train(9, *loaders()).epochs == 3


def test_max_steps_and_the_stop_file_end_at_an_epoch_end(tmp_path):
    result = noisy_trainer(tmp_path / "a", max_steps=8).train(9, *loaders())
    assert (result.global_step, result.stop_reason) == (8, "max_steps")
    stop = tmp_path / "stop"
    stop.touch()
    result = noisy_trainer(tmp_path / "b", stop_file=stop).train(9, *loaders())
    assert (result.epochs, result.stop_reason) == (1, "stop_file")


def test_validation_may_be_rarer_but_never_misses_the_last_epoch(tmp_path):
    epochs = []

    class Seeing(Hook):
        @hooks_into("on_epoch_start")
        def see(self, context):
            epochs.append(context.epoch)

    trainer = noisy_trainer(tmp_path, validate_every=2)
    trainer.validation_runner.hooks.attach(Seeing())
    trainer.train(5, *loaders())
    assert epochs == [1, 3, 4]


def test_validation_does_not_miss_the_epoch_that_max_steps_ends(tmp_path):
    result = noisy_trainer(tmp_path, validate_every=5, max_steps=8).train(9, *loaders())
    assert (result.epochs, result.stop_reason) == (2, "max_steps")
    assert "l2" in result.metrics["validation"]


def test_a_run_without_validation_follows_no_metric_of_validation(tmp_path):
    trainer = noisy_trainer(tmp_path, monitor="validation/l2", mode="min", patience=2)
    with pytest.raises(ConfigurationError, match="`monitor` must be measured, but is 'validation/l2' and there is no"):
        trainer.train(3, loaders()[0])
    trainer = noisy_trainer(tmp_path)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(trainer.training_runner.optimizer)
    trainer.training_runner.schedule = Schedule(plateau, monitor="validation/l2")
    with pytest.raises(ConfigurationError, match="`monitor` must be measured"):
        trainer.train(3, loaders()[0])


def test_no_epochs_at_all_is_an_error(tmp_path):
    with pytest.raises(ConfigurationError, match="`epochs` must be above 0 or null, but is 0"):
        noisy_trainer(tmp_path).train(0, *loaders())


def test_the_end_names_its_reason(tmp_path, capsys):
    noisy_trainer(tmp_path, max_steps=8).train(9, *loaders())
    assert "Training ends after 2 of 9 epochs: max_steps; epoch 1 took 2 of its 6 steps." in capsys.readouterr().err


def test_a_collective_in_the_state_of_a_hook_is_refused(tmp_path, monkeypatch):
    class Gathering(Counter):
        def state_dict(self):
            return {"counts": get_active_strategy().all_gather_object(self.count)}

    set_active_strategy(FakeStrategy(0, 2))
    try:
        torch.manual_seed(0)
        model = Noisy()
        trainer = make_trainer(make_runner(model), checkpoints=CheckpointStore(tmp_path), hooks=[Gathering()])
        with pytest.raises(CollectiveError, match="_write_checkpoint"):
            trainer.train(1, *loaders())
    finally:
        set_active_strategy(None)


def test_resume_refuses_another_model_seed_or_average_by_name(tmp_path):
    noisy_trainer(tmp_path).train(1, *loaders())
    other = make_trainer(checkpoints=CheckpointStore(tmp_path))
    with pytest.raises(CheckpointError, match=r"lacks \['0.bias'.*has besides \['body.0.bias'"):
        other.resume()
    plain = noisy_trainer(tmp_path)
    plain.training_runner.ema = None
    with pytest.raises(CheckpointError, match="with a moving average"):
        plain.resume()
    seeded = noisy_trainer(tmp_path)
    seeded.seed = 99
    with pytest.raises(CheckpointError, match="seed 3, but this run has 99"):
        seeded.resume()


def test_never_and_a_path_are_obeyed(tmp_path):
    noisy_trainer(tmp_path).train(2, *loaders())
    assert noisy_trainer(tmp_path).resume(tmp_path / "epoch-00000.pt") == 1
    assert noisy_trainer(tmp_path).resume("never") is None


def test_history_is_cut_back_to_the_checkpoint(tmp_path):
    class History:
        def __init__(self):
            self.rewound = []

        def rewind(self, epoch):
            self.rewound.append(epoch)

    noisy_trainer(tmp_path).train(2, *loaders())
    again = noisy_trainer(tmp_path)
    again.tracker = History()
    again.resume()
    fresh = noisy_trainer(tmp_path / "new")
    fresh.tracker = History()
    fresh.resume()
    assert (again.tracker.rewound, fresh.tracker.rewound) == ([2], [0])


def test_ctrl_c_says_which_epoch_will_be_replayed(tmp_path, capsys):
    class Interrupting(Hook):
        @hooks_into("on_post_step")
        def interrupt(self, context):
            if context.epoch == 1:
                raise KeyboardInterrupt

    trainer = noisy_trainer(tmp_path)
    trainer.training_runner.hooks.attach(Interrupting())
    with pytest.raises(KeyboardInterrupt):
        trainer.train(3, *loaders())
    assert "Stopped in epoch 1; the same command replays that epoch" in capsys.readouterr().err


def test_ctrl_c_between_training_and_the_commit_names_the_epoch_that_is_lost(tmp_path, capsys):
    class Interrupting(Hook):
        @hooks_into("on_epoch_finished")
        def interrupt(self, context):
            if context.epoch == 1:
                raise KeyboardInterrupt

    trainer = noisy_trainer(tmp_path)
    trainer.hooks.attach(Interrupting())
    with pytest.raises(KeyboardInterrupt):
        trainer.train(3, *loaders())
    assert "Stopped in epoch 1;" in capsys.readouterr().err
    assert noisy_trainer(tmp_path).resume() == 1


def test_the_summary_shows_values_changes_and_the_baseline(tmp_path, capsys):
    trainer = make_trainer(hooks=[LossLogger(show_replicas=True)])
    trainer.validation_runner.baseline = lambda batch: batch["hr"] + 1
    trainer.train(2, *loaders())
    seen = capsys.readouterr()
    assert "epoch 1/2  step 6" in seen.out
    assert "epoch 2/2  step 12" in seen.out
    rows = [line.split() for line in seen.out.splitlines() if line.split()[:1] == ["validation/l2"]]
    assert [row[-1] for row in rows] == ["1", "1"], "the baseline is off by one everywhere"
    assert seen.out.startswith("baseline l2 1\n"), "what is to be surpassed is known before the first epoch"
    assert [len(row) for row in rows] == [3, 4], "the second epoch is compared with the first"
    assert seen.out.count("validation/l2") == 2
    assert "num_samples" not in seen.out
    assert seen.err.count("[r0] epoch 1 replica ") == 1


def test_the_record_beside_a_checkpoint_tells_its_metrics(tmp_path):
    noisy_trainer(tmp_path, monitor="validation/l2", mode="min").train(1, *loaders())
    record = json.loads((tmp_path / "epoch-00000.json").read_text())
    assert record["epoch"] == 0
    assert record["finished"] is True
    assert record["metrics"]["training/num_samples"] == 22.0
