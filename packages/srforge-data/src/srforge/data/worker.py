"""What a worker process does before its first sample."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from srforge.data.hang import HangReport, arm_worker
from srforge.data.lifetime import end_with_parent
from srforge.data.opencv import pin_opencv_threads


@dataclass(frozen=True)
class WorkerStart:
    """The loader's ``worker_init_fn``: ties the worker to its rank, then calls the user's own function.

    Everything it needs travels with it: the environment of a fork server is that of its start.

    Attributes:
        loader: Number of the loader in its process; names the worker's hang file.
        keep_opencv_threads: Leave OpenCV's thread pool on.
        hang: What hang reports need, or None when they are off.
        then: The user's ``worker_init_fn``, or None.
    """

    loader: int
    keep_opencv_threads: bool
    hang: HangReport | None
    then: Callable[[int], Any] | None

    def __call__(self, worker_id: int) -> None:
        """Prepare the worker.

        Args:
            worker_id: Number of the worker in its loader.
        """
        end_with_parent()
        if "cv2" in sys.modules:
            pin_opencv_threads(keep=self.keep_opencv_threads)
        if self.hang is not None:
            arm_worker(self.hang, worker_id, self.loader)
        if self.then is not None:
            self.then(worker_id)
