"""Real processes for tests: a function on every rank of a fleet, or a script under torchrun.

Everything is bounded in time: at the limit every process that was started is killed, and the test fails with what each
rank printed. A function is named by ``"path/to/file.py:function"`` (or passed itself) and runs in a process of its own;
arguments and results travel by pickle.
"""

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fork_server import ForkedRank, ForkServer

_ENTRY = "import harness; harness.serve_rank()"
_HERE = Path(__file__).resolve().parent
_TAIL = 4000
_fork_servers: dict[int, ForkServer] = {}


class RankError(AssertionError):
    """A rank raised, was killed, or did not end in time; the message has each rank's output."""


def free_port() -> int:
    """Return a port of the loopback interface that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def rank_environment(rank: int, world_size: int, port: int, **more: str) -> dict[str, str]:
    """Return this process's environment with the torch variables of one rank on this host."""
    launcher = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    own = {name: str(value) for name, value in launcher.items()}
    own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    # The hosts' own names may resolve to an address without a peer: gloo is told the interface.
    own |= {"GLOO_SOCKET_IFNAME": "lo", "PYTHONFAULTHANDLER": "1"}
    paths = [str(_HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, **own, "PYTHONPATH": os.pathsep.join(paths), **more}


def run_ranks(
    function: str | Callable[..., Any],
    world_size: int,
    *args: Any,
    backend: str = "gloo",
    timeout: float = 60,
    device: str = "cpu",
    env: Mapping[str, str] | None = None,
    group: bool = True,
) -> list[Any]:
    """Run a function on every rank of a fleet of real processes, and return each rank's result.

    Args:
        function: ``"path/to/file.py:name"``, ``"module:name"``, or a function defined at a file's top level.
        world_size: Number of processes; with 1 the function sees a launch without torchrun.
        args: Passed to the function.
        backend: What ``asked_backend()`` returns in the ranks.
        timeout: Seconds until every rank is killed.
        device: What ``asked_device()`` returns in the ranks.
        env: Further environment variables. With any, the ranks are new interpreters, which may read them at imports.
        group: Set the torch variables; False starts the processes without them.

    Returns:
        The results in rank order.

    Raises:
        RankError: A rank failed; the message has what each of them printed.
    """
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        task = Path(folder, "task.pickle")
        task.write_bytes(pickle.dumps((_spelled(function), args)))
        processes, logs = [], []
        for rank in range(world_size):
            environment = rank_environment(rank, world_size, port, TEST_BACKEND=backend, TEST_DEVICE=device)
            if not group:
                for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
                    environment.pop(name)
            environment |= {"TEST_FOLDER": folder, "TEST_RANK": str(rank), **(env or {})}
            logs.append(Path(folder, f"r{rank}.log"))
            processes.append(_start(rank, environment, logs[-1], fresh=env is not None))
        codes = _wait(processes, timeout)
        outputs = [log.read_text(errors="replace")[-_TAIL:] for log in logs]
        if any(codes):
            shown = "\n".join(
                f"--- rank {r}: exit {c}\n{o}" for r, (c, o) in enumerate(zip(codes, outputs, strict=True))
            )
            raise RankError(f"exit codes {codes} (None: killed after {timeout} s)\n{shown}")
        return [pickle.loads(Path(folder, f"r{rank}.pickle").read_bytes()) for rank in range(world_size)]


def _start(rank: int, environment: dict[str, str], log: Path, *, fresh: bool) -> "ForkedRank | subprocess.Popen[bytes]":
    if not fresh:
        number = rank % 2
        if number not in _fork_servers or not _fork_servers[number].is_usable:
            _fork_servers[number] = ForkServer(hash_seed=number)
        return _fork_servers[number].start(environment, log)
    with log.open("wb") as file:
        command = [sys.executable, "-c", _ENTRY]
        return subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True)


def _spelled(function: str | Callable[..., Any]) -> str:
    return function if isinstance(function, str) else f"{function.__code__.co_filename}:{function.__qualname__}"


def _wait(processes: "Sequence[ForkedRank | subprocess.Popen[bytes]]", timeout: float) -> list[int | None]:
    """Wait for all; once one has failed the others get ten seconds, for they may wait for it."""
    deadline = time.monotonic() + timeout
    try:
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            if any(process.poll() for process in processes):
                deadline = min(deadline, time.monotonic() + 10)
            time.sleep(0.02)
        return [process.poll() for process in processes]
    finally:
        for process in processes:
            kill_session(process)


def kill_session(process: "ForkedRank | subprocess.Popen[Any]") -> None:
    """Kill a process that was started in a session of its own, with all its descendants, in whatever session they are."""
    below = descendants(process.pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for pid in below:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def descendants(pid: int) -> list[int]:
    """Return the living processes below one: torchrun gives each rank a session of its own."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            children.setdefault(int(stat.read_text().rpartition(")")[2].split()[1]), []).append(int(stat.parent.name))
    found, new = [], [pid]
    while new:
        new = [child for parent in new for child in children.get(parent, [])]
        found += new
    return found


def serve_rank() -> None:
    """Entry of a rank's process: load the function, call it, store what it returns."""
    import importlib
    import importlib.util

    import torch

    torch.set_num_threads(1)
    folder, rank = Path(os.environ["TEST_FOLDER"]), os.environ["TEST_RANK"]
    spelled, args = pickle.loads(folder.joinpath("task.pickle").read_bytes())
    where, _, name = spelled.rpartition(":")
    if where.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(where).stem, where)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(where)
    result = getattr(module, name)(*args)
    folder.joinpath(f"r{rank}.pickle").write_bytes(pickle.dumps(result))
    sys.stdout.flush()
    sys.stderr.flush()
    if "torch.distributed" in sys.modules:
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()


def asked_device() -> str:
    """Return, inside a rank, the device that the test was asked to run on."""
    return os.environ.get("TEST_DEVICE", "cpu")


def asked_backend() -> str:
    """Return, inside a rank, the backend that the test was asked to run on."""
    return os.environ.get("TEST_BACKEND", "gloo")


def launch(
    script: str | Path, *args: str, nproc: int = 2, env: Mapping[str, str] | None = None, timeout: float = 60
) -> "subprocess.CompletedProcess[str]":
    """Run a script under ``torchrun --standalone`` and return its exit code and output.

    Args:
        script: Path of the script.
        args: Its arguments.
        nproc: Number of processes.
        env: Further environment variables.
        timeout: Seconds until the launcher and all it started are killed.

    Raises:
        RankError: It did not end in time; the message has the output so far.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **(env or {})}
    process = subprocess.Popen(
        [*command, str(script), *args],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        kill_session(process)
        out, err = process.communicate()
        raise RankError(
            f"not ended after {timeout} s\n--- stdout\n{out[-_TAIL:]}\n--- stderr\n{err[-_TAIL:]}"
        ) from None
    finally:
        kill_session(process)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)
