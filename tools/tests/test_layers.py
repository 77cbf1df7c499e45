"""The architecture check bites: a clean miniature repository passes, and one violation of each kind is found."""

import subprocess
import sys
from pathlib import Path

import pytest

import layers

PROGRAM = Path(layers.__file__)
DEPENDENCIES = {
    "srforge-distributed": ["torch>=2.6"],
    "srforge-data": ["srforge-distributed==0.1.0", "opencv-python>=4"],
    "srforge-track": ["srforge-distributed==0.1.0", "wandb"],
    "srforge-train": ["srforge-distributed==0.1.0", "tqdm", "wandb"],
    "srforge-sr": ["srforge-distributed==0.1.0", "srforge-data==0.1.0"],
}
TRAINING = "packages/srforge-train/src/srforge/training"
DATA = "packages/srforge-data/src/srforge/data"
BASE = "packages/srforge-distributed/src/srforge/distributed"


@pytest.fixture
def repository(tmp_path):
    """A repository of five packages with nothing wrong in it."""
    for package, (folder, _) in layers.ARROWS.items():
        home = tmp_path / "packages" / package
        own = home / "src" / "srforge" / folder
        own.mkdir(parents=True)
        home.joinpath("pyproject.toml").write_text(
            f'[project]\nname = "{package}"\ndependencies = {DEPENDENCIES[package]}\n'
        )
        own.joinpath("__init__.py").write_text('"""A package."""\n\n__all__ = ["one"]\n')
        own.joinpath("py.typed").touch()
    tmp_path.joinpath("packages/srforge-distributed/src/srforge/__init__.py").write_text('"""The namespace."""\n')
    tmp_path.joinpath("apps").mkdir()
    run(tmp_path, "--write")
    return tmp_path


