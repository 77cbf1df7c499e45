"""SR-Forge: one namespace, several packages. This file belongs to ``srforge-distributed`` alone."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)


def init(*, preload: tuple[str, ...] = ()) -> None:
    """Prepare the process for training; call it first in a script, before other threads start.

    Every installed package that registered a function in the entry-point group ``srforge.init`` gets called once
    (``srforge-data``: pin OpenCV's threads, arm hang reports, start the fork server).

    Args:
        preload: Names of further modules that data-loading workers should find imported already.

    Raises:
        ConfigurationError: Another project's distribution named ``srforge`` is installed beside these packages.
    """
    from srforge.distributed.start_up import run_start_up

    run_start_up(preload)
