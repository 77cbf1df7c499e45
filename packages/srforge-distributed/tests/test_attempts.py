import threading

import pytest
import torch.distributed as dist

from srforge.distributed import LaunchEnvironmentError, Topology, attempts
from srforge.distributed.attempts import name_attempt


def topology(rank, world_size):
    return Topology(rank, rank, world_size, world_size, "node-0", 29500)


def names_of(store, world_size):
    """Name an attempt by as many threads as there are ranks."""
    names = {}

    def run(rank):
        names[rank] = name_attempt(store, topology(rank, world_size), 10.0)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in reversed(range(world_size))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return names


def test_all_ranks_have_one_name_and_every_attempt_on_one_store_another():
    store = dist.HashStore()
    attempts = [names_of(store, 4) for _ in range(3)]
    for names in attempts:
        assert sorted(names) == [0, 1, 2, 3]
        assert len(set(names.values())) == 1
    assert len({names[0] for names in attempts}) == 3


def test_what_dead_ranks_left_is_not_taken_for_an_arrival():
    store = dist.HashStore()
    names_of(store, 3)  # rank 2 of the next attempt never comes, but its old greeting stands
    other = threading.Thread(target=name_attempt, args=(store, topology(1, 3), 5.0))
    other.start()
    with pytest.raises(
        LaunchEnvironmentError, match=r"at node-0:29500 within `timeout_minutes`, but rank 2 of 3 did not"
    ):
        name_attempt(store, topology(0, 3), 0.5)
    other.join()


def test_rank_0_says_once_whom_it_waits_for(monkeypatch, caplog):
    monkeypatch.setattr(attempts, "FIRST_MESSAGE_SECONDS", 0.1)
    with pytest.raises(LaunchEnvironmentError, match="ranks 1, 2 of 3"):
        name_attempt(dist.HashStore(), topology(0, 3), 0.5)
    assert [record.message for record in caplog.records] == ["waiting for ranks 1, 2 of 3, up to 0 s more"]


def test_rank_0_that_never_comes_is_named():
    with pytest.raises(LaunchEnvironmentError, match="but rank 0 of 2 did not"):
        name_attempt(dist.HashStore(), topology(1, 2), 0.2)


def test_one_rank_names_its_attempt_alone():
    assert name_attempt(dist.HashStore(), topology(0, 1), 1.0)
