"""Which branch a launch continues, what it says about changes, and what it refuses: by one process."""

import re

import pytest
import torch
from toys import Lines, loader_of, make_model, make_runner, make_trainer

from srforge.distributed import plain_state_dict
from srforge.training import (
    CheckpointError,
    CheckpointStore,
    ExponentialMovingAverage,
    Hook,
    RunnerOptions,
    Schedule,
    TrainerOptions,
    checkpoint_files,
    export_weights,
    hooks_into,
    warm_start_model,
)
from srforge.training.resuming import explain_changes, launch_facts
from srforge.training.run_state import collect_state, restore_state
from srforge.training.stopping import Standing

FACTS = {
    "world_size": 4,
    "device": "cpu",
    "torch": "2.6.0",
    "batch_size": 2,
    "accumulate": 1,
    "global_batch_size": 8,
    "num_samples": 29,
}


class History:
    def __init__(self):
        self.epochs = []

    def rewind(self, epoch):
        self.epochs = [known for known in self.epochs if known < epoch]


class Logging(Hook):
    def __init__(self, history):
        self.history = history

    @hooks_into("on_epoch_finished")
    def log(self, context):
        assert context.epoch not in self.history.epochs
        self.history.epochs.append(context.epoch)


def trainer_of(folder, history=None, **arguments):
    history = History() if history is None else history
    store = CheckpointStore(folder, keep_last=9)
    return make_trainer(checkpoints=store, tracker=history, hooks=[Logging(history)], **arguments)


def train(folder, epochs, source="auto", history=None):
    trainer = trainer_of(folder, history)
    trainer.resume(source)
    return trainer.train(epochs, loader_of(Lines(22)), loader_of(Lines(6), training=False))


def epochs_in(folder):
    return [record.epoch for record in CheckpointStore(folder).records()]


def final_weights(folder):
    return CheckpointStore(folder).load(CheckpointStore(folder).newest())["model"]


def test_an_earlier_checkpoint_ends_the_branch_after_it_at_once(tmp_path, capsys):
    history = History()
    train(tmp_path, 4, history=history)
    expected = final_weights(tmp_path)
    trainer = trainer_of(tmp_path, history)
    assert trainer.resume(tmp_path / "epoch-00001.pt") == 2
    assert epochs_in(tmp_path) == history.epochs == [0, 1], "a kill here must not bring the left branch back"
    assert "Removed epoch-00003.pt, epoch-00002.pt" in capsys.readouterr().err
    train(tmp_path, 4, history=history)
    assert epochs_in(tmp_path) == history.epochs == [0, 1, 2, 3]
    assert all(torch.equal(value, expected[name]) for name, value in final_weights(tmp_path).items())


def test_a_checkpoint_of_another_folder_becomes_the_newest_of_this_one(tmp_path):
    train(tmp_path / "other", 2)
    history = History()
    train(tmp_path / "own", 4, history=history)
    trainer = trainer_of(tmp_path / "own", history)
    assert trainer.resume(tmp_path / "other" / "epoch-00001.pt") == 2
    assert epochs_in(tmp_path / "own") == [1]
    assert epochs_in(tmp_path / "other") == [0, 1], "the source is left as it is"
    train(tmp_path / "own", 4, history=history)
    assert epochs_in(tmp_path / "own") == [1, 2, 3]


def test_never_starts_over_and_leaves_nothing_to_go_back_to(tmp_path):
    history = History()
    train(tmp_path, 3, history=history)
    assert trainer_of(tmp_path, history).resume("never") is None
    assert epochs_in(tmp_path) == history.epochs == []


def test_a_checkpoint_that_does_not_fit_removes_nothing(tmp_path):
    train(tmp_path, 3)
    trainer = trainer_of(tmp_path)
    trainer.seed += 1
    with pytest.raises(CheckpointError, match="written with seed"):
        trainer.resume(tmp_path / "epoch-00000.pt")
    assert epochs_in(tmp_path) == [0, 1, 2]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ""),
        ({"world_size": 2, "batch_size": 4}, "world_size 4 -> 2, batch_size 2 -> 4: every step has the same samples"),
        ({"world_size": 2, "global_batch_size": 4}, "a step takes 4 samples instead of 8.*same order.*other steps"),
        ({"num_samples": 30}, "30 samples instead of 29: their order is another"),
        ({"torch": "2.7.0"}, r"torch 2.6.0 -> 2.7.0: kernels may round differently"),
    ],
)
def test_what_stays_exact_is_said_by_name(changes, expected):
    said = explain_changes(FACTS, {**FACTS, **changes})
    assert re.search(expected, said)
    assert bool(said) == bool(expected)


