"""Ranks for the harness, forked from programs that have imported PyTorch once: a test pays milliseconds a rank, not seconds.

Two such programs, with different seeds of Python's hashes: neighbouring ranks iterate over sets of strings in different
order, as the processes of a real fleet do.
"""

import atexit
import json
import os
import random
import subprocess
import sys
from pathlib import Path

_SERVE = "import fork_server; fork_server.serve()"


class ForkServer:
    """One program that forks ranks; it ends with this process."""

    def __init__(self, hash_seed: int) -> None:
        paths = [str(Path(__file__).resolve().parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        own = {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", "PYTHONHASHSEED": str(hash_seed)}
        self._program = subprocess.Popen(
            [sys.executable, "-c", _SERVE],
            env={**os.environ, **own, "PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.is_usable = True
        atexit.register(self.close)

    def start(self, environment: dict[str, str], log: Path) -> "ForkedRank":
        """Start ``harness.serve_rank`` in a session of its own, with an environment and a file for its output."""
        return ForkedRank(self, self.ask({"environment": environment, "log": str(log)}))

    def ask(self, request: dict[str, object]) -> int:
        assert self._program.stdin is not None
        assert self._program.stdout is not None
        try:
            self._program.stdin.write(json.dumps(request) + "\n")
            self._program.stdin.flush()
            return int(self._program.stdout.readline())
        except BaseException:  # a test's time is up: the answer to come would be taken for that to the next question
            self.close()
            self.is_usable = False
            raise

    def close(self) -> None:
        if self._program.poll() is None:
            self._program.kill()
            self._program.communicate()


class ForkedRank:
    """A rank, as far as the harness needs what ``subprocess.Popen`` offers."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid = pid
        self._server = server
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            answer = self._server.ask({"poll": self.pid})
            self._code = None if answer == _RUNNING else answer
        return self._code

    def wait(self) -> int:
        if self._code is None:
            self._code = self._server.ask({"wait": self.pid})
        return self._code


_RUNNING = 1000


def serve() -> None:
    """Answer each line of standard input: fork a rank, or tell how one ended. The rank returns from here and ends."""
    import numpy as np
    import torch
    import torch._dynamo  # what torch's DDP imports: as long as all else together

    import harness
    import srforge.training  # noqa: F401  # imported before the fork, with all of srforge.distributed

    torch.set_num_threads(1)
    for line in sys.stdin:
        request = json.loads(line)
        if "environment" in request:
            answer = os.fork()
            if answer == 0:
                _become_rank(request)
                random.seed()
                np.random.seed()  # noqa: NPY002  # a new interpreter has its own state, drawn from the system
                harness.serve_rank()
                return
        else:
            pid = request.get("poll") or request["wait"]
            ended, status = os.waitpid(pid, os.WNOHANG if "poll" in request else 0)
            answer = os.waitstatus_to_exitcode(status) if ended else _RUNNING
        print(answer, flush=True)


def _become_rank(request: dict[str, object]) -> None:
    os.setsid()
    log = os.open(str(request["log"]), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for own, standard in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(own, standard)
    os.environ.clear()
    os.environ.update(request["environment"])  # type: ignore[arg-type]
