from importlib import metadata
from types import SimpleNamespace

import pytest

import srforge
from srforge.distributed import ConfigurationError, start_up


@pytest.fixture
def calls(monkeypatch):
    """Stand two packages' start-up functions in for the installed ones."""
    calls = []
    points = [
        SimpleNamespace(name=name, load=lambda name=name: lambda preload: calls.append((name, preload)))
        for name in ("later", "early")
    ]
    monkeypatch.setattr(metadata, "entry_points", lambda *, group: points if group == "srforge.init" else [])
    monkeypatch.setattr(start_up, "_started_with", None)
    return calls


def test_every_registered_function_is_called_once_with_the_preload(calls):
    srforge.init(preload=("numpy",))
    srforge.init(preload=("numpy",))
    srforge.init()
    assert calls == [("early", ("numpy",)), ("later", ("numpy",))]


def test_later_preload_warns_that_it_has_no_effect(calls):
    srforge.init()
    with pytest.warns(UserWarning, match=r"`preload` must be given to the first srforge.init\(\) call, but \('cv2',\)"):
        srforge.init(preload=("cv2",))


def test_foreign_distribution_is_refused(calls, monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda name: "9.9" if name == "srforge" else "0")
    with pytest.raises(ConfigurationError, match=r"beside srforge-distributed, but version 9\.9 is"):
        srforge.init()
    assert calls == []


def test_failed_start_up_is_not_taken_for_done(monkeypatch):
    def fail(preload):
        raise OSError("no")

    monkeypatch.setattr(metadata, "entry_points", lambda *, group: [SimpleNamespace(name="x", load=lambda: fail)])
    monkeypatch.setattr(start_up, "_started_with", None)
    for _ in range(2):
        with pytest.raises(OSError, match="no"):
            srforge.init()
