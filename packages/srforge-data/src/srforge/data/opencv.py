"""OpenCV, imported late: nothing of the package needs it before an image is read.

Its thread pool is what deadlocks forked workers, so it is pinned to zero wherever it gets imported.
"""

from types import ModuleType

from srforge.data.environment_variables import keep_opencv_threads
from srforge.distributed.errors import SRForgeError


class OpenCVImportError(SRForgeError, ImportError):
    """OpenCV is missing, or a library that it links to is."""


def import_cv2() -> ModuleType:
    """Import OpenCV and return its module.

    Raises:
        OpenCVImportError: It is not installed, or this machine lacks the graphics library that ``opencv-python``
            links to.
    """
    try:
        import cv2
    except ImportError as error:
        if "libGL" in str(error):
            raise OpenCVImportError(
                "cv2 (opencv-python) must find libGL.so.1, but this machine has none. Install Debian's `libgl1`, or "
                "put `opencv-python-headless` in the place of `opencv-python`: it is the same cv2 without windows."
            ) from error
        raise OpenCVImportError(
            f"cv2 must be importable, but is not ({error}). Install `opencv-python` or `opencv-python-headless`."
        ) from error
    return cv2


def pin_opencv_threads(*, keep: bool | None = None) -> None:
    """Set OpenCV's thread pool to zero; loader workers are the parallelism, and a forked pool never answers.

    Args:
        keep: Leave the pool alone; None asks ``SRFORGE_CV2_THREADS``.
    """
    if keep_opencv_threads() if keep is None else keep:
        return
    try:
        cv2 = import_cv2()
    except OpenCVImportError:
        return  # nobody has needed it yet; reading an image says what is missing
    cv2.setNumThreads(0)
