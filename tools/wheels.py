"""Build the five wheels and prove that each works alone.

For each package: an empty environment, the wheel with what it declares (PyTorch pinned, siblings from the wheels just
built), ``pip check``, an import of every module, the example of its README. Over all of them: no path occurs in two wheels,
and the base package loads none of the others' libraries. Where other supported Pythons are on the machine, the wheels are
installed there without dependencies, byte-compiled, and imported with stand-ins in the place of third-party packages.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from zipfile import ZipFile

from dependencies import declared_modules
from layers import ARROWS

ROOT = Path(__file__).resolve().parents[1]
IMPORT_ALL = Path(__file__).with_name("import_all.py")
OTHER_PYTHONS = ("3.10", "3.12", "3.13")
HEAVY = ("cv2", "wandb", "hydra", "tqdm", "numpy")
TIMEOUT_SECONDS = 600


class CheckError(Exception):
    """A wheel breaks a promise; the message says which."""


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """Run a command and return its output.

    Raises:
        CheckError: The command failed; with all that it printed.
    """
    words = [str(word) for word in command]
    finished = subprocess.run(
        words, cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=TIMEOUT_SECONDS, check=False,
    )  # fmt: skip
    if finished.returncode:
        msg = f"{' '.join(words)}\nended with status {finished.returncode}:\n{finished.stdout}"
        raise CheckError(msg)
    return finished.stdout.strip()


def pip(*arguments: str | Path, python: str | Path = sys.executable) -> str:
    """Run this environment's pip on `python`'s environment, which needs no pip of its own."""
    return run(sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python, *arguments)


def build(folder: Path) -> dict[str, Path]:
    """Build all wheels into `folder`; return them by package."""
    sources = [ROOT / "packages" / package for package in ARROWS]
    pip("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, *sources)
    return {package: next(folder.glob(f"{package.replace('-', '_')}-*.whl")) for package in ARROWS}


def check_paths(wheels: dict[str, Path]) -> str:
    """Compare the paths in the wheels.

    Raises:
        CheckError: A path is in two of them.
    """
    owners: dict[str, str] = {}
    for package, wheel in wheels.items():
        with ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name in owners:
                    msg = f"{name} is in {owners[name]} and in {package}."
                    raise CheckError(msg)
                owners[name] = package
    return f"{len(owners)} paths, none in two wheels"


def example_of(readme: str) -> str:
    """Return the first Python block under the heading ``## Example``.

    Raises:
        CheckError: There is none.
    """
    found = re.search(r"^## Example$.*?^```python\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    if found is None:
        msg = "README.md must have a python block under `## Example`, but has none."
        raise CheckError(msg)
    return found[1]


def check_alone(package: str, wheel: Path) -> str:
    """Install one wheel into an empty environment and use it there."""
    start = time.monotonic()
    pin = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    with tempfile.TemporaryDirectory(prefix=f"{package}-") as folder:
        python = _empty_environment(sys.executable, Path(folder))
        options: list[str | Path] = [
            "--quiet",
            "--no-compile",
            "--find-links",
            wheel.parent,
            "--constraint",
            ROOT / "constraints.txt",
        ]
        pip("install", *options, pin, wheel, python=python)
        pip("check", python=python)
        imported = run(python, "-I", IMPORT_ALL, cwd=Path(folder))
        example = Path(folder, "example.py")
        example.write_text(example_of((ROOT / "packages" / package / "README.md").read_text(encoding="utf-8")))
        run(python, "-I", example, cwd=Path(folder))
    return f"{imported.splitlines()[-1]} imported, example run ({time.monotonic() - start:.0f} s)"


def check_light() -> str:
    """Import the base package where everything is installed, and see what comes with it.

    Raises:
        CheckError: It loads a library that belongs to another package, and that PyTorch does not load itself.
    """
    question = (
        "import sys, torch\nbefore = set(sys.modules)\nimport srforge.distributed\nprint(*set(sys.modules) - before)"
    )
    loaded = {name.partition(".")[0] for name in run(sys.executable, "-c", question).split()}
    if unwanted := loaded.intersection(HEAVY):
        msg = (
            f"import srforge.distributed must load none of {', '.join(HEAVY)}, but loads {', '.join(sorted(unwanted))}."
        )
        raise CheckError(msg)
    return f"import srforge.distributed loads none of {', '.join(HEAVY)}"


def check_other_python(version: str, wheels: dict[str, Path]) -> str:
    """Install all wheels under another Python, without what they depend on, compile and import them."""
    interpreter = find_python(version)
    if interpreter is None:
        return "not on this machine: nothing checked"
    stand_ins = sorted(frozenset().union(*(declared_modules(ROOT, package) for package in ARROWS)))
    with tempfile.TemporaryDirectory(prefix=f"python{version}-") as folder:
        python = _empty_environment(interpreter, Path(folder))
        pip("install", "--quiet", "--no-deps", "--no-compile", *wheels.values(), python=python)
        site_packages = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
        run(python, "-W", "error", "-m", "compileall", "-q", Path(site_packages, "srforge"))
        imported = run(python, "-I", IMPORT_ALL, *stand_ins, cwd=Path(folder))
    return f"installed without dependencies, compiled, {imported} imported with stand-ins for {' '.join(stand_ins)}"


def find_python(version: str) -> str | None:
    """Return an interpreter of `version` from pyenv's folder or the path, or None if there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    candidates = [str(path) for path in sorted(pyenv.glob(f"versions/{version}.*/bin/python"))]
    for candidate in [*candidates, shutil.which(f"python{version}")]:
        if candidate is not None and _is_python(candidate, version):
            return candidate
    return None


def _is_python(path: str, version: str) -> bool:
    """Whether a program starts and is that Python: pyenv's shims exist for versions that it will not start."""
    try:
        return run(path, "-c", "import sys; print('%d.%d' % sys.version_info[:2])") == version
    except CheckError:
        return False


def _empty_environment(interpreter: str, folder: Path) -> Path:
    """Make an environment with nothing in it, not even pip, and return its Python."""
    run(interpreter, "-m", "venv", "--without-pip", folder / "environment")
    return folder / "environment" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def main() -> int:
    """Run all checks, two at a time; print one line for each and return the exit status."""
    with tempfile.TemporaryDirectory(prefix="wheels-") as folder, ThreadPoolExecutor(2) as pool:
        wheels = build(Path(folder))
        jobs = {f"{package} alone": pool.submit(check_alone, package, wheel) for package, wheel in wheels.items()}
        jobs["paths"] = pool.submit(check_paths, wheels)
        jobs["base"] = pool.submit(check_light)
        jobs |= {f"Python {name}": pool.submit(check_other_python, name, wheels) for name in OTHER_PYTHONS}
        return max([_report(name, job) for name, job in jobs.items()])


def _report(name: str, job: "Future[str]") -> int:
    """Print what a check found; return 1 if it failed."""
    try:
        print(f"{name}: {job.result()}", flush=True)
    except (CheckError, subprocess.TimeoutExpired) as error:
        print(f"{name}: FAILED\n{error}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
