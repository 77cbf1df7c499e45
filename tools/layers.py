"""Check the architecture: which package may import which, module cycles, sizes, environment reads, public names.

What a linter can say about one line belongs to ruff; this program looks at the repository as a whole, and needs only
the standard library. ``python tools/layers.py`` prints one finding a line and fails if there is one; ``--write``
records the public names.
"""

import argparse
import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from dependencies import declared_modules

# Distribution -> (its folder in the namespace, the folders it may import from). The arrows of the architecture.
ARROWS = {
    "srforge-distributed": ("distributed", {"distributed"}),
    "srforge-data": ("data", {"data", "distributed"}),
    "srforge-track": ("tracking", {"tracking", "distributed"}),
    "srforge-train": ("training", {"training", "distributed"}),
    "srforge-sr": ("sr", {"sr", "data", "distributed"}),
}
FORBIDDEN_EVERYWHERE = {"hydra", "omegaconf"}  # configuration becomes objects in apps/, and nowhere else
FORBIDDEN = {"srforge-train": {"cv2", "wandb"}, "srforge-distributed": {"cv2", "wandb", "numpy", "tqdm"}}
MAX_FILE_LINES = 300
MAX_TEST_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_ROOT_LINES = 30
ENVIRONMENT_NAMES = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
FOLDERS = ("packages", "apps", "tests-integration", "benchmarks", "tools")


