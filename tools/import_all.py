"""Import every module of the namespace that is installed beside this interpreter, and say how many there were.

Run by ``tools/wheels.py`` inside the environments that it makes. Modules named in the arguments and not installed are
replaced by stand-ins that answer anything: so the code is compiled, and run at module level, by a Python for which the
machine has no PyTorch. It runs on every Python that the packages support and needs only its standard library.
"""

import importlib
import pkgutil
import sys
from abc import ABCMeta
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class StandInType(ABCMeta):
    """A class whose attributes are further such classes, to inherit from, subscript, call and decorate with."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, StandInType(name, (StandIn,), {}))
        return vars(cls)[name]

    def __getitem__(cls, _item: object) -> "StandInType":
        return cls


class StandIn(metaclass=StandInType):
    """What a stand-in class makes; as a decorator it changes nothing."""

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        """Accept anything."""

    def __call__(self, function: object = None, *_args: object, **_kwargs: object) -> object:
        """Return what is decorated."""
        return function

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn()


class StandInModule(ModuleType):
    """A package of which every attribute is a stand-in class."""

    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, StandInType(name, (StandIn,), {}))
        return vars(self)[name]


class StandInFinder(MetaPathFinder, Loader):
    """Find the named packages, and all within them, when nobody else does."""

    def __init__(self, names: set[str]) -> None:
        self.names = names

    def find_spec(self, fullname: str, _path: object, _target: object = None) -> "ModuleSpec | None":
        """Return a spec for a stand-in, or None for what is not ours to replace."""
        found = fullname.partition(".")[0] in self.names
        return ModuleSpec(fullname, self, is_package=True) if found else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Make the stand-in."""
        return StandInModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leave it empty."""


def main(stand_ins: Sequence[str]) -> None:
    """Import ``srforge`` and all below it, ``__main__`` modules apart."""
    sys.meta_path.append(StandInFinder(set(stand_ins)))
    srforge = importlib.import_module("srforge")
    failed: list[str] = []
    names = [info.name for info in pkgutil.walk_packages(srforge.__path__, "srforge.", failed.append)]
    for name in names:
        if name.rpartition(".")[2] != "__main__":
            importlib.import_module(name)
    if failed or not names:
        sys.exit(f"cannot be imported: {failed or 'srforge is empty'}")
    print(f"{len(names)} modules")


if __name__ == "__main__":
    main(sys.argv[1:])
