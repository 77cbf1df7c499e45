"""What can be known of the network before a socket waits: names that do not resolve, interfaces that are not there."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
import sys
from collections.abc import Sequence

from srforge.distributed.environment_variables import (
    GLOO_SOCKET_IFNAME,
    MASTER_ADDR,
    MASTER_PORT,
    NCCL_SOCKET_IFNAME,
    asked_interface,
)
from srforge.distributed.errors import LaunchEnvironmentError
from srforge.distributed.topology import Topology

_SIOCGIFADDR = 0x8915  # Linux: the address of an interface


def refuse_unusable_network(topology: Topology, backend: str, *, hosts_store: bool) -> None:
    """Refuse to wait for a connection that cannot come about.

    Args:
        topology: Place in the fleet, with an address.
        backend: ``nccl`` or ``gloo``.
        hosts_store: This process listens at the address itself (rank 0, unless torchrun does it).

    Raises:
        LaunchEnvironmentError: The address does not resolve or is not this host's, the port is taken, the interface is
            not there.
    """
    assert topology.master_addr is not None
    assert topology.master_port is not None
    addresses = resolve(topology.master_addr)
    if not addresses:
        raise LaunchEnvironmentError(
            f"{MASTER_ADDR} must be a host name that resolves here, but is {topology.master_addr!r} (rank {topology.rank} "
            f"on {socket.gethostname()}). Give rank 0's address, or add the name to this host's resolver."
        )
    if hosts_store:
        _refuse_address(topology.master_addr, addresses, topology.master_port)
    _refuse_missing_interface(backend, [name for _, name in socket.if_nameindex()])


def resolve(host: str) -> list[str]:
    """Return the addresses of a host name; none if it does not resolve."""
    try:
        return sorted({str(found[4][0]) for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)})
    except (OSError, UnicodeError):
        return []


def is_loopback(address: str) -> bool:
    """Return whether an address leads back to the host that uses it."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def own_name_on_loopback() -> str:
    """Return where this host's own name leads if only this host is there and gloo is to go by the name, else empty."""
    own = resolve(socket.gethostname())
    return ", ".join(own) if all(map(is_loopback, own)) and not asked_interface(GLOO_SOCKET_IFNAME) else ""


def own_address_towards(host: str) -> str:
    """Return this host's own address on the way to another, ``?`` if there is no way; sends nothing."""
    for address in resolve(host):
        try:
            with socket.socket(_family(address), socket.SOCK_DGRAM) as probe:
                probe.connect((address, 9))
                return str(probe.getsockname()[0])
        except OSError:  # noqa: PERF203 - a host has few addresses
            continue
    return "?"


def interface_name(address: str) -> str | None:
    """Return the name of the network interface that has an IPv4 address; None where that cannot be known."""
    if sys.platform != "linux":
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _refuse_address(name: str, addresses: Sequence[str], port: int) -> None:
    """Refuse an address that rank 0 cannot listen at: of another host, or with its port taken."""
    foreign = []
    for address in addresses:
        with socket.socket(_family(address)) as probe:
            try:
                probe.bind((address, 0))
            except OSError:
                foreign.append(address)
    if len(foreign) == len(addresses):
        raise LaunchEnvironmentError(
            f"{MASTER_ADDR} must be an address of the host of rank 0, but {name} ({', '.join(addresses)}) is none of "
            f"{socket.gethostname()}'s. Export the address of the host on which rank 0 runs, or move RANK=0 there."
        )
    with socket.socket(_family(addresses[0])) as probe:
        probe.settimeout(1.0)
        if probe.connect_ex((addresses[0], port)) == 0:
            raise LaunchEnvironmentError(
                f"{MASTER_PORT} must be a free port of rank 0's host, but something listens on {port}: another job? Launch "
                f"with torchrun --standalone, which finds one, or choose another {MASTER_PORT}."
            )


def _refuse_missing_interface(backend: str, present: Sequence[str]) -> None:
    variable = NCCL_SOCKET_IFNAME if backend == "nccl" else GLOO_SOCKET_IFNAME
    asked = asked_interface(variable)
    # NCCL takes prefixes, a leading = for the exact name and ^ for all but these.
    names = [] if asked.startswith("^") else [name.strip() for name in asked.lstrip("=").split(",") if name.strip()]
    for name in names:
        is_there = name in present or (backend == "nccl" and any(each.startswith(name) for each in present))
        if not is_there and (backend == "gloo" or len(names) == 1):
            raise LaunchEnvironmentError(
                f"{variable} must name a network interface of this host ({', '.join(present)}), but is {asked!r} on "
                f"{socket.gethostname()}. Correct it, or unset it where hosts differ."
            )
