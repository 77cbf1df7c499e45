"""What ``srforge.init()`` does: refuse a foreign ``srforge``, then call what the installed packages registered."""

import warnings
from importlib import metadata

from srforge.distributed.errors import ConfigurationError

ENTRY_POINT_GROUP = "srforge.init"

_started_with: tuple[str, ...] | None = None


def run_start_up(preload: tuple[str, ...] = ()) -> None:
    """Call every function registered in the entry-point group ``srforge.init`` once per process.

    Args:
        preload: Names of modules that data-loading workers should find imported already; passed to each function.

    Raises:
        ConfigurationError: Another project's distribution named ``srforge`` is installed beside these packages.
    """
    global _started_with  # noqa: PLW0603 - once per process is the meaning of the function
    refuse_foreign_distribution()
    preload = tuple(preload)
    if _started_with is not None:
        if not set(preload) <= set(_started_with):
            warnings.warn(
                f"`preload` must be given to the first srforge.init() call, but {preload} came after {_started_with}. "
                "It has no effect now: move it to the first call.",
                stacklevel=3,
            )
        return
    for entry_point in sorted(metadata.entry_points(group=ENTRY_POINT_GROUP), key=lambda point: point.name):
        entry_point.load()(preload)
    _started_with = preload


def refuse_foreign_distribution() -> None:
    """Refuse to run beside the unrelated project that is published under the plain name ``srforge``.

    Raises:
        ConfigurationError: A distribution named ``srforge`` is installed: it owns the same import path.
    """
    try:
        version = metadata.version("srforge")
    except metadata.PackageNotFoundError:
        return
    raise ConfigurationError(
        f"the distribution `srforge` must not be installed beside srforge-distributed, but version {version} is. "
        "It is another project with the same import path: run `pip uninstall srforge`, then reinstall srforge-*."
    )
