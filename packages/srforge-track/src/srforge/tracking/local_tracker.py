"""The tracker that needs no service: lines of metrics, pictures and small JSON files in the run's folder."""

from __future__ import annotations

import io
import json
import re
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from srforge.distributed.errors import ConfigurationError
from srforge.distributed.gates import every_rank, main_process_only
from srforge.tracking.errors import TrackingError
from srforge.tracking.metric_history import MetricHistory, write_whole
from srforge.tracking.report import render_report
from srforge.tracking.values import flatten_metrics, plain_config, to_pixels

if TYPE_CHECKING:
    from collections.abc import Mapping

_IMAGE_NAME = re.compile(r"[\w+\-][\w.+\- ]*(/[\w+\-][\w.+\- ]*)*")
_IMAGE_FILE = re.compile(r"epoch-(\d{5,})\.png")


@main_process_only
class LocalTracker:
    """Writes ``metrics.jsonl``, ``report.html``, ``images/NAME/epoch-00003.png``, two small JSON files and ``files/``.

    Args:
        folder: The run's folder; made when needed.
        name: Name for people; by default the folder's name.
        run_id: Identity; by default the folder's name.
    """

    def __init__(self, folder: str | Path, *, name: str | None = None, run_id: str | None = None) -> None:
        self.folder = Path(folder)
        self.run_id = run_id or self.folder.absolute().name
        self.run_name = name or self.run_id
        self.is_resumed = False
        self.history = MetricHistory(self.folder / "metrics.jsonl")
        self._is_finished = False
        self._report_due = 0.0

    @every_rank
    def rewind(self, epoch: int) -> None:
        """Cut metrics and images back to the epochs before ``epoch``.

        Raises:
            TrackingError: The disk refused.
        """
        self.is_resumed = epoch > 0
        self._cut(epoch)

    @main_process_only
    def _cut(self, epoch: int) -> None:
        self.history.rewind(epoch)
        if (self.folder / "report.html").exists():
            self._write_report()
        for path in sorted((self.folder / "images").rglob("epoch-*.png")):
            match = _IMAGE_FILE.fullmatch(path.name)
            if match and int(match[1]) >= epoch:
                path.unlink()

    def log_metrics(self, metrics: Mapping[str, Any], *, epoch: int) -> None:
        """Write the line of an epoch; a second call for the same epoch joins its line.

        Raises:
            ConfigurationError: A value is no number, or the epoch stands in the file already (see ``rewind``).
            TrackingError: The disk refused.
        """
        self.history.write(epoch, flatten_metrics(metrics))
        if time.monotonic() >= self._report_due:
            self._write_report()

    def log_image(self, name: str, image: Any, *, epoch: int) -> None:
        """Write a PNG.

        Raises:
            ConfigurationError: The image has another shape or dtype, or the name is no relative path.
            TrackingError: The disk refused.
        """
        if not _IMAGE_NAME.fullmatch(name):
            raise ConfigurationError(
                f"`name` must be words separated by /, none starting with a dot, but is {name!r}. Rename the image."
            )
        buffer = io.BytesIO()
        Image.fromarray(to_pixels(image)).save(buffer, format="PNG")
        write_whole(self.folder / "images" / name / f"epoch-{epoch:05d}.png", buffer.getvalue())

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Write ``config.json``.

        Raises:
            TrackingError: The disk refused.
        """
        self._write_json("config.json", plain_config(config))

    def set_summary(self, summary: Mapping[str, Any]) -> None:
        """Add to ``summary.json``.

        Raises:
            TrackingError: The disk refused.
        """
        path = self.folder / "summary.json"
        try:
            earlier = json.loads(path.read_bytes())
        except (OSError, ValueError):
            earlier = {}
        self._write_json("summary.json", earlier | plain_config(summary))

    def save_file(self, path: str | Path) -> None:
        """Copy a file to ``files/``, unless it lies in the run's folder already.

        Raises:
            TrackingError: The file is missing, or the disk refused.
        """
        source = Path(path)
        if source.absolute().is_relative_to(self.folder.absolute()) and source.is_file():
            return
        target = self.folder / "files" / source.name
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
        except OSError as error:
            raise TrackingError(f"{source} could not be copied to {target}: {error}.") from error

    def finish(self, exit_code: int | None = 0) -> None:
        """Write the exit code to ``summary.json``; further calls do nothing.

        Raises:
            TrackingError: The disk refused.
        """
        if self._is_finished:
            return
        self._is_finished = True
        if self.history.path.exists():
            self._write_report()
        self.set_summary({"exit_code": exit_code})

    def _write_report(self) -> None:
        started = time.monotonic()
        write_whole(self.folder / "report.html", render_report(self.run_name, self.history.rows()).encode())
        # The page grows with the run: at most a twentieth of the time is spent on it.
        self._report_due = time.monotonic() + 19 * (time.monotonic() - started)

    def _write_json(self, name: str, content: Any) -> None:
        write_whole(self.folder / name, (json.dumps(content, indent=2, allow_nan=False) + "\n").encode())