@dataclass(frozen=True)
class Source:
    """One Python file.

    Args:
        path: Its place, relative to the repository.
        text: Its content.
        package: The distribution it is shipped in, or None.
        module: The dotted name it is imported by, or None outside a distribution.
    """

    path: Path
    text: str
    package: str | None
    module: str | None

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed content."""
        return ast.parse(self.text, str(self.path))

    @property
    def is_test(self) -> bool:
        """Whether the file is a test or serves only tests."""
        return "tests" in self.path.parts or self.path.parts[0] == "tests-integration"


def read_sources(root: Path) -> list[Source]:
    """Return every Python file of the repository at `root`, sorted by path."""
    paths = sorted(path for folder in FOLDERS for path in (root / folder).rglob("*.py")) + sorted(root.glob("*.py"))
    sources = []
    for path in (path.relative_to(root) for path in paths):
        parts = path.parts
        shipped = len(parts) > 3 and parts[0] == "packages" and parts[2] == "src"
        names = [*parts[3:-1], *([] if path.stem == "__init__" else [path.stem])]
        module = ".".join(names) if shipped else None
        sources.append(Source(path, (root / path).read_text(encoding="utf-8"), parts[1] if shipped else None, module))
    return sources


def imported_names(source: Source) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of all that a file imports, wherever in it; ``from a import b`` yields ``a.b``."""
    base = (source.module or "").split(".")
    if source.path.stem != "__init__":
        base = base[:-1]
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parent = base[: len(base) - node.level + 1] if node.level else []
            prefix = ".".join([*parent, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{prefix}.{alias.name}") for alias in node.names)


def check_arrows(sources: list[Source], root: Path) -> Iterator[str]:
    """Find imports that point upward, third-party modules that a package does not declare, and forbidden ones."""
    for source in sources:
        if source.package not in ARROWS:
            continue
        own, allowed = ARROWS[source.package]
        forbidden = FORBIDDEN_EVERYWHERE | FORBIDDEN.get(source.package, set())
        declared = declared_modules(root, source.package)
        for line, name in imported_names(source):
            top, _, rest = name.partition(".")
            place = f"{source.path}:{line}"
            if top == "srforge":
                sibling = rest.partition(".")[0]
                if sibling in {folder for folder, _ in ARROWS.values()} - allowed:
                    yield f"{place}: srforge.{own} must not import srforge.{sibling}: the arrow points upward."
            elif top in forbidden:
                yield f"{place}: {source.package} must not import {top}."
            elif top not in sys.stdlib_module_names and top not in declared:
                yield f"{place}: {source.package} imports {top}, which its pyproject.toml does not declare."


def check_cycles(sources: list[Source]) -> Iterator[str]:
    """Find modules that import each other, also when they do so inside functions or for type checkers only."""
    modules = {source.module for source in sources if source.module}
    graph: dict[str, set[str]] = {}
    for source in sources:
        if source.module is None:
            continue
        found = {_module_of(name, modules) for _, name in imported_names(source)}
        graph[source.module] = {name for name in found if name is not None and name != source.module}
    while cycle := _first_cycle(graph):
        yield f"import cycle: {' -> '.join(cycle)}"
        graph[cycle[0]].discard(cycle[1])  # go on to the next one


def _first_cycle(graph: dict[str, set[str]]) -> list[str]:
    """Return the nodes along a cycle, the first one repeated at its end; nothing if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])[::-1]
    return []


def _module_of(name: str, modules: set[str]) -> str | None:
    """Return the module that provides an imported name, or None if it is not ours."""
    while name:
        if name in modules:
            return name
        name = name.rpartition(".")[0]
    return None


def check_sizes(sources: list[Source]) -> Iterator[str]:
    """Find files and functions that are too long to be read at once."""
    for source in sources:
        num_lines = len(source.text.splitlines())
        limit = MAX_TEST_FILE_LINES if source.is_test else MAX_FILE_LINES
        if num_lines > limit:
            yield f"{source.path}: a file must have at most {limit} lines, but has {num_lines}."
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if num_lines > MAX_FUNCTION_LINES:
                    rule = f"a function must have at most {MAX_FUNCTION_LINES} lines, but {node.name} has {num_lines}."
                    yield f"{source.path}:{node.lineno}: {rule}"


def check_environment(sources: list[Source]) -> Iterator[str]:
    """Find uses of the process environment outside the modules that document it."""
    for source in sources:
        exempt = source.is_test or source.path.name == "environment_variables.py"
        if exempt or source.path.parts[0] not in {"packages", "apps"}:
            continue
        documented = _topology_lines(source)
        for line in _environment_uses(source.tree):
            if line not in documented:
                rule = "the environment must be read in environment_variables.py. Add a constant and a function there."
                yield f"{source.path}:{line}: {rule}"


def _environment_uses(tree: ast.Module) -> Iterator[int]:
    """Yield the lines that use ``os.environ`` and its like, under whatever name the file imports them."""
    modules = {"os"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.asname for alias in node.names if alias.name == "os" and alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            yield from (node.lineno for alias in node.names if alias.name in ENVIRONMENT_NAMES)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT_NAMES and ast.unparse(node.value) in modules:
            yield node.lineno


def _topology_lines(source: Source) -> range:
    """Return the lines of ``Topology.from_environment``, which reads the launcher's variables itself."""
    if source.module == "srforge.distributed.topology":
        for node in source.tree.body:
            for item in node.body if isinstance(node, ast.ClassDef) and node.name == "Topology" else []:
                if isinstance(item, ast.FunctionDef) and item.name == "from_environment":
                    return range(item.lineno, (item.end_lineno or item.lineno) + 1)
    return range(0)


def check_namespace(root: Path) -> Iterator[str]:
    """Find files outside the one folder that a package owns, and a namespace root that has grown logic."""
    for package, (own, _) in ARROWS.items():
        namespace = Path("packages", package, "src", "srforge")
        owned = {own, *(["__init__.py"] if package == "srforge-distributed" else [])}
        for path in sorted((root / namespace).glob("*")):
            if path.name not in owned and path.name != "__pycache__":
                yield f"{namespace / path.name}: {package} owns srforge/{own} only."
        if not (root / namespace / own / "py.typed").is_file():
            yield f"{namespace / own}: py.typed is missing."
    index = root / "packages/srforge-distributed/src/srforge/__init__.py"
    num_lines = len(index.read_text(encoding="utf-8").splitlines()) if index.is_file() else 0
    if not 0 < num_lines <= MAX_ROOT_LINES:
        yield f"{index.relative_to(root)}: must have 1 to {MAX_ROOT_LINES} lines, but has {num_lines}."


def public_names(root: Path, package: str) -> list[str] | None:
    """Return the ``__all__`` of a package's index; None if it is missing or no plain list of strings."""
    index = root / "packages" / package / "src" / "srforge" / ARROWS[package][0] / "__init__.py"
    for node in ast.parse(index.read_text(encoding="utf-8")).body if index.is_file() else []:
        if isinstance(node, ast.Assign) and [getattr(target, "id", "") for target in node.targets] == ["__all__"]:
            try:
                return sorted(ast.literal_eval(node.value))
            except ValueError:
                return None
    return None


def check_public_names(root: Path, *, write: bool = False) -> Iterator[str]:
    """Find public names that were added or removed without a change to the list in ``tools/public_names``."""
    for package in ARROWS:
        record = root / "tools" / "public_names" / f"{package}.txt"
        names = public_names(root, package)
        if names is None:
            yield f"{package}: the package's index must define __all__ as a plain list of strings."
            continue
        if write:
            record.parent.mkdir(parents=True, exist_ok=True)
            record.write_text("".join(f"{name}\n" for name in names))
        recorded = record.read_text().split() if record.is_file() else []
        for name in sorted(set(names) ^ set(recorded)):
            change = "new" if name in names else "gone"
            yield f"{package}: public name {name} is {change}. If this is meant: python tools/layers.py --write"


def main() -> int:
    """Print the findings of all checks and return the exit status."""
    parser = argparse.ArgumentParser(description="Check the architecture of the repository.")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1], help="the repository")
    parser.add_argument("--write", action="store_true", help="record the public names as they are")
    arguments = parser.parse_args()
    root: Path = arguments.root
    sources = read_sources(root)
    findings = [
        *check_arrows(sources, root),
        *check_cycles(sources),
        *check_sizes(sources),
        *check_environment(sources),
        *check_namespace(root),
        *check_public_names(root, write=arguments.write),
    ]
    print("\n".join(findings) if findings else f"layers: {len(sources)} files, nothing to report")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
