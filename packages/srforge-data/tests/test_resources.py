import sys
from pathlib import Path

import pytest

from srforge.data import resources
from srforge.data.resources import MachineLimits, read_limits, resource_warnings

GIB = 2**30


def messages(limits, *, num_workers=2, prefetch_factor=2, pickle_bytes=0, local_world_size=1):
    return resource_warnings(
        limits,
        num_workers=num_workers,
        prefetch_factor=prefetch_factor,
        pickle_bytes=pickle_bytes,
        local_world_size=local_world_size,
    )


def test_a_usual_machine_gives_no_message():
    usual = MachineLimits(open_files=1024, files_in_use=40, shared_memory=8 * GIB, memory=32 * GIB, cores=8)
    assert messages(usual, num_workers=8, pickle_bytes=2**20) == []
    assert messages(MachineLimits()) == []  # nothing is known: nothing is said


def test_low_limit_of_open_files_is_named_with_the_need_and_the_cure():
    (message,) = messages(MachineLimits(open_files=256, files_in_use=60))
    assert "ulimit -n) must be about 620 for 2 workers with 4 batches ahead, but is 256" in message
    assert "ulimit -n 65535" in message
    assert "file_system" in message


def test_small_shared_memory_is_named_with_the_room_per_batch():
    (message,) = messages(MachineLimits(shared_memory=16 * 2**20))
    assert "/dev/shm must hold the 4 batches" in message
    assert "16 MiB free: 4.0 MiB a batch" in message
    assert "--shm-size" in message


def test_ranks_of_one_machine_share_its_memory():
    limits = MachineLimits(memory=10 * GIB)
    assert messages(limits, pickle_bytes=2 * GIB) == []
    (message,) = messages(limits, pickle_bytes=2 * GIB, local_world_size=4)
    assert "8 copies of the pickled data set (16.0 GiB)" in message
    assert "10.0 GiB are available" in message


def test_more_workers_than_cores_over_all_local_ranks_are_named():
    assert messages(MachineLimits(cores=8), num_workers=4, local_world_size=2) == []
    (message,) = messages(MachineLimits(cores=8), num_workers=4, local_world_size=3)
    assert "at most its 8 cores, but is 4 x 3. Set num_workers to 2." in message


@pytest.mark.skipif(sys.platform != "linux", reason="compares with /proc")
def test_limits_are_read_from_the_machine(monkeypatch):
    import resource

    limits = read_limits()
    assert limits.open_files == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert limits.files_in_use >= 3
    assert 0 < limits.memory < 2**50
    assert 1 <= limits.cores <= 4096
    real = Path.read_text
    group = {
        "/sys/fs/cgroup/memory.max": str(3 * 2**20),
        "/sys/fs/cgroup/memory.current": str(2**20),
        "/sys/fs/cgroup/cpu.max": "150000 100000",
    }
    monkeypatch.setattr(
        resources.Path, "read_text", lambda path, **options: group.get(str(path)) or real(path, **options)
    )
    assert read_limits().memory == 2 * 2**20
    assert read_limits().cores == 1
