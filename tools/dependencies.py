"""What a package declares in its ``pyproject.toml``, as the module names that its code may import."""

import re
from functools import cache
from pathlib import Path

import tomllib

# Distributions whose module has another name.
MODULES = {
    "hydra-core": "hydra",
    "opencv-python": "cv2",
    "opencv-python-headless": "cv2",
    "pillow": "PIL",
    "pyyaml": "yaml",
    "scikit-image": "skimage",
    "scikit-learn": "sklearn",
}


@cache
def declared_modules(root: Path, package: str) -> frozenset[str]:
    """Return the third-party modules that `package` may import: its dependencies', its extras' and its siblings'.

    Args:
        root: The repository.
        package: Name of a distribution under ``packages/``.
    """
    project = tomllib.loads((root / "packages" / package / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project.get("optional-dependencies", {}).values()
    modules: set[str] = set()
    for requirement in [*project.get("dependencies", []), *(item for extra in extras for item in extra)]:
        name = distribution_name(requirement)
        if name.startswith("srforge-"):
            modules |= declared_modules(root, name) if name != package else set()
        else:
            modules.add(MODULES.get(name, name.replace("-", "_")))
    return frozenset(modules)


def distribution_name(requirement: str) -> str:
    """Return the normalised name in a requirement such as ``Scikit_Image[data]>=0.26; python_version < "4"``."""
    return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", requirement.strip(), maxsplit=1)[0]).lower()
