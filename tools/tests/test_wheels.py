"""The wheel check bites: shared paths, missing examples and modules that do not import are found."""

import subprocess
import sys
from zipfile import ZipFile

import pytest

import wheels

PROBE = "import sys, runpy; sys.path.insert(0, sys.argv.pop(1)); runpy.run_path(sys.argv.pop(1), run_name='__main__')"


def wheel_with(path, *names):
    """Write a wheel that holds some files."""
    with ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, "")
    return path


def import_all(folder, *stand_ins):
    """Run the import probe with one more folder on the path."""
    command = [sys.executable, "-c", PROBE, str(folder), str(wheels.IMPORT_ALL), *stand_ins]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def test_a_path_in_two_wheels_is_found(tmp_path):
    one = wheel_with(tmp_path / "one.whl", "srforge/__init__.py", "srforge/one/a.py")
    two = wheel_with(tmp_path / "two.whl", "srforge/two/a.py")
    assert wheels.check_paths({"one": one, "two": two}) == "3 paths, none in two wheels"
    three = wheel_with(tmp_path / "three.whl", "srforge/three/a.py", "srforge/__init__.py")
    with pytest.raises(wheels.CheckError, match=r"srforge/__init__.py is in one and in three"):
        wheels.check_paths({"one": one, "three": three})


def test_the_example_is_the_first_python_block_under_its_heading():
    readme = (
        "```python\nno\n```\n## Example\nText.\n```bash\nno\n```\n```python\nx = 1\n\ny = 2\n```\n```python\nno\n```\n"
    )
    assert wheels.example_of(readme) == "x = 1\n\ny = 2\n"


def test_a_readme_without_example_is_refused():
    with pytest.raises(wheels.CheckError, match="must have a python block under `## Example`"):
        wheels.example_of("# A\n```python\nx = 1\n```\n")


def test_a_failing_command_is_reported_with_what_it_printed():
    with pytest.raises(wheels.CheckError, match="status 3:\nwhy"):
        wheels.run(sys.executable, "-c", "print('why'); raise SystemExit(3)")


def test_the_running_python_is_found_and_an_impossible_one_is_not():
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    found = wheels.find_python(version)
    assert found is not None
    assert wheels.run(found, "--version").startswith(f"Python {version}.")
    assert wheels.find_python("3.99") is None


@pytest.fixture
def namespace(tmp_path):
    """A namespace root with one package in it that subclasses, subscripts and decorates with a missing library."""
    package = tmp_path / "srforge" / "thing"
    package.mkdir(parents=True)
    tmp_path.joinpath("srforge", "__init__.py").touch()
    package.joinpath("__init__.py").touch()
    package.joinpath("__main__.py").write_text("raise RuntimeError('a program was run')")
    package.joinpath("model.py").write_text(
        "import absent.nn.functional as F\nfrom absent import nn\nfrom absent.utils.data import Dataset\n"
        "class Net(nn.Module):\n    @nn.no_grad()\n    def forward(self, x: nn.Tensor | None) -> 'list': return 7\n"
        "class Data(Dataset[int]): pass\nassert Net().forward(None) == 7\nDTYPES = {nn.a: nn.float32}\n"
    )
    return tmp_path


def test_modules_import_with_stand_ins_for_a_missing_library(namespace):
    finished = import_all(namespace, "absent")
    assert (finished.returncode, finished.stdout) == (0, "3 modules\n"), finished.stderr


def test_a_module_that_needs_what_is_missing_fails(namespace):
    finished = import_all(namespace, "other")
    assert finished.returncode == 1
    assert "No module named 'absent'" in finished.stderr


def test_stand_ins_do_not_hide_a_wrong_import_of_our_own(namespace):
    namespace.joinpath("srforge/thing/wrong.py").write_text("from srforge.thing.model import Missing")
    finished = import_all(namespace, "absent")
    assert "cannot import name 'Missing'" in finished.stderr
