"""Data loading for PyTorch that cannot deadlock, with exact randomness, hang reports and image reading."""

import srforge.data.server_guard  # noqa: F401 - first: ties a fork server to its rank before torch is imported

# isort: split
from srforge.data.factory import DataLoaderFactory
from srforge.data.images import ImageReadError, read_image, write_image
from srforge.data.opencv import OpenCVImportError, import_cv2
from srforge.data.per_process import OncePerProcess
from srforge.data.pickling import DatasetPicklingError
from srforge.data.policy import worker_policy
from srforge.data.seeded import SampleError, SeededDataset
from srforge.data.skipping import SkipUnreadable, take_skipped

__all__ = [
    "DataLoaderFactory",
    "DatasetPicklingError",
    "ImageReadError",
    "OncePerProcess",
    "OpenCVImportError",
    "SampleError",
    "SeededDataset",
    "SkipUnreadable",
    "import_cv2",
    "read_image",
    "take_skipped",
    "worker_policy",
    "write_image",
]
