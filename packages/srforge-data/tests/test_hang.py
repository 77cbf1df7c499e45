import faulthandler
import time

import pytest

from srforge.data import hang
from srforge.data.hang import HangReport, arm_hang_reports, arm_worker, disarm_hang_reports
from srforge.data.hang_copier import copy_new_lines


@pytest.fixture(autouse=True)
def _in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "2")
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "trace")
    yield
    disarm_hang_reports()


def test_reports_are_off_without_the_variable(monkeypatch, tmp_path):
    monkeypatch.delenv("DEBUG_HANG", raising=False)
    assert arm_hang_reports() is None
    assert not (tmp_path / "hang").exists()


def test_rank_dumps_the_line_that_it_stands_on_into_its_file_and_to_stderr(monkeypatch, tmp_path, capfd):
    monkeypatch.setenv("DEBUG_HANG", "0.2")
    assert arm_hang_reports() == HangReport(0.2, str(tmp_path / "hang"), 2)
    monkeypatch.chdir("/")
    assert arm_hang_reports().folder == str(tmp_path / "hang")  # again is harmless, wherever the process went
    time.sleep(0.7)
    disarm_hang_reports()
    text = (tmp_path / "hang" / "r2.txt").read_text()
    assert text.count("Timeout (0:00:00.2") >= 2
    assert "in test_rank_dumps_the_line_that_it_stands_on" in text
    assert "[r2]   File" in capfd.readouterr().err


def test_files_of_an_earlier_run_of_this_rank_are_removed_and_others_kept(monkeypatch, tmp_path):
    folder = tmp_path / "hang"
    folder.mkdir()
    for name in ("r2.txt", "r2-w0.txt", "r20.txt", "r1-w0.txt"):
        (folder / name).write_text("old\n")
    monkeypatch.setenv("DEBUG_HANG", "60")
    arm_hang_reports()
    assert sorted(path.name for path in folder.iterdir()) == ["r1-w0.txt", "r2.txt", "r20.txt"]
    assert (folder / "r2.txt").read_text() == ""


def test_workers_of_each_loader_have_files_of_their_own(monkeypatch, tmp_path):
    dumped = []
    monkeypatch.setattr(
        faulthandler, "dump_traceback_later", lambda period, repeat, file: dumped.append((period, file))
    )
    for loader in (0, 1):
        arm_worker(HangReport(5.0, str(tmp_path), 2), worker=1, loader=loader)
    assert [(period, file.name) for period, file in dumped] == [
        (5.0, str(tmp_path / "r2-w1.txt")),
        (5.0, str(tmp_path / "r2-l1-w1.txt")),
    ]
    for _, file in dumped:
        file.close()
    monkeypatch.setattr(hang, "_armed", None)


def test_copier_tags_whole_lines_and_copies_each_once(tmp_path, capsys):
    (tmp_path / "r2-w1.txt").write_text("first\nsecond\nthi")
    (tmp_path / "r20.txt").write_text("another rank\n")
    positions = {}
    copy_new_lines(tmp_path, 2, positions)
    assert capsys.readouterr().err == "[r2-w1] first\n[r2-w1] second\n"
    with (tmp_path / "r2-w1.txt").open("a") as file:
        file.write("rd\n")
    copy_new_lines(tmp_path, 2, positions)
    copy_new_lines(tmp_path, 2, positions)
    assert capsys.readouterr().err == "[r2-w1] third\n"
