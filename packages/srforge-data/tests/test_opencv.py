import builtins
import sys

import cv2
import pytest

from srforge.data.opencv import OpenCVImportError, import_cv2, pin_opencv_threads


@pytest.fixture
def _threads():
    before = cv2.getNumThreads()
    cv2.setNumThreads(2)
    yield
    cv2.setNumThreads(before)


@pytest.fixture
def failing_import(monkeypatch):
    def fail_with(message):
        real = builtins.__import__

        def importing(name, *arguments, **options):
            if name == "cv2":
                raise ImportError(message)
            return real(name, *arguments, **options)

        monkeypatch.delitem(sys.modules, "cv2")
        monkeypatch.setattr(builtins, "__import__", importing)

    return fail_with


@pytest.mark.usefixtures("_threads")
def test_opencv_runs_without_a_thread_pool_unless_told_to_keep_it(monkeypatch):
    monkeypatch.setenv("SRFORGE_CV2_THREADS", "1")
    pin_opencv_threads()
    assert cv2.getNumThreads() == 2
    monkeypatch.delenv("SRFORGE_CV2_THREADS")
    pin_opencv_threads()
    assert cv2.getNumThreads() == 1  # OpenCV says 1 where it makes no threads


def test_missing_graphics_library_is_named_with_both_cures(failing_import):
    failing_import("libGL.so.1: cannot open shared object file: No such file or directory")
    with pytest.raises(OpenCVImportError, match=r"libGL\.so\.1.*libgl1.*opencv-python-headless"):
        import_cv2()


def test_missing_opencv_is_named(failing_import):
    failing_import("No module named 'cv2'")
    with pytest.raises(OpenCVImportError, match="cv2 must be importable, but is not"):
        import_cv2()


def test_pinning_without_opencv_does_nothing(failing_import):
    failing_import("No module named 'cv2'")
    pin_opencv_threads(keep=False)
