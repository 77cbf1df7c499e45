"""Decisions of the entry point; that the processes really end is proven in tests-integration."""

import inspect
import io
import json
import re
import signal

import pytest
from torch._C._distributed_c10d import HashStore

from srforge.distributed import breadcrumbs, entrypoint, termination
from srforge.distributed.entrypoint import is_aftermath, rank_entrypoint
from srforge.distributed.errors import CollectiveError, ConfigurationError
from srforge.distributed.termination import on_exit

LOST_PEER = "[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:65260."


class Left(BaseException):
    """Stands for the end of the process."""


@pytest.fixture
def left(monkeypatch):
    """What ``leave`` was called with; it raises instead of ending the process."""
    calls = []

    def leave(exit_code, drain_seconds, *, last_words=""):
        calls.append((exit_code, drain_seconds, last_words))
        raise Left

    monkeypatch.setattr(entrypoint, "leave", leave)
    monkeypatch.setattr(entrypoint, "AFTERMATH_SECONDS", 0.0)
    return calls


@pytest.fixture
def rank_2_of_3(monkeypatch):
    for name, value in (("RANK", 2), ("LOCAL_RANK", 2), ("WORLD_SIZE", 3), ("MASTER_PORT", 29500)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")


@pytest.fixture(autouse=True)
def record(monkeypatch, tmp_path):
    """The file in which torchrun looks for the root cause; no rank but those of the fixtures."""
    for name in ("RANK", "WORLD_SIZE", "SRFORGE_FULL_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    yield tmp_path / "error.json"
    termination._finishers.clear()


def raising(error):
    @rank_entrypoint
    def main():
        raise error

    return main


def test_result_and_signature_pass_through():
    @rank_entrypoint
    def main(first, *, second=2):
        """Train."""
        return first + second

    assert main(1) == 3
    assert (main.__name__, main.__doc__) == ("main", "Train.")
    assert str(inspect.signature(main)) == "(first, *, second=2)"


@pytest.mark.usefixtures("rank_2_of_3")
def test_exception_of_a_rank_is_tagged_recorded_and_ends_the_process(left, record, capfd):
    with pytest.raises(Left):
        raising(ValueError("boom"))()
    assert left == [(1, entrypoint.DRAIN_SECONDS, "[rank 2] ValueError: boom")]
    lines = capfd.readouterr().err.splitlines()
    assert all(line.startswith("[rank 2] ") for line in lines)
    assert lines[0] == "[rank 2] Traceback (most recent call last):"
    assert lines[-1] == "[rank 2] ValueError: boom"
    assert not any("entrypoint.py" in line and "test_" not in line for line in lines)
    message = json.loads(record.read_text())["message"]
    assert message["message"] == "ValueError: boom"
    assert message["extraInfo"]["py_callstack"].endswith("ValueError: boom")


@pytest.mark.usefixtures("rank_2_of_3")
def test_record_is_what_torchrun_reads(left, record):
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    with pytest.raises(Left):
        raising(ValueError("boom"))()
    failure = ProcessFailure(local_rank=2, pid=1, exitcode=1, error_file=str(record))
    assert "ValueError: boom" in ChildFailedError("train.py", {2: failure}).format_msg()


@pytest.mark.usefixtures("rank_2_of_3")
def test_error_on_purpose_is_one_line(left, record, capfd, monkeypatch):
    error = ConfigurationError("`x` must be y, but is z. Do this.")
    with pytest.raises(Left):
        raising(error)()
    assert capfd.readouterr().err == "[rank 2] error: `x` must be y, but is z. Do this.\n"
    assert "error: `x` must be y" in json.loads(record.read_text())["message"]["extraInfo"]["py_callstack"]
    monkeypatch.setenv("SRFORGE_FULL_TRACEBACK", "1")
    with pytest.raises(Left):
        raising(error)()
    assert "[rank 2] Traceback" in capfd.readouterr().err


@pytest.mark.parametrize(("code", "exit_code"), [(0, 1), (None, 1), (3, 3), ("no good", 1)])
@pytest.mark.usefixtures("rank_2_of_3")
def test_exit_before_the_end_is_a_failure_of_that_rank(left, record, capfd, code, exit_code):
    with pytest.raises(Left):
        raising(SystemExit(code))()
    assert left[0][0] == exit_code
    assert f"[rank 2] error: exited with {code!r} before the end of main" in capfd.readouterr().err
    assert "exited with" in record.read_text()


@pytest.mark.usefixtures("rank_2_of_3")
def test_interrupt_leaves_at_once_with_several_ranks(left, capfd):
    with pytest.raises(Left):
        raising(KeyboardInterrupt())()
    assert left == [(130, 0.0, "")]


@pytest.mark.usefixtures("rank_2_of_3", "left")
def test_lost_peer_is_told_apart_from_the_cause(capfd):
    with pytest.raises(Left):
        raising(RuntimeError(LOST_PEER))()
    assert "[rank 2] Another rank ended first: its own log tells the cause." in capfd.readouterr().err


@pytest.mark.usefixtures("rank_2_of_3", "left")
def test_connection_that_torchrun_closed_by_its_death_is_no_other_rank_s_end(capfd, monkeypatch):
    monkeypatch.setattr(entrypoint, "is_orphan", lambda: True)
    with pytest.raises(Left):
        raising(RuntimeError(LOST_PEER))()
    assert "ended first" not in capfd.readouterr().err


@pytest.fixture
def fleet_of_3(monkeypatch):
    """Three ranks that report to one store, of which this process is the last; quick."""
    monkeypatch.setattr(breadcrumbs, "_PERIOD_SECONDS", 0.3)
    monkeypatch.setattr(breadcrumbs, "_here", ("start", None, None))
    store = HashStore()
    for rank in range(3):
        breadcrumbs.start_reporting(store, rank, 3)
    yield store
    breadcrumbs.stop_reporting()


@pytest.mark.usefixtures("rank_2_of_3", "left")
def test_rank_that_left_word_of_its_end_is_named_with_its_reason(capfd, fleet_of_3, record):
    fleet_of_3.set("srforge/seen/ends", "1")
    fleet_of_3.set("srforge/seen/1/end", json.dumps([0, "ValueError: boom"]))
    fleet_of_3.set("srforge/seen/cause", "1")
    with pytest.raises(Left):
        raising(RuntimeError(LOST_PEER))()
    said = capfd.readouterr().err
    assert "[rank 2] Rank 1 ended first: ValueError: boom. Its own log tells more.\n" in said
    assert "Rank 0 died without a word" in said  # it does not report either
    assert "Rank 1 ended first" in record.read_text()


@pytest.mark.usefixtures("rank_2_of_3", "left")
def test_rank_that_was_told_to_end_is_not_taken_for_the_cause(capfd, fleet_of_3):
    """Rank 0 was killed without a word, and its launcher then told rank 1, its neighbour, to end."""
    breadcrumbs.start_reporting(fleet_of_3, 1, 3)
    breadcrumbs.note_end("received SIGTERM")
    breadcrumbs.start_reporting(fleet_of_3, 2, 3)
    with pytest.raises(Left):
        raising(RuntimeError(LOST_PEER))()
    said = capfd.readouterr().err
    assert "[rank 2] Another rank ended first" in said
    assert "rank 1 ended in start: received SIGTERM" in said
    assert said.splitlines()[-1].startswith("[rank 2] Rank 0 died without a word")


@pytest.mark.usefixtures("rank_2_of_3", "fleet_of_3")
def test_rank_that_returns_leaves_word_for_those_that_still_need_it():
    rank_entrypoint(lambda: None)()
    first = breadcrumbs.first_to_end()
    assert (first.rank, first.reason) == (2, "returned from main")


class UnspeakableError(Exception):
    def __str__(self):
        raise ZeroDivisionError


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.usefixtures("rank_2_of_3")
def test_error_that_cannot_be_told_ends_the_rank_all_the_same(left):
    with pytest.raises(Left):
        raising(UnspeakableError())()
    assert left == [(1, entrypoint.DRAIN_SECONDS, "")]


@pytest.mark.usefixtures("rank_2_of_3")
def test_closed_output_does_not_keep_a_rank_from_leaving(left, monkeypatch):
    class Closed(io.StringIO):
        def flush(self):
            raise BrokenPipeError

    monkeypatch.setattr("sys.stdout", Closed())
    with pytest.raises(Left):
        raising(ValueError("boom"))()
    assert left == [(1, entrypoint.DRAIN_SECONDS, "[rank 2] ValueError: boom")]


@pytest.mark.usefixtures("rank_2_of_3", "left", "fleet_of_3")
def test_ranks_that_fell_silent_behind_a_lost_connection_died(capfd):
    with pytest.raises(Left):
        raising(RuntimeError(LOST_PEER))()
    last = capfd.readouterr().err.splitlines()[-1]
    assert (
        last == "[rank 2] Ranks 0, 1 died without a word, or the host is cut off: look at the log, and at the host's."
    )


@pytest.mark.usefixtures("rank_2_of_3", "left", "fleet_of_3")
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("boom\nand more"), "ValueError: boom"),
        (KeyError(), "KeyError"),
        (SystemExit(0), "exited with 0"),
    ],
)
def test_rank_that_fails_leaves_word_for_the_others(error, reason):
    with pytest.raises(Left):
        raising(error)()
    first = breadcrumbs.first_to_end()
    assert (first.rank, first.reason) == (2, reason)


