import multiprocessing
from importlib import metadata
from multiprocessing import forkserver

import pytest

from srforge.data import start_up


@pytest.fixture
def calls(monkeypatch):
    made = []
    monkeypatch.setattr(start_up, "pin_opencv_threads", lambda: made.append("pin"))
    monkeypatch.setattr(start_up, "arm_hang_reports", lambda: made.append("arm"))
    monkeypatch.setattr(forkserver, "ensure_running", lambda: made.append("start"))
    monkeypatch.setattr(forkserver, "set_forkserver_preload", made.append)
    monkeypatch.setattr(start_up, "_wanted", start_up.PRELOADED)
    return made


def test_init_pins_arms_and_starts_the_server_with_the_preload(calls):
    start_up.initialise(("my_dataset",))
    assert calls == ["pin", "arm", [*start_up.PRELOADED, "my_dataset"], "start"]


def test_a_server_that_is_started_again_preloads_the_same(calls):
    start_up.initialise(("my_dataset",))
    start_up.start_fork_server()
    assert calls[-2:] == [[*start_up.PRELOADED, "my_dataset"], "start"]


def test_our_own_package_is_preloaded_first_for_it_ties_the_server_to_its_rank():
    assert start_up.PRELOADED[0] == "srforge.data"
    assert {"torch", "numpy", "cv2"} <= set(start_up.PRELOADED)


def test_a_worker_that_imports_the_main_script_again_starts_nothing(calls, monkeypatch):
    monkeypatch.setattr(start_up, "parent_process", object)
    start_up.initialise()
    assert calls == []


def test_platform_without_a_fork_server_starts_none(calls, monkeypatch):
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    start_up.initialise()
    assert calls == ["pin", "arm"]
    assert not start_up.start_fork_server()


def test_it_is_registered_for_srforge_init():
    registered = {point.value for point in metadata.entry_points(group="srforge.init")}
    assert "srforge.data.start_up:initialise" in registered
