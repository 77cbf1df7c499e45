"""The environment variables that this package reads; nothing else in it looks at the environment.

W&B reads its own ``WANDB_*`` variables as well (``WANDB_ENTITY``, ``WANDB_BASE_URL``, ...); its manual lists them.
"""

from __future__ import annotations

import os
from pathlib import Path

WANDB_MODE = "WANDB_MODE"
"""``online``, ``offline`` or ``disabled``: decides where ``WandbTracker(mode="auto")`` was not told."""

WANDB_API_KEY = "WANDB_API_KEY"
"""The key to W&B. Read only to keep its text out of everything that is logged."""

NETRC = "NETRC"
"""The file in which ``wandb login`` keeps the key; by default ``.netrc`` (``_netrc`` on Windows) at home."""


def wandb_mode() -> str | None:
    """Return the value of ``WANDB_MODE``, or None where it is unset or empty."""
    return os.environ.get(WANDB_MODE) or None


def secret_values() -> tuple[str, ...]:
    """Return texts that no log may contain: today the value of ``WANDB_API_KEY``, if it is set."""
    key = os.environ.get(WANDB_API_KEY, "").strip()
    return (key,) if key else ()


def netrc_file() -> Path:
    """Return the path of the netrc file; it need not exist."""
    return Path(os.environ.get(NETRC) or Path.home() / ("_netrc" if os.name == "nt" else ".netrc")).expanduser()
