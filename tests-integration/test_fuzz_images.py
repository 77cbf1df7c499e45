"""A short run of ``fuzz_images.py``; the long one is a program: ``python tests-integration/fuzz_images.py --count 1000``."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

PROGRAM = Path(__file__).with_name("fuzz_images.py")


@pytest.fixture(scope="module")
def program():
    spec = importlib.util.spec_from_file_location("fuzz_images", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_healthy_files_give_the_pixels_of_the_strict_readers(program, tmp_path):
    files = program.seed_files()
    for index, (suffix, content) in enumerate(files):
        (tmp_path / f"{index:04d}.{suffix}").write_bytes(content)
    results = list(program.judgements(tmp_path))
    refused = [detail for _, verdict, detail in results if verdict == "refused"]
    assert len(results) == len(files)
    assert all("CMYK" in detail for detail in refused)
    assert sum(verdict == "same pixels" for _, verdict, _ in results) == len(files) - 2  # two CMYK files


def test_damaged_files_give_the_same_pixels_or_a_clear_error(program, tmp_path):
    results = program.fuzz(240, 7, tmp_path)
    assert len(results) == 240
    assert [result for result in results if result[1].startswith("WRONG")] == []
    assert {verdict for _, verdict, _ in results} == {"refused", "same pixels"}


def test_a_native_crash_is_seen_and_blamed_on_its_file(program, tmp_path, monkeypatch):
    """The harness itself can fail: a reader that dies on one file is reported, and the files after it are judged."""
    for index in range(3):
        np.save(tmp_path / f"{index}.npy", np.zeros((2, 2), np.uint8))
    stand_in = tmp_path.parent / "crashing_program.py"
    stand_in.write_text(
        PROGRAM.read_text().replace(
            "def judge(path):", "def judge(path):\n    if path.name == '1.npy':\n        os.abort()\n", 1
        )
    )
    monkeypatch.setattr(program, "__file__", str(stand_in))
    results = list(program.judgements(tmp_path))
    assert [(name, verdict) for name, verdict, _ in results] == [
        ("0.npy", "same pixels"),
        ("1.npy", "WRONG: crash"),
        ("2.npy", "same pixels"),
    ]
