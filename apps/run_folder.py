"""One folder a job: the same on every rank, independent of any clock, found again by the same command."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import shutil
from pathlib import Path
from typing import Any

from run_lock import lock_run
from srforge.distributed import ConfigurationError, TrainingStrategy, require_same
from srforge.distributed.environment_variables import job_name, num_restarts

# Sections and keys that say where and how a run is computed, kept and shown, but do not change its result.
_WITHOUT_EFFECT = (
    "system.device",
    "system.num_workers",
    "system.strategy",
    "system.distributed.strategy",
    "system.distributed.backend",
    "system.distributed.timeout_minutes",
    "system.distributed.check_replicas",
    "strategy",
    "tracking",
    "dry_run",
    "run.name",
    "run.root",
    "run.fresh",
    "run.resume",
    "run.keep_last",
    "run.show_replicas",
    "training.main_work_timeout_minutes",
    "training.validation_tile",
    "training.max_minutes",
    # Replaced by the global batch, which is what shapes an optimizer step.
    "training.batch_size",
    "training.accumulate",
)


# No empty part, none of dots alone, none from the root: a run may remove its folder.
_NAME = re.compile(r"(?!.*(^|/)\.{1,2}(/|$))[^/]+(/[^/]+)*")


def identity_of(config: dict[str, Any], global_batch_size: int) -> dict[str, Any]:
    """Return the keys that shape the result of a run, flat and sorted.

    Args:
        config: The composed configuration.
        global_batch_size: Samples of an optimizer step over all ranks.
    """
    flat = _flat(config)
    if flat.get("run.warm_start.path") is None:
        flat = {key: value for key, value in flat.items() if not key.startswith("run.warm_start.")}
    kept = {
        key: value
        for key, value in flat.items()
        if not any(key == name or key.startswith(f"{name}.") for name in _WITHOUT_EFFECT)
    }
    return dict(sorted({**kept, "training.global_batch_size": global_batch_size}.items()))


def open_run_folder(
    config: dict[str, Any], global_batch_size: int, origin: Path, strategy: TrainingStrategy
) -> tuple[Path, int]:
    """Return the run's folder and seed, the same on every rank; rank 0 makes the folder.

    Args:
        config: The composed configuration.
        global_batch_size: Samples of an optimizer step over all ranks.
        origin: What a relative ``run.root`` is relative to.
        strategy: The active one.

    Raises:
        ConfigurationError: The ranks have different configurations, the name is none, or the folder of this name belongs
            to another configuration, or cannot be written.

    Collective: every rank must call.
    """
    run, identity = config["run"], identity_of(config, global_batch_size)
    if run["name"] and not _NAME.fullmatch(run["name"]):
        raise ConfigurationError(
            f"`run.name` must be a folder below run.root (words separated by /), but is {run['name']!r}. Choose another "
            "name; the folder above it is run.root."
        )
    require_same("configuration", identity)
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:8]
    folder = origin / run["root"] / (run["name"] or f"{run['preset']}-{digest}")
    failure, seed = "", run["seed"] or 0
    if strategy.is_main and not config["dry_run"]:  # a plan touches nothing
        try:
            lock_run(folder)
            seed = _claim(folder, identity, run)
        except ConfigurationError as error:
            failure = str(error)
        except OSError as error:
            failure = (
                f"`run.root` must be a folder that can be written, but {folder} fails: {error}. Choose another one."
            )
    failure, seed = strategy.broadcast_object((failure, seed))
    if failure:
        raise ConfigurationError(failure)
    return folder, seed


def _claim(folder: Path, identity: dict[str, Any], run: dict[str, Any]) -> int:
    """Make the folder this run's, and return its seed: a drawn one is kept there for the next launch."""
    if run["fresh"] and folder.exists() and not _was_begun_by_this_job(folder):
        if not (folder / "identity.json").exists():
            raise ConfigurationError(
                f"`run.fresh` must name a run's folder, but {folder} is none. It is left as it is."
            )
        # Out of the way in one step: a kill in the middle of the removal leaves nothing that a launch would continue.
        target = folder.resolve()  # a link stays: what it leads to is the run, on another disk perhaps
        doomed = target.with_name(f".{target.name}.removed")
        shutil.rmtree(doomed, ignore_errors=True)
        target.rename(doomed)
        shutil.rmtree(doomed)
    folder.resolve().mkdir(parents=True, exist_ok=True)
    kept = folder / "identity.json"
    if kept.exists():
        known = json.loads(kept.read_text(encoding="utf-8"))
        differing = sorted(
            k for k in known["identity"].keys() | identity.keys() if known["identity"].get(k) != identity.get(k)
        )
        if differing:
            raise ConfigurationError(
                f"`run.name` must be of a run with this configuration, but {folder} was made with another "
                f"{', '.join(differing)}. Choose another name, or start over with run.fresh=true."
            )
        return int(known["seed"])
    seed = int(run["seed"]) if run["seed"] is not None else secrets.randbits(32)
    unfinished = folder / ".identity.json.tmp"
    content = {"seed": seed, "identity": identity, "job": job_name()}
    unfinished.write_text(json.dumps(content, indent=2), encoding="utf-8")
    unfinished.replace(kept)
    return seed


def _was_begun_by_this_job(folder: Path) -> bool:
    """Whether this job made the folder and was restarted since: a job starts over once, or no restart would get on."""
    kept, restarts = folder / "identity.json", num_restarts()
    if restarts == 0 or not kept.exists() or json.loads(kept.read_text(encoding="utf-8")).get("job") != job_name():
        return False
    print(f"run.fresh=true was obeyed when this job began; restart {restarts} continues the run.", flush=True)
    return True


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat.update(_flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value})
    return flat
