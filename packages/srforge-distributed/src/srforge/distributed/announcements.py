"""Things that are said once: decisions taken for the user that the user should know of."""

import logging
from functools import cache

logger = logging.getLogger("srforge.distributed")


@cache
def say_once(message: str) -> None:
    """Log ``message`` as a warning, the first time that it is said in this process."""
    logger.warning(message)