def test_only_errors_of_the_connection_are_an_aftermath():
    assert is_aftermath(RuntimeError(LOST_PEER))
    assert is_aftermath(
        RuntimeError("NCCL error: ncclRemoteError: A call failed possibly due to a remote process exit")
    )
    wrapped = CollectiveError("barrier failed")
    wrapped.__cause__ = RuntimeError(LOST_PEER)
    assert is_aftermath(wrapped)
    assert not is_aftermath(RuntimeError("CUDA out of memory"))
    assert not is_aftermath(ConnectionResetError("Connection reset by peer"))  # of a tracker's server, say


def test_alone_exceptions_pass_through_after_the_finishers(record):
    codes = []
    on_exit(codes.append)
    with pytest.raises(ValueError, match="boom"):
        raising(ValueError("boom"))()
    assert codes == [1]
    assert "ValueError: boom" in record.read_text()


def test_alone_error_on_purpose_is_one_line_and_exit_code_1(capfd):
    with pytest.raises(SystemExit, match="1"):
        raising(ConfigurationError("`x` must be y, but is z. Do this."))()
    assert capfd.readouterr().err == "error: `x` must be y, but is z. Do this.\n"


@pytest.mark.parametrize(("code", "exit_code"), [(0, 0), (None, 0), (4, 4), ("no good", 1)])
def test_alone_exits_pass_through(code, exit_code):
    codes = []
    on_exit(codes.append)
    with pytest.raises(SystemExit) as caught:
        raising(SystemExit(code))()
    assert caught.value.code == code
    assert codes == [exit_code]


