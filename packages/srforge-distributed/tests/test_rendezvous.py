import socket
import threading

import pytest
import torch
import torch.distributed as dist

from srforge.distributed import LaunchEnvironmentError, Topology, rendezvous
from srforge.distributed.rendezvous import open_process_group, start_failure

TOPOLOGY = Topology(1, 0, 2, 1, "node-0", 29500)


@pytest.mark.parametrize(
    ("said", "cure"),
    [
        ("use_libuv was requested but PyTorch was built without libuv support", "set USE_LIBUV=0"),
        ("The server socket has failed to listen. EADDRINUSE", "torchrun --standalone, or choose another MASTER_PORT"),
        ("makeDeviceForHostname(): unsupported gloo device", "set GLOO_SOCKET_IFNAME"),
        ("Timed out after 30 seconds", "Check that rank 0 runs on MASTER_ADDR, that every host reaches it"),
        ("", "no reason given"),
        ("failed to connect to 239.85.0.0:5 (errno: 113 - No route to host).", "does not: No route to host. Check"),
    ],
)
def test_failure_says_where_and_what_cures_it(said, cure):
    message = start_failure(said, TOPOLOGY, "gloo")
    assert message.startswith("the gloo process group must open at node-0:29500 for rank 1 of 2, but does not: ")
    assert cure in message
    assert "NCCL_SOCKET_IFNAME" in start_failure("x", TOPOLOGY, "nccl")


def test_fleet_of_one_meets_in_memory():
    open_process_group(Topology.single(), "gloo", torch.device("cpu"), 1)
    assert dist.get_world_size() == 1
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_absent_rank_0_ends_in_time_with_the_cure():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        topology = Topology(1, 0, 2, 1, "127.0.0.1", probe.getsockname()[1])
        # bound, but nobody listens
        with pytest.raises(LaunchEnvironmentError, match=r"for rank 1 of 2, but does not(.|\n)*set GLOO_SOCKET_IFNAME"):
            open_process_group(topology, "gloo", torch.device("cpu"), 2 / 60)


def test_torch_without_its_distributed_package_is_said_to_be_so(monkeypatch):
    monkeypatch.setattr(dist, "is_available", lambda: False)
    with pytest.raises(LaunchEnvironmentError, match="torch must be built with its distributed package"):
        open_process_group(TOPOLOGY, "gloo", torch.device("cpu"), 1)


def test_store_that_stops_answering_while_the_ranks_meet_ends_in_time(monkeypatch):
    """As behind a cable that is cut in that moment: no call of the store returns."""
    over = threading.Event()
    monkeypatch.setattr(rendezvous, "_GRACE_SECONDS", 0.1)
    monkeypatch.setattr(rendezvous, "_open_store", lambda *_: over.wait(60))
    with pytest.raises(
        LaunchEnvironmentError, match="does not: the store stopped answering: its host ended or is cut off"
    ):
        open_process_group(TOPOLOGY, "gloo", torch.device("cpu"), 0.1 / 60)
    over.set()
