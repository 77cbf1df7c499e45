"""The local tracker keeps everything once, on rank 0."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from srforge.distributed.active import set_active_strategy
from srforge.distributed.errors import ConfigurationError
from srforge.distributed.testing import FakeStrategy
from srforge.tracking import LocalTracker, NullTracker, Tracker, Trackers, TrackingError


@pytest.fixture
def as_rank():
    yield lambda rank, world_size=2: set_active_strategy(FakeStrategy(rank, world_size))
    set_active_strategy(None)


def report(tracker, folder):
    tracker.rewind(3)
    tracker.log_config({"model": {"scale": 2}, "api_key": "x"})
    tracker.log_metrics({"training": {"loss": 0.5}}, epoch=3)
    tracker.log_image("validation/panel", torch.ones(3, 4, 5), epoch=3)
    tracker.set_summary({"best": 1.5})
    tracker.set_summary({"last": 1.0})
    (folder / "weights.bin").write_bytes(b"w")
    tracker.save_file(folder / "weights.bin")
    tracker.finish()
    return tracker.run_id, tracker.run_name, tracker.is_resumed


def test_everything_is_kept(tmp_path):
    run = tmp_path / "run"
    assert report(LocalTracker(run), tmp_path) == ("run", "run", True)
    assert json.loads((run / "metrics.jsonl").read_text()) == {"epoch": 3, "training/loss": 0.5}
    assert json.loads((run / "config.json").read_text()) == {"model": {"scale": 2}, "api_key": "[redacted]"}
    assert json.loads((run / "summary.json").read_text()) == {"best": 1.5, "last": 1.0, "exit_code": 0}
    assert (run / "files" / "weights.bin").read_bytes() == b"w"
    with Image.open(run / "images" / "validation" / "panel" / "epoch-00003.png") as image:
        assert np.array_equal(np.asarray(image), np.full((4, 5, 3), 255, np.uint8))


def test_other_ranks_answer_the_same_and_write_nothing(tmp_path, as_rank):
    as_rank(1)
    assert report(LocalTracker(tmp_path / "run"), tmp_path) == ("run", "run", True)
    assert not (tmp_path / "run").exists()


def test_rewind_cuts_metrics_and_images_and_nothing_else(tmp_path):
    tracker = LocalTracker(tmp_path)
    for epoch in range(4):
        tracker.log_metrics({"a": 1}, epoch=epoch)
        tracker.log_image("panel", np.zeros((2, 2, 3), np.uint8), epoch=epoch)
    (tmp_path / "images" / "epoch-notes.png").write_text("mine")
    again = LocalTracker(tmp_path)
    again.rewind(2)
    assert [row["epoch"] for row in again.history.rows()] == [0, 1]
    assert sorted(path.name for path in (tmp_path / "images").rglob("*.png")) == [
        "epoch-00000.png",
        "epoch-00001.png",
        "epoch-notes.png",
    ]
    fresh = LocalTracker(tmp_path)
    fresh.rewind(0)
    assert not fresh.is_resumed
    assert fresh.history.rows() == []


def test_a_file_of_the_run_folder_is_not_copied_again(tmp_path):
    (tmp_path / "inside.txt").write_text("x")
    LocalTracker(tmp_path).save_file(tmp_path / "inside.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["inside.txt"]


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(TrackingError, match=r"absent\.bin could not be copied"):
        LocalTracker(tmp_path).save_file(tmp_path / "absent.bin")


@pytest.mark.parametrize("name", ["../out", "/etc/x", ".hidden", "a/.b", "", "a//b", "a\\b"])
def test_an_image_name_stays_in_the_folder(tmp_path, name):
    with pytest.raises(ConfigurationError, match="`name` must be words separated by /"):
        LocalTracker(tmp_path).log_image(name, np.zeros((2, 2, 3), np.uint8), epoch=0)


def test_finish_keeps_the_first_exit_code(tmp_path):
    tracker = LocalTracker(tmp_path)
    tracker.finish(1)
    tracker.finish(0)
    assert json.loads((tmp_path / "summary.json").read_text()) == {"exit_code": 1}


def test_the_trackers_fulfil_the_protocol(tmp_path):
    for tracker in (NullTracker(), LocalTracker(tmp_path), Trackers(NullTracker())):
        assert isinstance(tracker, Tracker)


def test_the_null_tracker_takes_every_call(tmp_path):
    assert report(NullTracker(), tmp_path) == ("untracked", "untracked", True)
    assert [path.name for path in tmp_path.iterdir()] == ["weights.bin"]


def test_several_trackers_all_hear_everything(tmp_path):
    both = Trackers(LocalTracker(tmp_path / "a", name="first"), LocalTracker(tmp_path / "b"))
    assert report(both, tmp_path) == ("a", "first", True)
    kept = [sorted(str(path.relative_to(tmp_path / side)) for path in (tmp_path / side).rglob("*")) for side in "ab"]
    assert kept[0] == kept[1]
    assert len(kept[0]) > 5


def test_one_tracker_that_fails_to_finish_keeps_no_other_from_it(tmp_path):
    class Broken(NullTracker):
        def finish(self, exit_code=0):
            raise OSError("gone")

    local = LocalTracker(tmp_path)
    with pytest.warns(UserWarning, match="Broken failed to finish"):
        Trackers(Broken(), local).finish()
    assert (tmp_path / "summary.json").exists()


def test_no_tracker_at_all_is_refused():
    with pytest.raises(ConfigurationError, match="`trackers` must be at least one"):
        Trackers()