def test_workers_are_no_change_and_another_batch_is_said_at_the_next_launch(tmp_path, capsys):
    assert launch_facts(loader_of(Lines(22)))["global_batch_size"] == 4
    train(tmp_path, 1)
    trainer = trainer_of(tmp_path)
    trainer.resume()
    trainer.train(2, loader_of(Lines(22), batch_size=2, accumulate=2))
    said = capsys.readouterr().err
    assert "Continuing after epoch 0, but batch_size 4 -> 2, accumulate 1 -> 2: every step has the same samples" in said


def states_of(runner):
    return collect_state(runner, {}, Standing(), {"launch": {}})


def test_an_optimizer_of_another_class_is_refused_by_name():
    state = states_of(make_runner(optimizer=lambda p: torch.optim.Adam(p, lr=0.1)))
    with pytest.raises(CheckpointError, match=r"must hold states of .*sgd\.SGD.*but holds those of .*adam\.Adam"):
        restore_state(state, make_runner(), {}, "epoch-00000.pt")


def test_a_scheduler_of_another_class_is_refused_by_name():
    runner = make_runner()
    runner.schedule = Schedule(torch.optim.lr_scheduler.StepLR(runner.optimizer, 2))
    with pytest.raises(CheckpointError, match=r"'schedule of model': None.*but holds.*StepLR"):
        restore_state(states_of(runner), make_runner(), {}, "epoch-00000.pt")


def test_parameters_in_another_order_are_refused_by_name():
    def reversed_order(parameters):
        return torch.optim.SGD(list(parameters)[::-1], lr=0.05)

    state = states_of(make_runner(optimizer=reversed_order))
    with pytest.raises(CheckpointError, match=r"group 0 of model has \['2.bias', .*instead of \['0.weight'"):
        restore_state(state, make_runner(), {}, "epoch-00000.pt")


def test_another_dtype_of_the_model_is_refused_by_name():
    state = states_of(make_runner(make_model(dtype=torch.float32)))
    with pytest.raises(CheckpointError, match=r"other shapes or dtypes for \['0.bias'"):
        restore_state(state, make_runner(), {}, "epoch-00000.pt")


def test_the_first_format_is_migrated_and_an_unknown_one_refused_by_name():
    runner = make_runner(optimizer=lambda p: torch.optim.Adam(p, lr=0.1))
    state = states_of(runner)
    first = {name: value for name, value in state.items() if name not in ("classes", "launch")}
    first |= {"format": 1, "world_size": 1, "parameter_groups": [4], "schedule": {}, "scaler": {}}
    first["optimizer"] = first.pop("optimizers")["model"]
    other = make_runner(make_model(seed=1), optimizer=lambda p: torch.optim.Adam(p, lr=0.1))
    restore_state(first, other, {}, "epoch-00000.pt")
    for name, value in plain_state_dict(runner.model).items():
        assert torch.equal(value, plain_state_dict(other.model)[name])
    with pytest.raises(CheckpointError, match=r"group 0 of model has 3 instead of 4"):
        restore_state({**first, "parameter_groups": [3]}, other, {}, "epoch-00000.pt")
    with pytest.raises(CheckpointError, match="checkpoint format of 1 to 2, but has 99"):
        restore_state({**state, "format": 99}, other, {}, "epoch-00000.pt")


def test_the_limits_of_one_launch_do_not_end_the_run(tmp_path):
    stop = tmp_path / "stop"
    stop.touch()
    first = trainer_of(tmp_path / "run", options=TrainerOptions(stop_file=stop))
    assert first.train(3, loader_of(Lines(8))).stop_reason == "stop_file"
    assert not stop.exists(), "it was obeyed, and would end the next launch too"
    again = trainer_of(tmp_path / "run", options=TrainerOptions(stop_file=stop))
    again.resume()
    assert again.train(3, loader_of(Lines(8))).epochs == 3
    hurried = trainer_of(tmp_path / "hurried", options=TrainerOptions(max_minutes=1e-9))
    assert hurried.train(3, loader_of(Lines(8))).stop_reason == "max_minutes"
    later = trainer_of(tmp_path / "hurried", options=TrainerOptions(max_minutes=1e-9))
    assert later.resume() == 1
    assert later.train(3, loader_of(Lines(8))).epochs == 2


def test_a_run_killed_after_its_last_save_still_reports_its_end(tmp_path):
    class Ending(Hook):
        seen = 0

        @hooks_into("on_training_finished")
        def end(self, context):
            self.seen += 1
            assert (context.epoch, context.global_step) == (1, 12)

    train(tmp_path, 2)
    again = make_trainer(checkpoints=CheckpointStore(tmp_path))
    ending = Ending()
    again.hooks.attach(ending)
    again.resume()
    again.train(2, loader_of(Lines(22)))
    assert ending.seen == 1


