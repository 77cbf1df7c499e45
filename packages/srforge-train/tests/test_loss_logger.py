import re

import pytest
from toys import Lines, loader_of, make_trainer

from srforge.distributed import ConfigurationError, MetricSum, set_active_strategy
from srforge.distributed.testing import FakeStrategy
from srforge.training import (
    CheckpointStore,
    ImageLogger,
    LossLogger,
    MetricsLogger,
    RunContext,
    Term,
    TrainerOptions,
)
from srforge.training.loss_logger import flatten, format_duration


class Memory:
    def __init__(self):
        self.metrics, self.summary, self.images, self.config = {}, {}, [], None

    def log_config(self, config):
        self.config = config

    def log_metrics(self, metrics, *, epoch):
        self.metrics[epoch] = dict(metrics)

    def set_summary(self, summary):
        self.summary.update(summary)

    def log_image(self, name, image, *, epoch):
        self.images.append((name, image, epoch))

    def rewind(self, epoch):
        pass


def context(epoch, value, *, is_best=False):
    return RunContext(
        epoch=epoch,
        epochs=4,
        global_step=epoch + 1,
        model=None,
        metrics={"training": {"loss": value, "num_samples": 8.0}},
        is_best=is_best,
        learning_rates=(0.1,),
        seconds=4.0,
        training_seconds=2.0,
        num_samples=8.0,
    )


def columns(out, name="training/loss"):
    return [line.split()[1:] for line in out.splitlines() if line.split()[:1] == [name]]


def test_each_epoch_is_compared_with_the_last_and_with_the_best(capsys):
    logger = LossLogger()
    for epoch, (value, is_best) in enumerate([(4.0, True), (2.0, True), (3.0, False), (5.0, False)]):
        logger.show_summary(context(epoch, value, is_best=is_best))
    out = capsys.readouterr().out
    assert columns(out) == [["4"], ["2", "-2", "-2"], ["3", "+1", "+1"], ["5", "+2", "+3"]]
    assert "epoch 1/4  step 1  4.0 s, 4 samples/s" in out
    assert out.count("best so far") == 2


def test_comparisons_survive_a_resume(capsys):
    logger, again = LossLogger(), LossLogger()
    logger.show_summary(context(0, 4.0, is_best=True))
    again.load_state_dict(logger.state_dict())
    capsys.readouterr()
    again.show_summary(context(1, 3.0))
    assert columns(capsys.readouterr().out) == [["3", "-1", "-1"]]


def test_what_the_numbers_hide_is_noted(capsys):
    strategy = FakeStrategy(0, 2, peers=[{"training": {"loss": MetricSum(float("nan"), 1)}}])
    set_active_strategy(strategy)
    strategy.reduce_metrics({"training": {"loss": MetricSum(1.0, 1), "extra": MetricSum(1.0, 1)}})
    LossLogger().show_summary(context(0, 4.0))
    out = capsys.readouterr().out
    assert re.search(r"note: .*extra.* was not reported on ranks \[1\]", out)
    assert re.search(r"note: .*loss.* was NaN or infinite on ranks \[1\]", out)


def test_only_rank_0_prints_the_summary(capsys):
    set_active_strategy(FakeStrategy(1, 2))
    LossLogger().show_summary(context(0, 4.0))
    assert capsys.readouterr().out == ""


def test_reduced_metrics_reach_the_tracker_by_epoch():
    memory = Memory()
    trainer = make_trainer(hooks=[MetricsLogger(memory, {"epochs": 3})], tracker=memory)
    trainer.validation_runner.hooks.attach(
        ImageLogger(memory, lambda batch, prediction: prediction.shape, "lines", num_images=2, every=2)
    )
    result = trainer.train(3, loader_of(Lines(8)), loader_of(Lines(6), training=False, batch_size=2))
    assert memory.config == {"epochs": 3}
    assert list(memory.metrics) == [0, 1, 2]
    assert memory.metrics[2]["validation/l2"] == result.metrics["validation"]["l2"]
    assert memory.metrics[0]["learning_rate/0"] == 0.05
    assert memory.summary == {"stop_reason": "epochs"}
    assert memory.images == [(f"lines-{i}", (2, 1), epoch) for epoch in (0, 2) for i in (0, 1)]


@pytest.mark.parametrize(("every", "epochs"), [(1, [1, 3, 5, 7]), (2, [1, 3, 5, 7]), (3, [1, 5])])
def test_pictures_come_in_step_with_a_validation_that_is_rarer(tmp_path, every, epochs):
    memory = Memory()

    def trained(num_epochs):
        set_active_strategy(None)
        options = TrainerOptions(validate_every=2)
        trainer = make_trainer(options=options, checkpoints=CheckpointStore(tmp_path))
        trainer.validation_runner.hooks.attach(ImageLogger(memory, lambda batch, prediction: None, "x", every=every))
        trainer.resume()
        trainer.train(num_epochs, loader_of(Lines(8)), loader_of(Lines(6), training=False))

    trained(4)
    trained(8)
    assert [epoch for _, _, epoch in memory.images] == epochs


def test_a_run_that_fails_its_rehearsal_logs_nothing():
    memory = Memory()
    trainer = make_trainer(hooks=[MetricsLogger(memory, {"epochs": 3})], tracker=memory)
    trainer.training_runner.objective.terms["dead"] = Term(function=lambda p, t: p.detach().mean())
    with pytest.raises(ConfigurationError, match="no gradient flows"):
        trainer.train(1, loader_of(Lines(8)))
    assert memory.config is None


def test_nested_metrics_become_flat_names():
    assert flatten({"a": {"b": {"red": 1}, "c": 2.5}, "d": 3}) == {"a/b/red": 1.0, "a/c": 2.5, "d": 3.0}


@pytest.mark.parametrize(
    ("seconds", "text"), [(4.4, "4 s"), (99, "99 s"), (100, "2 min"), (5900, "98 min"), (7500, "2 h 05 min")]
)
def test_durations_are_written_for_people(seconds, text):
    assert format_duration(seconds) == text
