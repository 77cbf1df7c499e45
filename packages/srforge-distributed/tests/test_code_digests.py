"""A change of one byte in any file that runs changes the record."""

import importlib.util
import sys
import sysconfig
import types

import srforge
from srforge.distributed.code_digests import package_digests, script_digests, versions


def load(name, path, monkeypatch):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, name, module)


def test_script_and_the_modules_of_its_folder_are_told_apart(tmp_path, monkeypatch):
    script = tmp_path / "train.py"
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
    (tmp_path / "parts").mkdir()
    (tmp_path / "unused.py").write_text("")
    seen = []
    for text in ("a = 1", "a = 2", "a = 1"):
        for path in (script, tmp_path / "model.py", tmp_path / "parts" / "head.py"):
            path.write_text(text)
        load("model_of_this_test", tmp_path / "model.py", monkeypatch)
        load("head_of_this_test", tmp_path / "parts" / "head.py", monkeypatch)
        seen.append(script_digests())
    assert set(seen[0]) == {"training script", "code of model.py", "code of parts/head.py"}
    assert seen[0] == seen[2]
    assert all(seen[0][name] != seen[1][name] for name in seen[0])


def test_an_environment_inside_the_folder_is_none_of_the_script_s_code(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text("")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "train.py"), raising=False)
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path / "env" / "lib" / "python3"))
    for number, folder in enumerate(("env/lib/python3", "env/site-packages", "lib/dist-packages")):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "part.py").write_text("")
        load(f"part_{number}_of_this_test", tmp_path / folder / "part.py", monkeypatch)
    assert set(script_digests()) == {"training script"}


def test_modules_without_a_real_file_are_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "train.py"), raising=False)
    monkeypatch.chdir(tmp_path)
    relative = types.ModuleType("relative_of_this_test")
    relative.__file__ = "_ops.py"
    monkeypatch.setitem(sys.modules, "relative_of_this_test", relative)
    monkeypatch.setitem(sys.modules, "odd_of_this_test", object())
    assert set(script_digests()) == {"training script"}


def test_without_a_script_there_is_nothing_to_compare(monkeypatch):
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    assert script_digests() == {"training script": "none"}


def test_script_that_is_gone_is_unreadable(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "gone.py"), raising=False)
    assert script_digests()["training script"] == "unreadable"


def test_every_file_of_every_package_counts(tmp_path, monkeypatch):
    package = tmp_path / "portion" / "mine"
    (package / "models").mkdir(parents=True)
    for path in (package / "__init__.py", package / "models" / "edsr.py"):
        path.write_text("")
    monkeypatch.setattr(srforge, "__path__", [*srforge.__path__, str(package.parent)])
    before = package_digests()
    assert {"code of srforge.distributed", "code of srforge.mine"} <= set(before)
    (package / "models" / "edsr.py").write_text("changed = True")
    after = package_digests()
    assert before.pop("code of srforge.mine") != after.pop("code of srforge.mine")
    assert before == after


def test_versions_name_all_five_packages():
    assert set(versions()) == {f"srforge-{name}" for name in ("distributed", "data", "track", "train", "sr")}
