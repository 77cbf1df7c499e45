"""What ``srforge.init()`` does for data loading, registered under the entry-point group ``srforge.init``."""

import multiprocessing
from multiprocessing import parent_process

from srforge.data.hang import arm_hang_reports
from srforge.data.opencv import pin_opencv_threads

PRELOADED = ("srforge.data", "torch", "torch.utils.data", "numpy", "cv2")
"""What workers find imported already. Ours comes first: it ties the server to its rank before torch is imported."""


_wanted: tuple[str, ...] = PRELOADED  # a server that has to be started again imports the same


def initialise(preload: tuple[str, ...] = ()) -> None:
    """Pin OpenCV's thread pool, arm hang reports, start the fork server.

    A worker imports the main script again and must do none of this: there it returns at once.

    Args:
        preload: Names of further modules that the fork server imports, so that workers find them imported.

    Raises:
        ConfigurationError: ``DEBUG_HANG`` or ``SRFORGE_CV2_THREADS`` has a value that means nothing.
    """
    if parent_process() is not None:
        return
    pin_opencv_threads()
    arm_hang_reports()
    start_fork_server(preload)


def start_fork_server(preload: tuple[str, ...] = ()) -> bool:
    """Start the fork server, where the platform has one; it imports while this process goes on.

    A server that runs already keeps what it preloaded.

    Args:
        preload: Names of modules to import there besides the fixed list.

    Returns:
        Whether the platform has a fork server.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return False
    from multiprocessing import forkserver

    global _wanted  # noqa: PLW0603 - one server per process
    _wanted = tuple(dict.fromkeys((*_wanted, *preload)))
    forkserver.set_forkserver_preload(list(_wanted))
    forkserver.ensure_running()
    return True
