"""The error of this package."""

from srforge.distributed.errors import SRForgeError


class TrackingError(SRForgeError):
    """Something that had to be kept could not be: a disk that refuses, a tracking service that does not answer."""