def test_the_average_and_its_counter_come_back(tmp_path):
    def make():
        model = make_model()
        ema = ExponentialMovingAverage(model, 0.9)
        runner = make_runner(model, ema=ema, options=RunnerOptions())
        return make_trainer(runner, checkpoints=CheckpointStore(tmp_path)), ema

    whole, expected = make()
    whole.train(4, loader_of(Lines(22)))
    for path in tmp_path.iterdir():
        path.unlink()
    first, _ = make()
    first.train(2, loader_of(Lines(22)))
    again, ema = make()
    again.resume()
    assert ema.num_updates == 12
    again.train(4, loader_of(Lines(22)))
    assert ema.num_updates == expected.num_updates == 24
    for name, value in ema.model.state_dict().items():
        assert torch.equal(value, expected.model.state_dict()[name])


def test_a_warm_start_takes_weights_and_reports(tmp_path):
    source, model = make_model(seed=1), make_runner(make_model(seed=2)).model
    export_weights(source.state_dict(), tmp_path / "weights.safetensors")
    report = warm_start_model(model, tmp_path / "weights.safetensors")
    assert str(report).startswith("4 matched, 0 missing")
    assert all(torch.equal(value, source.state_dict()[name]) for name, value in plain_state_dict(model).items())
    with pytest.raises(CheckpointError, match="cannot be read"):
        warm_start_model(model, tmp_path / "absent.pth")


def test_whoever_lists_the_folder_during_a_save_meets_whole_files_only(tmp_path, monkeypatch):
    """An uploader walks the folder at any time: what it can see it can open, read and find again."""
    seen = []
    write = checkpoint_files.DigestingSink.write

    def looking(self, chunk):
        written = write(self, chunk)
        visible = [path for path in tmp_path.iterdir() if not path.name.startswith(".")]
        for path in visible:
            if path.suffix == ".json":
                CheckpointStore(tmp_path).load(path.with_suffix(".pt"))
        seen.append({path.name for path in visible})
        return written

    monkeypatch.setattr(checkpoint_files.DigestingSink, "write", looking)
    train(tmp_path, 2)
    assert {"epoch-00000.pt", "epoch-00000.json"} in seen
    assert not any("epoch-00001.pt" in names for names in seen), "it appears when it is whole"


def test_a_save_that_the_disk_refuses_ends_the_run(tmp_path):
    folder = tmp_path / "file"
    folder.write_text("in the way of the folder")
    with pytest.raises(CheckpointError, match="could not be written"):
        train(folder / "checkpoints", 2)


def test_resuming_reads_no_sample_of_the_past(tmp_path):
    class Counting(Lines):
        reads = 0

        def __getitem__(self, key):
            type(self).reads += 1
            return super().__getitem__(key)

    train(tmp_path, 3)
    trainer = trainer_of(tmp_path)
    trainer.resume()
    trainer.train(4, loader_of(Counting(22)))
    assert Counting.reads == 22 + 4, "one epoch, and the batch of the rehearsal"


def test_a_launch_that_dies_inside_an_epoch_replays_that_epoch_once(tmp_path):
    """The rule: whole epochs only. What the cut epoch had begun leaves no trace in history or weights."""

    class Dying(Hook):
        @hooks_into("on_pre_step")
        def die(self, context):
            if (context.epoch, context.index) == (1, 2):
                raise KeyboardInterrupt

    whole, killed = History(), History()
    train(tmp_path / "whole", 3, history=whole)
    trainer = trainer_of(tmp_path / "killed", killed)
    trainer.training_runner.hooks.attach(Dying())
    with pytest.raises(KeyboardInterrupt):
        trainer.train(3, loader_of(Lines(22)), loader_of(Lines(6), training=False))
    train(tmp_path / "killed", 3, history=killed)
    assert killed.epochs == whole.epochs == [0, 1, 2]
    expected = final_weights(tmp_path / "whole")
    assert all(torch.equal(value, expected[name]) for name, value in final_weights(tmp_path / "killed").items())


class Scaled(torch.nn.Linear):
    """A layer with a state that is no tensor, as quantised and accelerated layers have it."""

    scale = 1.0

    def get_extra_state(self):
        return {"scale": self.scale}

    def set_extra_state(self, state):
        self.scale = state["scale"]


def test_extra_state_of_a_module_comes_back_and_stays_out_of_a_warm_start(tmp_path):
    def scaled_trainer(scale):
        torch.manual_seed(1)
        model = Scaled(3, 1).double()
        model.scale = scale
        runner = make_runner(model)
        runner.ema = ExponentialMovingAverage(runner.model, 0.9)
        return make_trainer(runner, validate=False, checkpoints=CheckpointStore(tmp_path))

    scaled_trainer(2.5).train(1, loader_of(Lines(8)))
    again = scaled_trainer(1.0)
    assert again.resume() == 1
    assert again.training_runner.model.scale == 2.5
    assert again.train(2, loader_of(Lines(8))).global_step == 4
    other = Scaled(3, 1).double()
    warm_start_model(other, tmp_path / "epoch-00000.pt", nest="model", strict=False)
    state = CheckpointStore(tmp_path).load(tmp_path / "epoch-00000.pt")
    assert torch.equal(other.weight, state["model"]["weight"])
    assert other.scale == 1.0
