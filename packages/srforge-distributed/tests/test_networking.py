import socket
import sys

import pytest

from srforge.distributed import LaunchEnvironmentError, Topology, networking
from srforge.distributed.networking import (
    interface_name,
    is_loopback,
    own_address_towards,
    own_name_on_loopback,
    refuse_unusable_network,
    resolve,
)


def fleet(address="127.0.0.1", port=29500, *, rank=0):
    return Topology(rank, rank, 2, 2, address, port)


@pytest.fixture(autouse=True)
def no_interface_asked(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)


@pytest.fixture
def listener():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


@pytest.fixture
def free_port(listener):
    return listener + 1 if listener < 65535 else listener - 1


def test_usable_network_passes(free_port):
    refuse_unusable_network(fleet(port=free_port), "gloo", hosts_store=True)


def test_unknown_host_is_named():
    with pytest.raises(
        LaunchEnvironmentError, match=r"MASTER_ADDR must be a host name that resolves.*no-such-host\.invalid"
    ):
        refuse_unusable_network(fleet("no-such-host.invalid"), "gloo", hosts_store=False)


def test_rank_0_refuses_an_address_of_another_host():
    with pytest.raises(
        LaunchEnvironmentError, match=r"MASTER_ADDR must be an address of the host of rank 0, but 192\.0\.2\.77"
    ):
        refuse_unusable_network(fleet("192.0.2.77"), "gloo", hosts_store=True)
    refuse_unusable_network(fleet("192.0.2.77", rank=1), "gloo", hosts_store=False)


def test_taken_port_is_named_with_the_cure(listener):
    with pytest.raises(
        LaunchEnvironmentError, match=rf"MASTER_PORT must be a free port.*{listener}.*torchrun --standalone"
    ):
        refuse_unusable_network(fleet(port=listener), "gloo", hosts_store=True)
    refuse_unusable_network(fleet(port=listener), "gloo", hosts_store=False)


@pytest.mark.parametrize(
    ("backend", "asked", "is_refused"),
    [
        ("gloo", "eth77", True),
        ("gloo", "lo", False),
        ("nccl", "eth77", True),
        ("nccl", "l", False),
        ("nccl", "=lo", False),
        ("nccl", "^docker", False),
        ("nccl", "eth77,lo", False),
    ],
)
def test_interface_that_is_not_there_is_named(monkeypatch, backend, asked, is_refused):
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    monkeypatch.setenv(f"{backend.upper()}_SOCKET_IFNAME", asked)
    if is_refused:
        with pytest.raises(
            LaunchEnvironmentError, match=rf"{backend.upper()}_SOCKET_IFNAME must name.*\(lo, eth0\).*eth77"
        ):
            refuse_unusable_network(fleet(), backend, hosts_store=False)
    else:
        refuse_unusable_network(fleet(), backend, hosts_store=False)


def test_own_name_is_on_loopback_where_it_leads_nowhere_else_and_no_interface_is_named(monkeypatch):
    names = {"n0": ["127.0.1.1", "192.0.2.5"], "n1": ["127.0.1.1", "::1"], "n2": []}
    monkeypatch.setattr(networking, "resolve", names.get)
    found = {}
    for name in names:
        monkeypatch.setattr(socket, "gethostname", lambda name=name: name)
        found[name] = own_name_on_loopback()
    assert found == {"n0": "", "n1": "127.0.1.1, ::1", "n2": ""}
    monkeypatch.setattr(socket, "gethostname", lambda: "n1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert own_name_on_loopback() == ""


def test_addresses():
    assert resolve("127.0.0.1") == ["127.0.0.1"]
    assert resolve("no-such-host.invalid") == []
    assert is_loopback("127.0.1.1")
    assert is_loopback("::1")
    assert not is_loopback("fe80::1%eth0")
    assert own_address_towards("127.0.0.1") == "127.0.0.1"
    assert own_address_towards("no-such-host.invalid") == "?"


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel in Linux's way")
def test_interface_is_named_by_its_address():
    assert interface_name("127.0.0.1") == "lo"
    assert interface_name("192.0.2.77") is None
