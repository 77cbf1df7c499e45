"""Several hosts on one machine: network namespaces on a bridge of their own, each with a name and a hosts file.

What a host is cut off from stays silent, as with a pulled cable: no end of a connection is told to anyone. Needs root on
Linux and ``ip`` (Debian's ``iproute2``); everything that was made is removed when the block ends.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_NETWORK = "10.77.0"
_LIMIT_SECONDS = 30


class Hosts:
    """Hosts that reach each other and nothing else; made by ``made_hosts``.

    Attributes:
        names: Of the hosts: ``node0``, ``node1``, ... They resolve on every host.
        addresses: On ``eth0``.
        spaces: Their namespaces.
        switch: The namespace with the bridge.
    """

    def __init__(self, size: int) -> None:
        self._started: list[subprocess.Popen[bytes]] = []
        mark = uuid.uuid4().hex[:8]  # tests run side by side, each with hosts of its own
        self.switch = f"srf-{mark}-switch"
        self.spaces = [f"srf-{mark}-{host}" for host in range(size)]
        self.names = [f"node{host}" for host in range(size)]
        self.addresses = [f"{_NETWORK}.{host + 1}" for host in range(size)]

    def make(self) -> None:
        """Make the namespaces, the bridge and a cable to each host."""
        _ip("netns", "add", self.switch)
        _ip("-n", self.switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self.switch, "link", "set", "bridge", "up")
        for host, space in enumerate(self.spaces):
            _ip("netns", "add", space)
            peer = ("type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("link", "add", f"port{host}", "netns", self.switch, *peer)
            _ip("-n", self.switch, "link", "set", f"port{host}", "master", "bridge", "up")
            _ip("-n", space, "addr", "add", f"{self.addresses[host]}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", space, "link", "set", device, "up")
            self.write_hosts_file(host)

    def write_hosts_file(self, host: int, *, own_name_at: str | None = None) -> None:
        """Write what a host's names resolve to; ``own_name_at`` puts its own name elsewhere, as Debian does."""
        folder = Path("/etc/netns", self.spaces[host])
        folder.mkdir(parents=True, exist_ok=True)
        lines = ["127.0.0.1 localhost"]
        for address, name in zip(self.addresses, self.names, strict=True):
            own = name == self.names[host]
            lines.append(f"{own_name_at if own and own_name_at else address} {name}")
        folder.joinpath("hosts").write_text("\n".join(lines) + "\n")

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """Return the command line that runs a command on a host; the process that it starts becomes the command."""
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.names[host]]
        return ["ip", "netns", "exec", self.spaces[host], *named, *command]

    def start(
        self, host: int, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None
    ) -> "subprocess.Popen[bytes]":
        """Start a command on a host, with its output in a file."""
        with log.open("ab") as file:
            process = subprocess.Popen(
                self.command(host, command),
                env={**os.environ, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def cut(self, host: int) -> None:
        """Pull a host's cable."""
        _ip("-n", self.switch, "link", "set", f"port{host}", "down")

    def heal(self, host: int) -> None:
        """Put a host's cable back."""
        _ip("-n", self.switch, "link", "set", f"port{host}", "up")

    def pids(self, host: int) -> list[int]:
        """Return the living processes of a host."""
        return [int(pid) for pid in _ip("netns", "pids", self.spaces[host]).split()]

    def remove(self) -> None:
        """End what runs on the hosts, and remove them; also what was only half made."""
        for process in self._started:  # one that has not come to its namespace yet would be missed below
            process.kill()
        deadline = time.monotonic() + _LIMIT_SECONDS
        present = {line.split()[0] for line in _ip("netns", "list").splitlines()}
        for host, space in enumerate(self.spaces):
            while space in present and (pids := self.pids(host)) and time.monotonic() < deadline:
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(0.05)
            shutil.rmtree(Path("/etc/netns", space), ignore_errors=True)
        for process in self._started:
            process.wait(_LIMIT_SECONDS)
        for space in present & {*self.spaces, self.switch}:
            _ip("netns", "delete", space)


@contextlib.contextmanager
def made_hosts(size: int) -> Iterator[Hosts]:
    """Make hosts for a ``with`` block, and remove them and all that runs on them at its end."""
    hosts = Hosts(size)
    try:
        hosts.make()
        yield hosts
    finally:
        hosts.remove()


def why_no_hosts() -> str:
    """Return why hosts cannot be made here; empty if they can."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    for program, package in (("ip", "iproute2"), ("unshare", "util-linux"), ("hostname", "hostname")):
        if shutil.which(program) is None:
            return f"`{program}` is missing: install {package}"
    try:
        with made_hosts(1) as hosts:
            subprocess.run(hosts.command(0, ["true"]), check=True, capture_output=True, timeout=_LIMIT_SECONDS)
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made here: {_text(error.stderr).strip()}"
    return ""


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=_LIMIT_SECONDS).stdout


def _text(value: Any) -> str:
    return value if isinstance(value, str) else (value or b"").decode(errors="replace")
