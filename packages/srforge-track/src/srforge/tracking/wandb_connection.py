"""How to reach W&B, and how to let go of it: the decisions and bounds around one ``wandb`` run."""

from __future__ import annotations

import contextlib
import netrc
import sys
import threading
import urllib.error
import urllib.parse
import urllib.request
import warnings
from typing import TYPE_CHECKING, Any

from srforge.distributed.errors import ConfigurationError
from srforge.tracking.environment_variables import netrc_file, secret_values, wandb_mode

if TYPE_CHECKING:
    from collections.abc import Callable

MODES = ("auto", "online", "offline", "disabled")
_REACH_SECONDS = 5.0


def resolve_mode(mode: str, base_url: str) -> tuple[str, str]:
    """Decide between online and offline.

    Args:
        mode: ``auto``, ``online``, ``offline`` or ``disabled``.
        base_url: Address of the W&B server.

    Returns:
        ``online``, ``offline`` or ``disabled``, and the reason, for display.

    Raises:
        ConfigurationError: ``mode`` or ``WANDB_MODE`` is none of these.
    """
    if mode not in MODES:
        raise ConfigurationError(f"`mode` must be one of {', '.join(MODES)}, but is {mode!r}. Choose one of them.")
    if mode != "auto":
        return mode, "asked for"
    variable = wandb_mode()
    if variable is not None:
        if variable not in MODES[1:]:
            raise ConfigurationError(
                f"WANDB_MODE must be one of {', '.join(MODES[1:])}, but is {variable!r}. Change or unset it."
            )
        return variable, "WANDB_MODE says so"
    if not has_key(base_url):
        return "offline", "no API key is known; `wandb login` stores one"
    if not is_reachable(base_url):
        return "offline", f"{base_url} does not answer"
    return "online", "a key is known and the server answers"


def has_key(base_url: str) -> bool:
    """Return whether a key to a W&B server is known: from the environment, or where ``wandb login`` keeps it."""
    if secret_values():
        return True
    try:
        return netrc.netrc(netrc_file()).authenticators(urllib.parse.urlsplit(base_url).hostname or "") is not None
    except (OSError, netrc.NetrcParseError):
        return False


def is_reachable(url: str, seconds: float = _REACH_SECONDS) -> bool:
    """Return whether a server answers within the time given, name look-up included; proxies are obeyed."""
    if not url.startswith(("http://", "https://")):
        return False
    answered = threading.Event()

    def ask() -> None:
        try:
            urllib.request.urlopen(url, timeout=seconds).close()  # noqa: S310 - the scheme was checked above
        except urllib.error.HTTPError:
            answered.set()  # an unfriendly answer is an answer
        except (OSError, ValueError):
            return
        else:
            answered.set()

    thread = threading.Thread(target=ask, daemon=True)  # a name look-up knows no timeout of its own
    thread.start()
    thread.join(seconds)
    return answered.is_set()


def finish_in_time(finish: Callable[[], None], seconds: float, folder: str) -> bool:
    """Call ``finish`` and wait at most ``seconds`` for it; warn and let go of the service when it takes longer.

    Returns:
        Whether it came back in time.
    """
    failures: list[BaseException] = []

    def call() -> None:
        try:
            finish()
        except BaseException as error:  # noqa: BLE001 - nothing that happens here may keep a run from ending
            failures.append(error)

    thread = threading.Thread(target=call, name="wandb-finish", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        abandon_service()
        warnings.warn(
            f"W&B did not finish within {seconds:g} s and was let go. What it has lies in {folder}; upload it with "
            f"`wandb sync {folder}`.",
            stacklevel=3,
        )
        return False
    if failures:
        warnings.warn(f"W&B failed to finish: {failures[0]!r}. What it has lies in {folder}.", stacklevel=3)
    return not failures


def end_run(run: Any, exit_code: int) -> None:
    """Finish a run, and end W&B's service unless another run of this process uses it.

    The service completes its file some time after ``run.finish`` has returned; only its end makes sure of that, which
    matters where the process leaves through ``os._exit``.
    """
    run.finish(exit_code=exit_code)
    end_idle_service(exit_code)


def end_idle_service(exit_code: int) -> None:
    """End W&B's service unless a run of this process uses it; the next run starts another."""
    import wandb

    if getattr(wandb.setup(), "most_recent_active_run", None) is None:
        wandb.teardown(exit_code)


def exit_code_so_far() -> int:
    """Return the exit code with which this interpreter is ending, as far as it can be known.

    W&B puts a method of its own in place of ``sys.exit`` to remember the code; an uncaught exception is 1. A bare
    ``raise SystemExit(code)`` leaves no trace and reads as 0.
    """
    code = getattr(getattr(sys.exit, "__self__", None), "exit_code", 0)
    return int(code) or int(hasattr(sys, "last_value"))


def abandon_service() -> None:
    """Kill this process's W&B service, so that W&B's own hook at interpreter exit has nothing left to wait for."""
    import wandb

    with contextlib.suppress(Exception):  # reaches into wandb: where it was rebuilt, its hook may wait again
        connection: Any = wandb.setup()._connection  # noqa: SLF001 - there is no public way to give up on it
        connection._cleanup()  # noqa: SLF001 - the same
        connection._proc._process.kill()  # noqa: SLF001 - the same
