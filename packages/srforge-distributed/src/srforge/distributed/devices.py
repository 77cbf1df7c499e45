"""Which device and which backend: pure functions of what the user said and of what the host has."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist

from srforge.distributed.announcements import say_once
from srforge.distributed.errors import ConfigurationError

DeviceRequest: TypeAlias = str | int | torch.device | Sequence[str | int | torch.device] | None


@dataclass(frozen=True)
class Host:
    """What a host offers.

    Attributes:
        num_cuda: Number of CUDA devices that can be used, >= 0.
        has_nccl: NCCL is built into torch.
    """

    num_cuda: int
    has_nccl: bool

    @classmethod
    def of_this_process(cls) -> "Host":
        """Return what this host offers; a CUDA build without a visible GPU has no CUDA device."""
        num_cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return cls(num_cuda=num_cuda, has_nccl=dist.is_available() and dist.is_nccl_available())


def requested_devices(device: DeviceRequest) -> list[torch.device | None]:
    """Return the devices of a request in order; None stands for ``auto``.

    Args:
        device: ``auto`` or None, a device (``cpu``, ``cuda``, ``cuda:1``, ``torch.device``), the index of a CUDA
            device, or a list of such.

    Raises:
        ConfigurationError: It is no device, or an empty list.
    """
    if isinstance(device, Sequence) and not isinstance(device, str):
        if not device:
            raise ConfigurationError(
                "`device` must name at least one device, but is an empty list. Write cpu or cuda:0."
            )
        return [_one_device(entry) for entry in device]
    return [_one_device(device)]


def _one_device(device: object) -> torch.device | None:
    if device is None or device == "auto":
        return None
    if isinstance(device, torch.device):
        return device
    text = "" if isinstance(device, bool) else str(device)
    try:
        return torch.device("cuda", int(text)) if text.isdecimal() else torch.device(text)
    except RuntimeError:
        raise ConfigurationError(
            f"`device` must be auto, cpu, cuda, cuda:N, a CUDA index or a list of these, but is {device!r}. "
            "Name one of them."
        ) from None


def local_device(device: DeviceRequest, host: Host) -> torch.device:
    """Return the device of a process that trains alone.

    Raises:
        ConfigurationError: The device is not there, or the request is a list of several.
    """
    devices = requested_devices(device)
    if len(devices) > 1:
        raise ConfigurationError(
            f"`device` must be one device for the single strategy, but is {_spelled(devices)}. Name one."
        )
    if devices[0] is None:
        return torch.device("cuda", 0) if host.num_cuda else torch.device("cpu")
    return _present(devices[0], host)


def parallel_devices(device: DeviceRequest, host: Host) -> list[torch.device]:
    """Return the devices that ``DataParallel`` replicates over.

    Raises:
        ConfigurationError: One is not there, is named twice, or is no CUDA device.
    """
    devices = [_present(torch.device("cuda") if entry is None else entry, host) for entry in requested_devices(device)]
    if len(devices) > 1:
        if any(entry.type != "cuda" for entry in devices):
            raise ConfigurationError(
                f"`device` must list CUDA devices, but is {_spelled(devices)}. Use one device, or torchrun with cpu."
            )
        if len(set(devices)) < len(devices):
            raise ConfigurationError(
                f"`device` must list each device once, but is {_spelled(devices)}. Drop the repeats."
            )
    return devices


def fleet_backend_and_device(
    device: DeviceRequest, backend: str, local_rank: int, host: Host
) -> tuple[str, torch.device]:
    """Return backend and device of one rank of several.

    ``cpu`` means gloo on the CPU, on a GPU host too. ``cuda:N`` becomes ``cuda:LOCAL_RANK``. A list gives each rank its
    entry ``LOCAL_RANK``. gloo with a CUDA device runs on CUDA tensors, and there ranks may share a device.

    Args:
        device: What the user said.
        backend: ``auto``, ``nccl`` or ``gloo``.
        local_rank: Rank on this host.
        host: What this host offers.

    Raises:
        ConfigurationError: Device and backend contradict each other, or the host lacks one of them.
    """
    devices = requested_devices(device)
    if len(devices) > 1 and local_rank >= len(devices):
        raise ConfigurationError(
            f"`device` must list a device for each rank of the host, but is {_spelled(devices)} with "
            f"LOCAL_RANK={local_rank}. Start {len(devices)} processes per host, or lengthen the list."
        )
    wanted = devices[local_rank] if len(devices) > 1 else devices[0]
    on_cpu = wanted is not None and wanted.type == "cpu"
    if wanted is not None and wanted.type not in ("cpu", "cuda"):
        raise ConfigurationError(
            f"`device` must be cpu or cuda with several ranks, but is {wanted}. Choose one of them."
        )
    if wanted is not None and wanted.type == "cuda" and not host.num_cuda:
        _present(wanted, host)
    if backend == "nccl" and (on_cpu or not host.num_cuda or not host.has_nccl):
        lacking = (
            "the device is cpu" if on_cpu else "CUDA is not available" if not host.num_cuda else "torch lacks NCCL"
        )
        raise ConfigurationError(f"`backend` must be gloo or auto where {lacking}, but is nccl. Set backend=auto.")
    if backend == "auto":
        backend = "nccl" if host.num_cuda and host.has_nccl and not on_cpu else "gloo"
        if backend == "gloo" and not on_cpu and host.num_cuda:
            say_once("torch has no NCCL here: several ranks run gloo on the CPU. backend=gloo keeps CUDA tensors.")
            return backend, torch.device("cpu")
    if on_cpu or (wanted is None and backend == "gloo"):
        return backend, torch.device("cpu")
    if len(devices) > 1:
        if backend == "nccl" and len(set(devices)) < len(devices):
            raise ConfigurationError(
                f"`device` must list each device once with NCCL, but is {_spelled(devices)}. Drop the repeats, or set "
                "backend=gloo to share devices."
            )
        assert wanted is not None
        return backend, _present(wanted, host)
    return backend, _device_of_rank(wanted, backend, local_rank, host)


def _device_of_rank(wanted: torch.device | None, backend: str, local_rank: int, host: Host) -> torch.device:
    index = local_rank
    if local_rank >= host.num_cuda:
        if backend == "nccl":
            raise ConfigurationError(
                f"LOCAL_RANK must be in [0, number of CUDA devices={host.num_cuda}), but is {local_rank}: NCCL takes "
                "one rank per device. Start fewer processes per host, or set backend=gloo to share devices."
            )
        index = local_rank % host.num_cuda
    if wanted is not None and wanted.index not in (None, index):
        say_once(f"device {wanted} becomes cuda:{index}: with several ranks each takes the device of its LOCAL_RANK.")
    return torch.device("cuda", index)


def _present(device: torch.device, host: Host) -> torch.device:
    """Return ``device`` with its index if the host has it."""
    if device.type != "cuda":
        return device
    index = device.index or 0
    if index >= host.num_cuda:
        there = f"cuda:0 .. cuda:{host.num_cuda - 1}" if host.num_cuda else "no CUDA device"
        raise ConfigurationError(
            f"`device` must be a device of this host ({there}), but is {device}. Use device=auto or cpu, or check the "
            "driver and CUDA_VISIBLE_DEVICES."
        )
    return torch.device("cuda", index)


def _spelled(devices: Sequence[torch.device | None]) -> str:
    return "[" + ", ".join("auto" if device is None else str(device) for device in devices) + "]"
