import pytest

from srforge.data.environment_variables import (
    hang_period,
    keep_opencv_threads,
    launched_rank,
    ranks_on_this_machine,
    switch_on_flight_recorder,
)
from srforge.distributed.errors import ConfigurationError


@pytest.mark.parametrize(
    ("value", "period"),
    [(None, None), ("", None), ("0", None), ("off", None), ("1", 30.0), ("true", 30.0), ("2", 2.0), ("0.5", 0.5)],
)
def test_debug_hang_is_a_switch_or_a_period(monkeypatch, value, period):
    monkeypatch.delenv("DEBUG_HANG", raising=False)
    if value is not None:
        monkeypatch.setenv("DEBUG_HANG", value)
    assert hang_period() == period


@pytest.mark.parametrize("value", ["often", "-1", "nan", "inf"])
def test_debug_hang_refuses_what_is_neither(monkeypatch, value):
    monkeypatch.setenv("DEBUG_HANG", value)
    with pytest.raises(
        ConfigurationError, match=f"`DEBUG_HANG` must be 1, or a period in seconds > 0, but is '{value}'"
    ):
        hang_period()


def test_opencv_threads_are_kept_only_on_request(monkeypatch):
    monkeypatch.delenv("SRFORGE_CV2_THREADS", raising=False)
    assert not keep_opencv_threads()
    monkeypatch.setenv("SRFORGE_CV2_THREADS", "1")
    assert keep_opencv_threads()
    monkeypatch.setenv("SRFORGE_CV2_THREADS", "4")
    with pytest.raises(ConfigurationError, match="`SRFORGE_CV2_THREADS` must be 0 or 1, but is '4'"):
        keep_opencv_threads()


def test_launcher_variables_default_to_a_process_alone(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert (launched_rank(), ranks_on_this_machine()) == (0, 1)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert (launched_rank(), ranks_on_this_machine()) == (3, 4)


def test_flight_recorder_keeps_what_the_user_set(monkeypatch, tmp_path):
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "7")
    switch_on_flight_recorder(tmp_path)
    import os

    assert os.environ["TORCH_NCCL_TRACE_BUFFER_SIZE"] == "7"
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    assert os.environ["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] == str(tmp_path / "nccl_trace_rank_")
