"""Everything that is run on this repository: ``nox --list`` names the sessions, and CI runs nothing else.

All sessions share one environment, ``.nox/srforge``, with the five packages installed editable. The first call makes
it, a changed ``pyproject.toml`` or ``constraints.txt`` brings it up to date; otherwise a session starts at once.
"""

import hashlib
import os
import shutil
import sys
import sysconfig
from pathlib import Path

import nox

ROOT = Path(__file__).parent
PACKAGES = [f"packages/srforge-{name}" for name in ("distributed", "data", "track", "train", "sr")]
SHARED = ROOT / ".nox" / "srforge"
PLAIN = ROOT / ".nox" / "plain"
UNIT_TESTS = [*PACKAGES, "apps", "tools"]
TEST_VARIABLES = {"OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", "WANDB_SILENT": "true"}

nox.needs_version = ">=2024.3.2"
nox.options.sessions = ["lint", "types", "layers", "unit", "ddp_gloo"]


@nox.session(python=False)
def train(session: nox.Session) -> None:
    """Train the demo, or what the arguments say: nox -s train -- training.epochs=3."""
    _python(session, "apps/train.py", *session.posargs)


@nox.session(python=False)
def tests(session: nox.Session) -> None:
    """Run every test: the sessions unit and ddp_gloo, the second even if the first fails."""
    session.notify("unit")
    session.notify("ddp_gloo")


@nox.session(python=False)
def unit(session: nox.Session) -> None:
    """Run the unit tests of packages, apps and tools; arguments go to pytest."""
    chosen = any(Path(argument.partition("::")[0]).exists() for argument in session.posargs)
    _pytest(session, "-n", "auto", *([] if chosen else UNIT_TESTS), *session.posargs)


@nox.session(python=False)
def ddp_gloo(session: nox.Session) -> None:
    """Run the multi-process tests over gloo, on the CPU; arguments go to pytest."""
    # Each starts several processes: three at once on two cores were no quicker, and slow enough to miss time limits.
    at_once = max(2, (os.cpu_count() or 1) // 4)
    _pytest(session, "-n", str(at_once), "tests-integration", *session.posargs)


@nox.session(python=False)
def ddp_nccl(session: nox.Session) -> None:
    """Run the same multi-process cases over NCCL; a host without CUDA is told that nothing was run."""
    question = "import torch; print(torch.cuda.is_available() and torch.distributed.is_nccl_available())"
    answer = session.run(_environment(session), "-c", question, silent=True)
    if str(answer).strip() != "True":
        session.log("ddp_nccl: this host has no CUDA device with NCCL. Nothing was run.")
        return
    _pytest(session, "tests-integration", "--backend", "nccl", "--device", "cuda", *session.posargs)


@nox.session(python=False)
def lint(session: nox.Session) -> None:
    """Check rules and formatting with ruff."""
    _python(session, "-m", "ruff", "check", ".")
    _python(session, "-m", "ruff", "format", "--check", ".")


@nox.session(python=False)
def types(session: nox.Session) -> None:
    """Check types with mypy, strictly: the packages as Python 3.10 sees them, the tools as 3.11 does."""
    _python(session, "-m", "mypy", *(f"{package}/src" for package in PACKAGES), "apps")
    _python(session, "-m", "mypy", "--python-version", "3.11", "noxfile.py", *map(str, Path("tools").glob("*.py")))


@nox.session(python=False)
def layers(session: nox.Session) -> None:
    """Check the architecture: arrows, cycles, sizes, environment reads, public names."""
    _python(session, "tools/layers.py", *session.posargs)


@nox.session(python=False)
def wheels(session: nox.Session) -> None:
    """Build the five wheels; install each alone in an empty environment, import it and run its README's example."""
    _python(session, "tools/wheels.py", *session.posargs)


@nox.session(python=False)
def docs(session: nox.Session) -> None:
    """Build the documentation strictly, run the examples in it, check that no page loads anything from elsewhere."""
    python = _plain_environment(session)
    session.env["NO_MKDOCS_2_WARNING"] = "1"  # the theme's notice about its successor
    session.run(python, "-m", "mkdocs", "build", "--strict", "--quiet", *session.posargs)
    session.run(python, "tools/documentation.py", "site")


def _python(session: nox.Session, *arguments: str) -> None:
    """Run the shared environment's Python, its programs first on the path."""
    python = _environment(session)
    path = os.pathsep.join([str(Path(python).parent), os.environ.get("PATH", os.defpath)])
    session.run(python, *arguments, env={"PATH": path, "VIRTUAL_ENV": str(SHARED)})


def _pytest(session: nox.Session, *arguments: str) -> None:
    """Run pytest with one thread a process: many small processes share the cores."""
    session.env.update(TEST_VARIABLES)
    _python(session, "-m", "pytest", *arguments)


def _environment(session: nox.Session) -> str:
    """Return the shared environment's Python; make the environment, or bring it up to date, if its recipe has changed.

    The stamp is written last: what an interrupted or failed installation leaves is made anew.
    """
    python, stamp, recipe = _interpreter(SHARED), SHARED / "recipe", _recipe()
    found = stamp.read_text() if stamp.is_file() and python.exists() else ""
    if found == recipe:
        return str(python)
    if found.partition(" ")[0] != recipe.partition(" ")[0]:
        if sys.version_info < (3, 11):
            session.error(
                f"Python must be 3.11 or newer here, but is {sys.version.split()[0]}. Make .venv with another."
            )
        session.log("Making .nox/srforge with PyTorch, the packages and the tools. This takes minutes, once.")
        shutil.rmtree(SHARED, ignore_errors=True)
        session.run(sys.executable, "-m", "venv", str(SHARED))
    stamp.unlink(missing_ok=True)
    options = ["--disable-pip-version-check", *([] if sys.stdout.isatty() else ["--quiet"])]
    editable = [part for package in PACKAGES for part in ("-e", package)]
    # One command: PyTorch's pin must be known when the packages' `torch>=...` is resolved.
    session.run(str(python), "-m", "pip", "install", *options, "-r", "constraints.txt", *editable)
    stamp.write_text(recipe)
    return str(python)


def _plain_environment(session: nox.Session) -> str:
    """Return the Python of an environment in which the packages are installed as wheels, not editable.

    Documentation tools cannot follow one namespace through five editable installs. All else comes from the shared
    environment: a path named in a .pth file is searched, but .pth files found there (the editable installs) are not.
    """
    shared, python = _environment(session), str(_interpreter(PLAIN))
    if not Path(python).exists():
        session.run(shared, "-m", "venv", "--without-pip", str(PLAIN))
    Path(_site_packages(PLAIN), "shared.pth").write_text(_site_packages(SHARED))
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation", "--force-reinstall"]
    sources = [f"./{package}" for package in PACKAGES]
    session.run(shared, "-m", "pip", "--python", python, "install", *options, *sources)
    return python


def _recipe() -> str:
    """Return digests of the shared environment's interpreter and place, and of what is installed into it."""
    digest = hashlib.sha256()
    for path in ["constraints.txt", *(f"{package}/pyproject.toml" for package in PACKAGES)]:
        digest.update((ROOT / path).read_bytes())
    base = hashlib.sha256(f"{sys.version} {sys.base_prefix} {ROOT}".encode())
    return f"{base.hexdigest()} {digest.hexdigest()}"


def _interpreter(environment: Path) -> Path:
    return environment / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def _site_packages(environment: Path) -> str:
    return sysconfig.get_path("purelib", "venv", {"base": str(environment), "platbase": str(environment)})
