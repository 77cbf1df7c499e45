"""What a process runs, in short digests: two hosts with different copies of the code would train something nobody asked for."""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import srforge

_DISTRIBUTIONS = tuple(f"srforge-{name}" for name in ("distributed", "data", "track", "train", "sr"))


def versions() -> dict[str, str]:
    """Return the version of each SR-Forge package, ``not installed`` for those that are not there."""
    installed = {found.name: found.version for name in _DISTRIBUTIONS for found in metadata.distributions(name=name)}
    return {name: installed.get(name, "not installed") for name in _DISTRIBUTIONS}


def package_digests() -> dict[str, str]:
    """Return a digest of each SR-Forge package's files: an editable installation changes without its version."""
    folders = {folder for portion in srforge.__path__ for folder in Path(portion).glob("*/") if folder.is_dir()}
    return {
        f"code of srforge.{folder.name}": _digest(folder, folder.rglob("*.py"))
        for folder in sorted(folders)
        if (folder / "__init__.py").is_file()
    }


def script_digests() -> dict[str, str]:
    """Return a digest of the running script, and of each module from its folder that has been imported so far."""
    main = getattr(sys.modules["__main__"], "__file__", None)
    if not isinstance(main, str):
        return {"training script": "none"}
    script = Path(main).resolve()
    found = {"training script": _digest(script.parent, [script])}
    for module in list(sys.modules.values()):
        path = _file_of(module)
        if path is None or path == script or not path.is_relative_to(script.parent) or _is_installed(path):
            continue
        name = path.relative_to(script.parent).as_posix()
        found[f"code of {name}"] = _digest(script.parent, [path])
    return found


def _is_installed(path: Path) -> bool:
    """Whether a file belongs to Python or to a package that was installed, in an environment inside the script's folder."""
    in_packages = not {"site-packages", "dist-packages"}.isdisjoint(path.parts)
    return in_packages or path.is_relative_to(Path(sysconfig.get_path("stdlib")).resolve())


def _file_of(module: object) -> Path | None:
    path = getattr(module, "__dict__", {}).get("__file__")  # asked itself, a lazy module would be loaded
    if isinstance(path, str) and path.endswith(".py") and Path(path).is_absolute():
        return Path(path).resolve()
    return None


def _digest(root: Path, paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    try:
        for path in sorted(paths):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    except OSError:
        return "unreadable"
    return digest.hexdigest()[:12]