def run(repository, *arguments):
    """Run the program on a repository."""
    command = [sys.executable, str(PROGRAM), "--root", str(repository), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def add(repository, path, text):
    """Write one file into a repository."""
    file = repository / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


VIOLATIONS = {
    "upward import": ({f"{BASE}/a.py": "import srforge.training"}, "distributed must not import srforge.training"),
    "upward import of a name": ({f"{DATA}/a.py": "from srforge import sr"}, "data must not import srforge.sr"),
    "upward relative import": ({f"{DATA}/a.py": "from ..sr import one"}, "data must not import srforge.sr"),
    "upward import inside a function": (
        {f"{BASE}/a.py": "def f():\n    from srforge.data import one"},
        "a.py:2: srforge.distributed must not import srforge.data",
    ),
    "upward import for type checkers": (
        {f"{TRAINING}/a.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from srforge.sr.m import EDSR"},
        "a.py:3: srforge.training must not import srforge.sr",
    ),
    "cycle": (
        {f"{TRAINING}/a.py": "from srforge.training.b import x", f"{TRAINING}/b.py": "from . import a"},
        "import cycle",
    ),
    "cycle of three, one for type checkers": (
        {
            f"{DATA}/a.py": "from srforge.data import b",
            f"{DATA}/b.py": "import srforge.data.c",
            f"{DATA}/c.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from srforge.data.a import x",
        },
        "srforge.data.a",
    ),
    "cycle through the index": (
        {
            f"{BASE}/__init__.py": 'from srforge.distributed.a import one\n__all__ = ["one"]',
            f"{BASE}/a.py": "from . import one",
        },
        "import cycle",
    ),
    "undeclared module": (
        {f"{DATA}/a.py": "import requests"},
        "imports requests, which its pyproject.toml does not declare",
    ),
    "hydra in a library": ({f"{TRAINING}/a.py": "import hydra.utils"}, "srforge-train must not import hydra"),
    "omegaconf in a library": ({f"{DATA}/a.py": "from omegaconf import DictConfig"}, "must not import omegaconf"),
    "wandb in train, though declared": ({f"{TRAINING}/a.py": "import wandb"}, "srforge-train must not import wandb"),
    "cv2 in train": ({f"{TRAINING}/a.py": "import cv2"}, "srforge-train must not import cv2"),
    "numpy in the base": ({f"{BASE}/a.py": "def f():\n    import numpy"}, "srforge-distributed must not import numpy"),
    "long file": ({f"{DATA}/a.py": "x = 1\n" * 301}, "at most 300 lines, but has 301"),
    "long test file": ({"packages/srforge-data/tests/test_a.py": "x = 1\n" * 401}, "at most 400 lines, but has 401"),
    "long app": ({"apps/train.py": "x = 1\n" * 301}, "at most 300 lines"),
    "long function": ({f"{DATA}/a.py": "def f():\n" + "    x = 1\n" * 60}, "at most 60 lines, but f has 61"),
    "long method": ({f"{DATA}/a.py": "class A:\n    async def f():\n" + "        x = 1\n" * 60}, "but f has 61"),
    "environ": ({f"{DATA}/a.py": "import os\nx = os.environ['HOME']"}, "a.py:2: the environment must be read in"),
    "getenv": ({f"{DATA}/a.py": "import os as _os\nx = _os.getenv('HOME')"}, "a.py:2: the environment must be read in"),
    "environ by name": ({"apps/a.py": "from os import environ"}, "a.py:1: the environment must be read in"),
    "environ in the topology's module, outside from_environment": (
        {f"{BASE}/topology.py": "import os\nclass Topology:\n    def single(cls):\n        return os.environ"},
        "topology.py:4: the environment must be read in",
    ),
    "file in the namespace's root": (
        {"packages/srforge-sr/src/srforge/__init__.py": ""},
        "srforge-sr owns srforge/sr only",
    ),
    "folder of another package": ({"packages/srforge-sr/src/srforge/data/a.py": ""}, "srforge-sr owns srforge/sr only"),
    "long namespace root": ({f"{BASE}/../__init__.py": "x = 1\n" * 31}, "must have 1 to 30 lines, but has 31"),
    "new public name": ({f"{DATA}/__init__.py": '__all__ = ["one", "two"]'}, "srforge-data: public name two is new"),
    "lost public name": ({f"{DATA}/__init__.py": "__all__ = []"}, "srforge-data: public name one is gone"),
    "no list of public names": (
        {f"{DATA}/__init__.py": "__all__ = list(globals())"},
        "must define __all__ as a plain list",
    ),
}


def test_a_clean_repository_passes(repository):
    finished = run(repository)
    assert (finished.returncode, finished.stdout) == (0, "layers: 6 files, nothing to report\n")


@pytest.mark.parametrize("kind", VIOLATIONS)
def test_a_violation_is_found(repository, kind):
    files, message = VIOLATIONS[kind]
    for path, text in files.items():
        add(repository, path, text)
    finished = run(repository)
    assert finished.returncode == 1
    assert message in finished.stdout


def test_what_is_allowed_passes(repository):
    add(repository, f"{BASE}/environment_variables.py", "import os\nx = os.environ")
    add(
        repository,
        f"{BASE}/topology.py",
        "import os\nclass Topology:\n    def from_environment(cls):\n        return os.environ",
    )
    add(
        repository,
        f"{DATA}/a.py",
        "import cv2, torch, json\nfrom srforge.distributed import one\nfrom srforge import init",
    )
    add(repository, f"{DATA}/b.py", "from .a import x\n" + "x = 1\n" * 299)
    add(repository, "packages/srforge-sr/src/srforge/sr/a.py", "import srforge.data.b")
    add(repository, "packages/srforge-data/tests/test_a.py", "import os\nx = os.environ\nimport hydra")
    add(repository, "apps/train.py", "import hydra, srforge.sr")
    assert run(repository).stdout == "layers: 13 files, nothing to report\n"


def test_a_new_public_name_passes_once_recorded(repository):
    add(repository, f"{DATA}/__init__.py", '__all__ = ["two", "one"]')
    assert run(repository, "--write").returncode == 0
    assert run(repository).returncode == 0
    assert repository.joinpath("tools/public_names/srforge-data.txt").read_text() == "one\ntwo\n"
