"""Online or offline is decided in bounded time, and the decision has a reason."""

import http.server
import threading
import time

import pytest

from srforge.distributed.errors import ConfigurationError
from srforge.tracking.wandb_connection import exit_code_so_far, finish_in_time, has_key, is_reachable, resolve_mode


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    return tmp_path


@pytest.fixture
def server():
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(404)

        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{running.server_address[1]}"
        running.shutdown()
        thread.join()


@pytest.mark.parametrize("mode", ["online", "offline", "disabled"])
def test_what_was_asked_for_holds(mode, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert resolve_mode(mode, "http://127.0.0.1:1") == (mode, "asked for")


def test_the_variable_decides_where_nothing_was_asked_for(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert resolve_mode("auto", "http://127.0.0.1:1") == ("disabled", "WANDB_MODE says so")


def test_without_a_key_it_is_offline():
    mode, reason = resolve_mode("auto", "http://127.0.0.1:1")
    assert mode == "offline"
    assert "no API key" in reason


def test_with_a_key_and_no_network_it_is_offline(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert resolve_mode("auto", "http://127.0.0.1:1") == ("offline", "http://127.0.0.1:1 does not answer")


def test_with_a_key_and_a_server_it_is_online(monkeypatch, server):
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert resolve_mode("auto", server)[0] == "online"


def test_the_key_of_wandb_login_is_found(environment):
    assert not has_key("https://api.wandb.ai")
    (environment / "netrc").write_text("machine api.wandb.ai\n  login user\n  password abc\n")
    (environment / "netrc").chmod(0o600)
    assert has_key("https://api.wandb.ai")
    assert not has_key("https://wandb.example.org")


def test_a_bad_variable_is_named(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "off")
    with pytest.raises(ConfigurationError, match="WANDB_MODE must be one of online, offline, disabled, but is 'off'"):
        resolve_mode("auto", "http://127.0.0.1:1")


def test_a_server_that_accepts_and_never_answers_costs_bounded_time():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        started = time.monotonic()
        assert not is_reachable(f"http://127.0.0.1:{silent.getsockname()[1]}", seconds=0.3)
        assert time.monotonic() - started < 3


def test_only_web_addresses_are_asked(tmp_path):
    (tmp_path / "file").write_text("x")
    assert not is_reachable(f"file://{tmp_path}/file")


def test_a_finish_that_raises_is_said_and_ends():
    def broken():
        raise OSError("gone")

    with pytest.warns(UserWarning, match=r"failed to finish: OSError\('gone'\).*/run"):
        assert not finish_in_time(broken, 5, "/run")


def test_a_finish_that_never_returns_is_let_go(monkeypatch):
    monkeypatch.setattr("srforge.tracking.wandb_connection.abandon_service", lambda: None)
    held = threading.Event()
    started = time.monotonic()
    with pytest.warns(UserWarning, match="did not finish within 0.2 s and was let go.*wandb sync /run"):
        assert not finish_in_time(held.wait, 0.2, "/run")
    held.set()
    assert time.monotonic() - started < 3


def test_a_finish_in_time_is_silent():
    assert finish_in_time(lambda: None, 5, "/run")


def test_a_running_interpreter_has_no_exit_code_yet(monkeypatch):
    monkeypatch.delattr("sys.last_value", raising=False)
    assert exit_code_so_far() == 0
