"""A real SLURM on one machine: a controller and compute nodes, each a host of its own; see ``hosts``.

Needs Debian's ``slurm-wlm`` and ``munge``. Nothing outside a temporary folder is written.
"""

import contextlib
import os
import re
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from hosts import Hosts, made_hosts, why_no_hosts

_START_SECONDS = 60
# cred_expire is how long a requeued job waits, too: two minutes if it is not said.
_CONFIGURATION = """
ClusterName=test
SlurmctldHost=node0
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=2,batch_sched_delay=0
MpiDefault=none
ReturnToService=2
KillWait=10
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=node[1-{nodes}] CPUs=2 RealMemory=500
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=10
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""


class Cluster:
    """A cluster whose nodes are idle; made by ``made_cluster``.

    Attributes:
        hosts: Host 0 has the controller, and is where jobs are submitted; the others compute.
        folder: Logs and state.
    """

    def __init__(self, hosts: Hosts, folder: Path, nodes: int) -> None:
        self.hosts, self.folder, self.nodes = hosts, folder, nodes
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def start(self) -> None:
        """Start the daemons, and wait until the nodes are idle."""
        folder = self.folder
        folder.joinpath("munge.key").write_bytes(secrets.token_bytes(128))
        folder.joinpath("munge.key").chmod(0o600)
        folder.joinpath("slurm.conf").write_text(_CONFIGURATION.format(folder=folder, nodes=self.nodes))
        # slurmd loads a plugin for control groups even if nothing uses it, and a namespace of `ip netns` has none in
        # /sys: it may mount a hierarchy of its own.
        folder.joinpath("cgroup.conf").write_text(
            f"CgroupPlugin=cgroup/v1\nCgroupAutomount=yes\nCgroupMountpoint={folder}/cgroup\n"
        )
        for name in ("state", "cgroup", *(f"spool-node{node + 1}" for node in range(self.nodes))):
            folder.joinpath(name).mkdir()
        files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "log", "pid", "seed")]
        self._daemon(0, "munged", "--foreground", f"--socket={folder}/munge.socket", *files)
        self.wait_for(lambda: folder.joinpath("munge.socket").exists(), "munged to listen")
        self._daemon(0, "slurmctld", "-D", "-f", f"{folder}/slurm.conf")
        for node in range(1, self.nodes + 1):
            self._daemon(node, "slurmd", "-D", "-f", f"{folder}/slurm.conf", "-N", f"node{node}")
        self.wait_for(lambda: self.states() == ["idle"] * self.nodes, "the nodes to be idle")

    def states(self) -> list[str]:
        """Return the state of each node."""
        asked = self.run("sinfo", "--noheader", "--Node", "--partition=low", "--format=%T", check=False)
        return asked.stdout.split()

    def run(
        self, *command: str, env: Mapping[str, str] | None = None, timeout: float = 100, check: bool = True
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command such as ``srun`` where jobs are submitted."""
        return subprocess.run(
            self.hosts.command(0, command),
            env={**self.environment, **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=check,
        )

    def submit(self, script: Path, log: Path, *options: str, env: Mapping[str, str] | None = None) -> str:
        """Submit a batch script, and return the job's number."""
        submitted = self.run(
            "sbatch", "--parsable", "--open-mode=append", f"--output={log}", *options, str(script), env=env
        )
        return submitted.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """Return what the controller knows of a job, such as ``JobState`` and ``ExitCode``."""
        shown = self.run("scontrol", "show", "job", number, "--oneliner").stdout
        return dict(re.findall(r"(\w+)=(\S*)", shown))

    def await_state(self, number: str, *states: str, seconds: float = 60) -> dict[str, str]:
        """Wait until a job is in one of some states, and return what is known of it then."""
        found = {}

        def is_there() -> bool:
            found.update(self.job(number))
            return found["JobState"] in states

        self.wait_for(is_there, f"job {number} to be {' or '.join(states)}", seconds)
        return found

    def _daemon(self, host: int, *command: str) -> None:
        self.hosts.start(host, command, self.folder / f"{command[0]}-{host}.log", self.environment)

    def wait_for(self, happened: Callable[[], bool], what: str, seconds: float = _START_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not happened():
            if time.monotonic() > deadline:
                logs = {log.name: log.read_text(errors="replace")[-1000:] for log in self.folder.glob("*.log")}
                raise TimeoutError(f"waited {seconds} s for {what}: {logs}")
            time.sleep(0.2)


@contextlib.contextmanager
def made_cluster(nodes: int) -> Iterator[Cluster]:
    """Start a cluster for a ``with`` block; all of it ends with the block, jobs included."""
    with tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)  # munged insists on who may write into it
        with made_hosts(nodes + 1) as hosts:
            cluster = Cluster(hosts, Path(folder), nodes)
            cluster.start()
            yield cluster


def why_no_cluster() -> str:
    """Return why no cluster can be started here; empty if it can."""
    for program, package in (("slurmctld", "slurm-wlm"), ("slurmd", "slurm-wlm"), ("munged", "munge")):
        if shutil.which(program) is None:
            return f"`{program}` is missing: install {package}"
    return why_no_hosts()
