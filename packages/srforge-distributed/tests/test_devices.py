import pytest
import torch

from srforge.distributed import ConfigurationError
from srforge.distributed.announcements import say_once
from srforge.distributed.devices import (
    Host,
    fleet_backend_and_device,
    local_device,
    parallel_devices,
    requested_devices,
)

CPU_HOST = Host(num_cuda=0, has_nccl=True)  # a CUDA build without a visible GPU says that NCCL is there
GPU_HOST = Host(num_cuda=2, has_nccl=True)
NO_NCCL = Host(num_cuda=2, has_nccl=False)  # Windows


@pytest.fixture(autouse=True)
def _nothing_said():
    say_once.cache_clear()


@pytest.mark.parametrize(
    ("request_", "devices"),
    [
        (None, [None]),
        ("auto", [None]),
        ("cpu", [torch.device("cpu")]),
        ("cuda", [torch.device("cuda")]),
        (1, [torch.device("cuda:1")]),
        ("1", [torch.device("cuda:1")]),
        (torch.device("cuda:3"), [torch.device("cuda:3")]),
        ([0, "cuda:1"], [torch.device("cuda:0"), torch.device("cuda:1")]),
        ((0,), [torch.device("cuda:0")]),
    ],
)
def test_request_is_read(request_, devices):
    assert requested_devices(request_) == devices


@pytest.mark.parametrize("nonsense", [True, "gpu", "cuda:x", 1.5, {}, [None, "gpu"], -1])
def test_nonsense_is_refused(nonsense):
    with pytest.raises(ConfigurationError, match="`device` must be auto, cpu, cuda, cuda:N"):
        requested_devices(nonsense)


def test_empty_list_is_refused():
    with pytest.raises(ConfigurationError, match="`device` must name at least one device, but is an empty list"):
        requested_devices([])


@pytest.mark.parametrize(
    ("device", "host", "expected"),
    [
        ("auto", CPU_HOST, "cpu"),
        ("auto", GPU_HOST, "cuda:0"),
        ("cpu", GPU_HOST, "cpu"),
        ("cuda", GPU_HOST, "cuda:0"),
        (1, GPU_HOST, "cuda:1"),
        ([1], GPU_HOST, "cuda:1"),
        ("meta", CPU_HOST, "meta"),
    ],
)
def test_device_of_one_process(device, host, expected):
    assert local_device(device, host) == torch.device(expected)


@pytest.mark.parametrize(
    ("device", "host", "message"),
    [
        ("cuda", CPU_HOST, r"`device` must be a device of this host \(no CUDA device\), but is cuda"),
        ("cuda:2", GPU_HOST, r"must be a device of this host \(cuda:0 .. cuda:1\), but is cuda:2"),
        ([0, 1], GPU_HOST, r"must be one device for the single strategy, but is \[cuda:0, cuda:1\]"),
    ],
)
def test_absent_device_of_one_process_is_refused(device, host, message):
    with pytest.raises(ConfigurationError, match=message):
        local_device(device, host)


def test_devices_of_data_parallel():
    assert parallel_devices([1, 0], GPU_HOST) == [torch.device("cuda:1"), torch.device("cuda:0")]
    assert parallel_devices(["cpu"], CPU_HOST) == [torch.device("cpu")]
    with pytest.raises(ConfigurationError, match=r"must be a device of this host \(no CUDA device\)"):
        parallel_devices([0, 1], CPU_HOST)
    with pytest.raises(ConfigurationError, match=r"`device` must list CUDA devices, but is \[cpu, cuda:0\]"):
        parallel_devices(["cpu", 0], GPU_HOST)
    with pytest.raises(ConfigurationError, match="`device` must list each device once"):
        parallel_devices([0, "cuda"], GPU_HOST)


@pytest.mark.parametrize(
    ("device", "backend", "host", "expected"),
    [
        ("auto", "auto", GPU_HOST, ("nccl", "cuda:1")),
        ("auto", "auto", CPU_HOST, ("gloo", "cpu")),
        ("cpu", "auto", GPU_HOST, ("gloo", "cpu")),
        ("cpu", "gloo", GPU_HOST, ("gloo", "cpu")),
        ("auto", "gloo", GPU_HOST, ("gloo", "cpu")),
        ("cuda", "gloo", GPU_HOST, ("gloo", "cuda:1")),
        ("cuda", "gloo", Host(num_cuda=1, has_nccl=True), ("gloo", "cuda:0")),  # two ranks share the GPU
        ("cuda:0", "auto", GPU_HOST, ("nccl", "cuda:1")),
        ([1, 0], "auto", GPU_HOST, ("nccl", "cuda:0")),
        ([0, 0], "gloo", GPU_HOST, ("gloo", "cuda:0")),
        (["cpu", "cpu"], "auto", GPU_HOST, ("gloo", "cpu")),
        ("auto", "nccl", GPU_HOST, ("nccl", "cuda:1")),
        ("auto", "auto", NO_NCCL, ("gloo", "cpu")),
        ("cuda", "auto", NO_NCCL, ("gloo", "cpu")),
        ("cuda", "gloo", NO_NCCL, ("gloo", "cuda:1")),
    ],
)
def test_device_follows_backend_and_local_rank(device, backend, host, expected):
    found_backend, found_device = fleet_backend_and_device(device, backend, 1, host)
    assert (found_backend, str(found_device)) == expected


@pytest.mark.parametrize(
    ("device", "backend", "host", "message"),
    [
        ("cuda", "auto", CPU_HOST, r"`device` must be a device of this host \(no CUDA device\), but is cuda"),
        ("cuda", "gloo", CPU_HOST, "`device` must be a device of this host"),
        ("cpu", "nccl", GPU_HOST, "`backend` must be gloo or auto where the device is cpu, but is nccl"),
        ("auto", "nccl", CPU_HOST, "`backend` must be gloo or auto where CUDA is not available, but is nccl"),
        ("auto", "nccl", NO_NCCL, "`backend` must be gloo or auto where torch lacks NCCL, but is nccl"),
        ("cuda", "auto", Host(1, has_nccl=True), r"LOCAL_RANK must be in \[0, number of CUDA devices=1\), but is 1"),
        ("meta", "auto", CPU_HOST, "`device` must be cpu or cuda with several ranks, but is meta"),
        ([0, 7], "auto", GPU_HOST, "must be a device of this host .*, but is cuda:7"),
        ([0, 0], "auto", GPU_HOST, "`device` must list each device once"),
    ],
)
def test_contradiction_is_refused(device, backend, host, message):
    with pytest.raises(ConfigurationError, match=message):
        fleet_backend_and_device(device, backend, 1, host)


def test_list_shorter_than_the_ranks_of_a_host_is_refused():
    with pytest.raises(ConfigurationError, match=r"but is \[cuda:0, cuda:1\] with LOCAL_RANK=2"):
        fleet_backend_and_device([0, 1], "auto", 2, Host(num_cuda=4, has_nccl=True))


def test_change_of_the_users_device_is_said_once(caplog):
    for _ in range(2):
        fleet_backend_and_device("cuda:0", "auto", 1, GPU_HOST)
    assert [record.message for record in caplog.records] == [
        "device cuda:0 becomes cuda:1: with several ranks each takes the device of its LOCAL_RANK."
    ]


def test_missing_nccl_on_a_gpu_host_is_said_once(caplog):
    for _ in range(2):
        fleet_backend_and_device("auto", "auto", 1, NO_NCCL)
    assert len(caplog.records) == 1
    assert "torch has no NCCL here" in caplog.text