def test_alone_interrupt_ends_without_a_traceback_after_the_finishers():
    codes = []
    on_exit(codes.append)
    with pytest.raises(SystemExit) as caught:
        raising(KeyboardInterrupt())()
    assert (caught.value.code, codes) == (130, [130])


def test_finishers_run_once_at_the_normal_end():
    codes = []
    main = rank_entrypoint(lambda: on_exit(codes.append))
    main()
    rank_entrypoint(lambda: None)()
    assert codes == [0]


def test_wrong_launch_environment_is_shown_by_main_itself(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "two")
    assert rank_entrypoint(lambda: "ran")() == "ran"


def test_record_that_cannot_be_written_does_not_hide_the_cause(monkeypatch, capfd, tmp_path):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "missing" / "error.json"))
    with pytest.raises(ValueError, match="boom"):
        raising(ValueError("boom"))()
    assert re.search("could not be recorded in .*error.json", capfd.readouterr().err)


def test_signal_handlers_are_as_before_afterwards():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    inside = []
    rank_entrypoint(lambda: inside.append(signal.getsignal(signal.SIGTERM)))()
    assert inside != before[:1]
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_a_ring_of_causes_ends():
    first, second = ValueError("one"), ValueError("other")
    first.__cause__, second.__cause__ = second, first
    assert not is_aftermath(first)
