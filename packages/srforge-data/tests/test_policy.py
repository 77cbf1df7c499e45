import multiprocessing
import warnings

import pytest

from srforge.data import worker_policy
from srforge.data.policy import start_method_of

LINUX = ["fork", "spawn", "forkserver"]


def policy(num_workers=2, device_type="cpu", start_methods=LINUX, **given):
    return worker_policy(num_workers=num_workers, device_type=device_type, start_methods=start_methods, given=given)


def test_workers_come_from_a_fork_server_and_live_on():
    assert policy() == {
        "num_workers": 2,
        "multiprocessing_context": "forkserver",
        "persistent_workers": True,
        "pin_memory": False,
    }


def test_memory_is_pinned_for_cuda_only_whatever_was_asked():
    assert policy(device_type="cuda")["pin_memory"] is True
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # silent: it has no meaning there
        assert policy(pin_memory=True)["pin_memory"] is False
        assert policy(device_type="mps", pin_memory=True)["pin_memory"] is False


@pytest.mark.parametrize("start_methods", [["spawn"], ["spawn", "fork"]])
def test_platforms_without_a_fork_server_keep_their_own_start_method(start_methods):
    assert "multiprocessing_context" not in policy(start_methods=start_methods)


def test_order_of_the_offered_start_methods_does_not_matter():
    """Python 3.14 on Linux lists the fork server first, as its default."""
    assert policy(start_methods=["forkserver", "spawn", "fork"]) == policy()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("multiprocessing_context", "fork"),
        ("multiprocessing_context", multiprocessing.get_context("spawn")),
        ("persistent_workers", False),
        ("prefetch_factor", 7),
        ("worker_init_fn", print),
        ("collate_fn", list),
        ("generator", object()),
        ("timeout", 5),
        ("in_order", False),
    ],
)
def test_explicit_arguments_win(name, value):
    assert policy(**{name: value})[name] is value


def test_explicit_pinning_wins_on_cuda():
    assert policy(device_type="cuda", pin_memory=False)["pin_memory"] is False


def test_without_workers_there_is_nothing_to_start():
    assert policy(num_workers=0) == {"num_workers": 0, "pin_memory": False}


@pytest.mark.parametrize(
    "given",
    [{"persistent_workers": True}, {"prefetch_factor": 4}, {"multiprocessing_context": "fork"}, {"timeout": 60}],
)
def test_worker_options_without_workers_warn_that_they_have_no_effect(given):
    with pytest.warns(UserWarning, match=f"`{next(iter(given))}` must come with num_workers > 0, but num_workers is 0"):
        assert policy(num_workers=0, **given) == {"num_workers": 0, "pin_memory": False}


def test_start_method_is_the_chosen_or_the_interpreters_own(monkeypatch):
    assert start_method_of({"multiprocessing_context": "fork"}) == "fork"
    assert start_method_of({"multiprocessing_context": multiprocessing.get_context("spawn")}) == "spawn"
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda: "forkserver")
    assert start_method_of({}) == "forkserver"
