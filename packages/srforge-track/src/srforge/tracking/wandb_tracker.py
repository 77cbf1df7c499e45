"""Weights & Biases, once per fleet: started late, offline without network, one step axis, ended in bounded time."""

from __future__ import annotations

import atexit
import re
import sys
import uuid
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from srforge.distributed.active import get_active_strategy
from srforge.distributed.errors import ConfigurationError
from srforge.distributed.gates import every_rank, main_process_only
from srforge.tracking.environment_variables import secret_values
from srforge.tracking.errors import TrackingError
from srforge.tracking.values import flatten_metrics, plain_config, to_pixels
from srforge.tracking.wandb_connection import (
    MODES,
    end_idle_service,
    end_run,
    exit_code_so_far,
    finish_in_time,
    resolve_mode,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_RUN_ID = re.compile(r"[^/\\#?%:\s]{1,64}")
_INIT_SECONDS = 30.0


@main_process_only
class WandbTracker:
    """Logs to W&B from rank 0; the run starts with the first thing that is logged.

    Build it on every rank, after ``setup_device``. The axis is ``epoch``, so a resumed run never goes backwards. That
    a run is resumed is known from our own checkpoint (``rewind``), which holds offline too. Keys are never arguments
    here: ``wandb login`` or ``WANDB_API_KEY`` provide them, and what looks like one is kept out of the configuration.

    Args:
        project: W&B project.
        folder: The run's folder; W&B writes below ``wandb/`` in it.
        name: Name for people; by default the folder's name.
        entity: W&B user or team; by default that of the key.
        run_id: Identity; by default the one that this folder's earlier launch used, else a new one.
        mode: ``online``, ``offline``, ``disabled``, or ``auto``: ``WANDB_MODE`` if set, else online where a key is
            known and the server answers, else offline, which is said.
        tags: W&B tags.
        finish_timeout_seconds: The longest that ``finish`` may take.

    Raises:
        ConfigurationError: ``mode`` or ``run_id`` is not allowed.

    Collective: every rank must build it, as rank 0's ``run_id`` is sent to the others.
    """

    def __init__(
        self,
        project: str,
        folder: str | Path,
        *,
        name: str | None = None,
        entity: str | None = None,
        run_id: str | None = None,
        mode: str = "auto",
        tags: Sequence[str] = (),
        finish_timeout_seconds: float = 60.0,
    ) -> None:
        if mode not in MODES:
            raise ConfigurationError(f"`mode` must be one of {', '.join(MODES)}, but is {mode!r}. Choose one of them.")
        if run_id is not None and not _RUN_ID.fullmatch(run_id):
            raise ConfigurationError(
                f"`run_id` must be 1 to 64 characters, none of / \\ # ? % : or space, but is {run_id!r}. Change it."
            )
        self.project = project
        self.folder = Path(folder)
        self.entity = entity
        self.mode = mode
        self.tags = tuple(tags)
        self.finish_timeout_seconds = finish_timeout_seconds
        self.run_name = name or self.folder.absolute().name
        self.run_id: str = run_id or get_active_strategy().broadcast_object(self._stored_id())
        self.is_resumed = False
        self._run: Any = None
        self._is_finished = False
        self._slot = self._step = self._metrics_epoch = -1

    @every_rank
    def rewind(self, epoch: int) -> None:
        """Remember whether this launch resumes. W&B keeps what was logged; re-run epochs get the newest values."""
        self.is_resumed = epoch > 0

    def log_metrics(self, metrics: Mapping[str, Any], *, epoch: int) -> None:
        """Log the metrics of an epoch, with what was logged for it before, as one row.

        Raises:
            ConfigurationError: A value is no number.
            TrackingError: ``mode`` is online and W&B cannot be reached.
        """
        self._log(flatten_metrics(metrics), epoch, commit=True)
        self._metrics_epoch = epoch

    def log_image(self, name: str, image: Any, *, epoch: int) -> None:
        """Log an image.

        Raises:
            ConfigurationError: The image has another shape or dtype.
            TrackingError: ``mode`` is online and W&B cannot be reached.
        """
        import wandb

        self._log({name: wandb.Image(to_pixels(image))}, epoch, commit=False)

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Log the configuration, keys and passwords replaced.

        Raises:
            TrackingError: ``mode`` is online and W&B cannot be reached.
        """
        run = self._started()
        if run is not None:
            run.config.update(plain_config(config), allow_val_change=True)

    def set_summary(self, summary: Mapping[str, Any]) -> None:
        """Log final results.

        Raises:
            TrackingError: ``mode`` is online and W&B cannot be reached.
        """
        run = self._started()
        if run is not None:
            run.summary.update(plain_config(summary))

    def save_file(self, path: str | Path) -> None:
        """Upload a file.

        Raises:
            TrackingError: The file is missing, or ``mode`` is online and W&B cannot be reached.
        """
        source = Path(path).absolute()
        if not source.is_file():
            raise TrackingError(f"`path` must be a file, but {source} is none. Save it first.")
        run = self._started()
        if run is not None:
            run.save(str(source), base_path=str(source.parent), policy="now")

    def finish(self, exit_code: int | None = 0) -> None:
        """End the run within ``finish_timeout_seconds``; further calls, and later logging, do nothing.

        Args:
            exit_code: 0 marks it finished, another number failed; None tells from how the interpreter is ending.
        """
        exit_code = exit_code_so_far() if exit_code is None else exit_code
        self._is_finished = True
        run, self._run = self._run, None
        if run is not None:
            atexit.unregister(self._finish_at_exit)
            folder = str(Path(run.dir).parent)
            finish_in_time(lambda: end_run(run, exit_code), self.finish_timeout_seconds, folder)

    def _finish_at_exit(self) -> None:
        self.finish(None)

    def _log(self, row: Mapping[str, Any], epoch: int, *, commit: bool) -> None:
        """Log into one of the two rows of an epoch: up to its metrics, which are sent at once, or after them.

        W&B's own step counts rows. It is a function of the epoch, so that the offline parts of a resumed run continue
        each other, unless the server is further already: there it would drop the row.
        """
        run = self._started()
        if run is None:
            return
        slot = 2 * epoch + (epoch == self._metrics_epoch)
        if slot != self._slot:
            self._slot = slot
            self._step = max(slot, self._step + 1, run.step)
        run.log({"epoch": epoch, **row}, step=self._step, commit=commit)

    def _started(self) -> Any:
        if self._run is None and not self._is_finished:
            self._run = self._start()
            self._run.define_metric("epoch")
            self._run.define_metric("*", step_metric="epoch")
            atexit.register(self._finish_at_exit)  # after W&B's own hook was registered, so it runs before that
        return self._run

    def _start(self) -> Any:
        try:
            import wandb
        except ImportError as error:
            raise TrackingError(
                f"WandbTracker must be able to import wandb, but: {error}. Install it, or choose another tracker."
            ) from error

        self._store_id()
        base_url = str(wandb.setup().settings.base_url)
        mode, reason = resolve_mode(self.mode, base_url)
        if self.mode == "auto" and mode != "online":
            wandb.termlog(f"W&B is {mode}: {reason}.")
        try:
            return self._init(mode)
        except wandb.Error as error:
            if self.mode != "auto" or mode != "online":
                raise TrackingError(
                    f"`mode` is {mode}, but W&B did not start: {error!s:.300}. Set mode to offline, or to auto."
                ) from error
            warnings.warn(f"W&B goes offline, as it could not start online: {error!s:.300}", stacklevel=2)
            # The service still holds the id of the run that did not start.
            finish_in_time(lambda: end_idle_service(1), self.finish_timeout_seconds, str(self.folder))
            return self._init("offline")

    def _init(self, mode: str) -> Any:
        import wandb

        settings: dict[str, Any] = {"init_timeout": _INIT_SECONDS, "console": "off", "quiet": True}
        optional = {  # newer versions of wandb know these
            "finish_timeout": self.finish_timeout_seconds,
            "x_transaction_log_flush_interval": 1.0,
            # The command line is part of the metadata: without it when a key stands in it.
            "x_disable_meta": any(secret in word for secret in secret_values() for word in sys.argv),
        }
        known = wandb.Settings.model_fields
        settings |= {key: value for key, value in optional.items() if key in known}
        self.folder.mkdir(parents=True, exist_ok=True)
        return wandb.init(
            project=self.project,
            entity=self.entity,
            id=self.run_id,
            name=self.run_name,
            tags=self.tags,
            dir=str(self.folder),
            mode=cast("Literal['online', 'offline', 'disabled']", mode),
            resume="allow" if mode == "online" else None,
            reinit="create_new",
            settings=wandb.Settings(**settings),
        )

    @property
    def _id_file(self) -> Path:
        return self.folder / "wandb" / "run-id.txt"

    def _stored_id(self) -> str:
        """Return the id of this folder's earlier launch, else a new one; only rank 0's answer counts."""
        try:
            stored = self._id_file.read_text().strip()
        except OSError:
            stored = ""
        return stored if _RUN_ID.fullmatch(stored) else uuid.uuid4().hex[:12]

    def _store_id(self) -> None:
        self._id_file.parent.mkdir(parents=True, exist_ok=True)
        self._id_file.write_text(self.run_id + "\n")
