import pickle
import sys

import cv2
import pytest

from srforge.data import worker
from srforge.data.hang import HangReport
from srforge.data.worker import WorkerStart

REPORT = HangReport(2.0, "hang", 1)


def own_start(worker_id):
    raise LookupError(worker_id)


@pytest.fixture
def calls(monkeypatch):
    made = []
    monkeypatch.setattr(worker, "end_with_parent", lambda: made.append("lifetime"))
    monkeypatch.setattr(worker, "arm_worker", lambda *arguments: made.append(arguments))
    monkeypatch.setattr(worker, "pin_opencv_threads", lambda *, keep: made.append(("keep", keep)))
    return made


def test_worker_is_tied_to_its_rank_first_and_the_users_function_comes_last(calls):
    assert "cv2" in sys.modules
    assert cv2 is not None
    WorkerStart(loader=2, keep_opencv_threads=True, hang=REPORT, then=calls.append)(5)
    assert calls == ["lifetime", ("keep", True), (REPORT, 5, 2), 5]


def test_opencv_is_not_imported_for_its_threads_alone(calls, monkeypatch):
    monkeypatch.delitem(sys.modules, "cv2")
    WorkerStart(loader=0, keep_opencv_threads=False, hang=None, then=None)(0)
    assert calls == ["lifetime"]


def test_it_travels_with_the_users_function(calls):
    start = pickle.loads(pickle.dumps(WorkerStart(loader=0, keep_opencv_threads=False, hang=REPORT, then=len)))
    assert start == WorkerStart(loader=0, keep_opencv_threads=False, hang=REPORT, then=len)


def test_errors_of_the_users_function_are_its_own(calls):
    with pytest.raises(LookupError, match="3"):
        WorkerStart(loader=0, keep_opencv_threads=False, hang=None, then=own_start)(3)
