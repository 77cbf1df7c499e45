"""The errors of SR-Forge that every package may raise.

Errors of one room live in that room (``DatasetPicklingError`` in ``srforge.data``, ``CheckpointError`` in
``srforge.training``) and derive from ``SRForgeError``. A message reads: *`name` must RULE, but is VALUE. DO THIS.*
"""


class SRForgeError(Exception):
    """Base of every error that SR-Forge raises on purpose."""


class ConfigurationError(SRForgeError, ValueError):
    """An argument or a configuration key has a value that cannot work."""


class LaunchEnvironmentError(SRForgeError):
    """The environment variables that a launcher sets are missing, wrong or contradict each other."""


class CollectiveError(SRForgeError):
    """A collective operation failed or was called where it could only hang."""


class EmptyReductionError(CollectiveError):
    """A mean was asked of a quantity that was counted on no rank."""


class ReplicaDivergenceError(SRForgeError):
    """Replicas of the model that must be identical differ between ranks."""
