"""Ranks as threads over one store in memory."""

import os
import socket
import threading

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from srforge.distributed import LaunchEnvironmentError, Topology, arrivals
from srforge.distributed.arrivals import meet, own_record


def topology(rank, world_size):
    return Topology(rank, rank, world_size, world_size, "node-0", 29500)


def outcomes(ranks, timeout=5.0):
    """Let (topology, record) pairs meet; each one's error message, empty if it passed."""
    store, said = HashStore(), [""] * len(ranks)

    def arrive(index, where, record):
        try:
            meet(store, where, {"host": f"h{where.rank}", "pid": str(100 + where.rank), **record}, timeout)
        except LaunchEnvironmentError as error:
            said[index] = str(error)

    threads = [threading.Thread(target=arrive, args=(index, *rank)) for index, rank in enumerate(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return said


@pytest.fixture(autouse=True)
def one_meeting(monkeypatch):
    """All threads are at the first meeting: each stands for a process with a count of its own."""
    monkeypatch.setattr(arrivals, "_meetings", iter(int, 1))


def test_equal_ranks_meet():
    assert outcomes([(topology(rank, 3), {"torch": "2"}) for rank in range(3)]) == ["", "", ""]


def test_missing_ranks_are_named_by_every_rank_that_came():
    said = outcomes([(topology(rank, 4), {"torch": "2"}) for rank in (0, 2)], timeout=0.3)
    for rank, message in zip((0, 2), said, strict=True):
        assert message.startswith(
            "every rank must arrive at node-0:29500 within `timeout_minutes`, but ranks 1, 3 of 4"
        )
        assert f"(seen by rank {rank})" in message


def test_missing_rank_0_is_named():
    (message,) = outcomes([(topology(1, 2), {"torch": "2"})], timeout=0.3)
    assert "but rank 0 of 2 did not" in message


def test_what_differs_is_named_with_rank_host_and_both_values():
    said = outcomes([(topology(0, 2), {"torch": "2.6"}), (topology(1, 2), {"torch": "2.7"})])
    assert "torch is 2.6 on rank 0 (host h0, pid 100), 2.7 on rank 1 (host h1, pid 101)" in said[0]
    assert "torch is 2.7 on rank 1 (host h1, pid 101), 2.6 on rank 0 (host h0, pid 100)" in said[1]


@pytest.mark.parametrize("flawed", [0, 1])
def test_name_that_leads_the_others_to_themselves_is_refused_by_all(flawed):
    ranks = [(topology(rank, 2), {"loopback": "127.0.1.1" if rank == flawed else ""}) for rank in range(2)]
    cure = f"but is 127.0.1.1 on rank {flawed} (host h{flawed}, pid 10{flawed}). Set GLOO_SOCKET_IFNAME"
    assert all(cure in message for message in outcomes(ranks, timeout=60.0))


def test_names_on_loopback_serve_where_all_ranks_are_on_one_host():
    record = {"host": "h0", "loopback": "127.0.1.1"}
    assert outcomes([(topology(rank, 2), record) for rank in range(2)]) == ["", ""]


def test_other_world_size_is_told_without_waiting_for_the_ranks_that_it_adds():
    ranks = [(topology(0, 2), {"WORLD_SIZE": "2"}), (topology(1, 3), {"WORLD_SIZE": "3"})]
    said = outcomes(ranks, timeout=60.0)
    assert all("WORLD_SIZE is" in message for message in said)


def test_rank_taken_twice_is_refused():
    said = outcomes([(topology(0, 1), {}), (topology(0, 1), {})])
    assert sorted(map(bool, said)) == [False, True]
    assert "RANK must be another one in each process, but 0 was taken" in max(said)


def test_record_tells_who_and_what():
    record = own_record(topology(0, 2), {"`timeout_minutes`": 5.0})
    assert record["host"] == socket.gethostname()
    assert record["pid"] == str(os.getpid())
    assert record["WORLD_SIZE"] == "2"
    assert record["torch"] == torch.__version__
    assert record["`timeout_minutes`"] == "5.0"
    assert record["srforge-distributed"] != "not installed"
    assert own_record(topology(0, 2), {}) == {name: record[name] for name in record if not name.startswith("`")}


def test_module_that_one_rank_has_not_imported_is_no_difference():
    ours, theirs = {"code of model.py": "1", "code of data.py": "2"}, {"code of data.py": "2"}
    assert outcomes([(topology(0, 2), ours), (topology(1, 2), theirs)]) == ["", ""]
    said = outcomes([(topology(0, 2), ours), (topology(1, 2), {"code of model.py": "9"})])
    assert all("code of model.py is " in message for message in said)


def test_package_that_one_rank_lacks_is_a_difference():
    said = outcomes([(topology(0, 2), {"code of srforge.sr": "1"}), (topology(1, 2), {})])
    assert any("code of srforge.sr is 1 on rank 0 (host h0, pid 100), missing on rank 1" in each for each in said)
