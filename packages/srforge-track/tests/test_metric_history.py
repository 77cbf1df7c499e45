"""metrics.jsonl holds every epoch once, whatever happened."""

import json

import pytest

from srforge.distributed.errors import ConfigurationError
from srforge.tracking.errors import TrackingError
from srforge.tracking.metric_history import MetricHistory


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_epoch_is_one_line(tmp_path):
    history = MetricHistory(tmp_path / "run" / "metrics.jsonl")
    history.write(0, {"loss": 0.5})
    history.write(2, {"loss": float("nan")})
    assert lines(history.path) == [{"epoch": 0, "loss": 0.5}, {"epoch": 2, "loss": "nan"}]


def test_two_reports_of_an_epoch_share_its_line_and_the_newest_value_stands(tmp_path):
    history = MetricHistory(tmp_path / "metrics.jsonl")
    history.write(0, {"a": 1.0})
    history.write(1, {"a": 2.0, "b": 3.0})
    history.write(1, {"b": 4.0, "c": 5.0})
    history.write(2, {"a": 6.0})
    assert lines(history.path) == [
        {"epoch": 0, "a": 1.0},
        {"epoch": 1, "a": 2.0, "b": 4.0, "c": 5.0},
        {"epoch": 2, "a": 6.0},
    ]


def test_log_0_to_9_resume_at_6_log_6_to_13_has_each_epoch_once_with_the_newest_value(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = MetricHistory(path)
    for epoch in range(10):
        first.write(epoch, {"value": 1.0})
    second = MetricHistory(path)
    second.rewind(6)
    for epoch in range(6, 14):
        second.write(epoch, {"value": 2.0})
    assert [(row["epoch"], row["value"]) for row in lines(path)] == [(e, 1.0 if e < 6 else 2.0) for e in range(14)]


def test_an_epoch_that_stands_already_is_refused_with_the_cure(tmp_path):
    path = tmp_path / "metrics.jsonl"
    MetricHistory(path).write(4, {"a": 1.0})
    before = path.read_bytes()
    with pytest.raises(ConfigurationError, match=r"`epoch` must be above 4.*but is 4. Call rewind\(4\)"):
        MetricHistory(path).write(4, {"a": 2.0})
    assert path.read_bytes() == before


@pytest.mark.parametrize("tear", [1, 5, 21])
def test_a_line_that_a_kill_tore_off_is_dropped_by_the_next_launch(tmp_path, tear):
    path = tmp_path / "metrics.jsonl"
    first = MetricHistory(path)
    for epoch in range(3):
        first.write(epoch, {"loss": 0.5})
    path.write_bytes(path.read_bytes()[:-tear])
    assert [row["epoch"] for row in MetricHistory(path).rows()] == [0, 1]
    MetricHistory(path).write(2, {"loss": 0.25})
    assert lines(path) == [{"epoch": 0, "loss": 0.5}, {"epoch": 1, "loss": 0.5}, {"epoch": 2, "loss": 0.25}]


def test_a_rewound_file_equals_one_that_never_went_further_byte_for_byte(tmp_path):
    left, right = MetricHistory(tmp_path / "left.jsonl"), MetricHistory(tmp_path / "right.jsonl")
    for epoch in range(3):
        left.write(epoch, {"loss": 1 / (epoch + 3), "bad": float("-inf")})
        if epoch < 2:
            right.write(epoch, {"loss": 1 / (epoch + 3), "bad": float("-inf")})
    MetricHistory(left.path).rewind(2)
    assert left.path.read_bytes() == right.path.read_bytes()


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"epoch": 0}\n{"epo\n{"epoch": 2}\n')
    with pytest.raises(TrackingError, match=r"metrics\.jsonl, line 2, must be"):
        MetricHistory(path).rows()


def test_a_disk_error_is_loud_and_the_lines_before_are_whole(tmp_path, monkeypatch):
    history = MetricHistory(tmp_path / "metrics.jsonl")
    history.write(0, {"loss": 1.0})
    before = history.path.read_bytes()
    monkeypatch.setattr("os.fsync", lambda descriptor: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(TrackingError, match=r"metrics\.jsonl could not be written: .*No space left.*are whole"):
        history.write(1, {"loss": 1.0})
    assert history.path.read_bytes() == before


def test_a_rewind_of_nothing_is_nothing(tmp_path):
    MetricHistory(tmp_path / "metrics.jsonl").rewind(0)
    assert list(tmp_path.iterdir()) == []
