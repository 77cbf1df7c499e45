"""What the network does to a fleet on two hosts: who ends when, and what each side prints.

python tests-integration/network_matrix.py                      # every case
python tests-integration/network_matrix.py --write docs/network_table.md
"""

import argparse
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from failure_run import ARGUMENTS
from harness import free_port
from hosts import made_hosts, why_no_hosts

HERE = Path(__file__).resolve().parent
#: Where nothing tells a side of what happened, only this time can.
TIMEOUT_SECONDS = 15
#: Of what must not wait for its timeout.
PATIENT_SECONDS = 60
#: For connections that close, ranks that leave, launchers that report; a machine with other work takes long.
SLACK_SECONDS = 25
#: How long a cable that is put back was pulled.
CUT_SECONDS = 5
LIMIT_SECONDS = 110
#: Epochs to be cut short, and to be gone through.
ENDLESS, SHORT = 100_000, 12
# How the message begins that a process ends with.
_MESSAGE = re.compile(r"[\w.]*Error: |error: |Signal \d+ |OK: |psnr_y ")
_NOISE = re.compile(r"\[?(rank\d+)?\]?:?\[[WE]\d{4} .*|frame #.*|Exception raised from .*|<omitting .*|[=\-_^~ ]*")


@dataclass(frozen=True)
class Case:
    """One thing that happens to two hosts.

    Attributes:
        says: What the end of each host's output must match, as regular expressions.
        codes: Exit code of what was started on each host.
        waits: Seconds for which nothing can tell the hosts of it.
        fault: Done once both ranks have trained an epoch; None: nothing.
        epochs: Of the training.
        check: Start ``check`` with torch's variables in place of the training under torchrun.
        before: Done before the start.
        interface: Told to gloo.
    """

    says: tuple[str, str]
    codes: tuple[int, int] = (1, 1)
    waits: float = 0.0
    fault: Callable[["Outcome"], None] | None = None
    epochs: int = ENDLESS
    check: bool = False
    before: Callable[["Outcome"], None] | None = None
    interface: str = "eth0"


@dataclass
class Outcome:
    """What was seen of one case.

    Attributes:
        hosts: Where it happened.
        processes: What was started, by host: torchrun or the check.
        codes: Their exit codes; None: it had to be killed.
        seconds: From the fault, or the start where there is none, to the end of the last process of each host.
        wrong: What must not be and has no place in the others.
    """

    case: Case
    folder: Path
    hosts: object = None
    processes: list = field(default_factory=list)
    codes: list = field(default_factory=lambda: [None, None])
    seconds: list = field(default_factory=lambda: [-1.0, -1.0])
    wrong: list = field(default_factory=list)

    def output(self, host):
        """All that a host printed."""
        return Path(self.folder, f"log-{host}").read_text(errors="replace")

    def end(self, host):
        """The message that a host's output ends with, in one line."""
        lines = [line.strip() for line in self.output(host).splitlines()]
        lines = [re.sub(r"^(traceback : |\[rank \d+\] )+", "", line) for line in lines if not _NOISE.fullmatch(line)]
        begins = [index for index, line in enumerate(lines) if _MESSAGE.match(line)]
        return " ".join(lines[begins[-1] if begins else -1 :])


def run_case(case, folder):
    """Start a process on each host, do what the case says, and see how both end."""
    outcome = Outcome(case, Path(folder))
    Path(folder, "notes").mkdir(parents=True)
    with made_hosts(2) as outcome.hosts:
        if case.before:
            case.before(outcome)
        port, start = free_port(), start_check if case.check else start_training
        began, deadline = time.monotonic(), time.monotonic() + LIMIT_SECONDS
        outcome.processes = [start(outcome, host, port) for host in range(2)]
        if case.fault:
            while not have_trained(outcome) and is_running(outcome) and time.monotonic() < deadline - 30:
                time.sleep(0.05)
            if not is_running(outcome):
                outcome.wrong.append("the training must go on until something happens, but ended")
            began = time.monotonic()
            case.fault(outcome)
        watch(outcome, began, deadline)
    return outcome


def have_trained(outcome):
    return all(f"[r{host}] epoch 1 training" in outcome.output(host) for host in range(2))


def is_running(outcome):
    return all(process.poll() is None for process in outcome.processes)


def watch(outcome, began, deadline):
    """Note when the last process of each host ended, and which did not."""
    running = {0, 1}
    while running and time.monotonic() < deadline:
        for host in list(running):
            if outcome.processes[host].poll() is not None and not outcome.hosts.pids(host):
                outcome.seconds[host] = time.monotonic() - began
                running.remove(host)
        time.sleep(0.1)
    outcome.codes = [process.poll() for process in outcome.processes]
    outcome.wrong += [f"process {pid} was left on host {host}" for host in running for pid in outcome.hosts.pids(host)]


def start_training(outcome, host, port):
    """Start torchrun's agent of one host."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node_rank={host}", "--nproc_per_node=1"]
    command += [f"--master_addr={outcome.hosts.names[0]}", f"--master_port={port}", str(HERE / "failure_program.py")]
    command += [argument for argument in ARGUMENTS if not argument.startswith("training.epochs=")]
    command += [
        f"training.epochs={outcome.case.epochs}",
        f"run.root={outcome.folder}/runs",
        "system.num_workers=0",
        f"++system.distributed.timeout_minutes={TIMEOUT_SECONDS / 60}",
        f"training.main_work_timeout_minutes={TIMEOUT_SECONDS / 60}",
    ]
    told = {"TEST_FAULT": "none:none:0", "TEST_NOTES": str(outcome.folder / "notes")}
    return outcome.hosts.start(host, command, outcome.folder / f"log-{host}", environment(outcome, **told))


def start_check(outcome, host, port):
    """Start the check on one host, as a launcher without agents does."""
    timeout = TIMEOUT_SECONDS if outcome.case.waits else PATIENT_SECONDS
    command = [sys.executable, "-m", "srforge.distributed", "check", "--device=cpu", "--max-mebibytes=1"]
    told = {"RANK": host, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1}
    told |= {"MASTER_ADDR": outcome.hosts.names[0], "MASTER_PORT": port}
    command.append(f"--timeout={timeout}")
    return outcome.hosts.start(host, command, outcome.folder / f"log-{host}", environment(outcome, **told))


def environment(outcome, **told):
    paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    interface = {"GLOO_SOCKET_IFNAME": outcome.case.interface}
    more = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths), **interface}
    return more | {name: str(value) for name, value in told.items()}


def cut(outcome):
    outcome.hosts.cut(1)


def cut_and_heal(outcome):
    cut(outcome)
    time.sleep(1)
    before = [outcome.output(host) for host in range(2)]
    time.sleep(CUT_SECONDS - 1)
    if before != [outcome.output(host) for host in range(2)]:
        outcome.wrong.append("training went on over a cable that was pulled")
    outcome.hosts.heal(1)


def kill_agent(host):
    return lambda outcome: os.kill(outcome.processes[host].pid, signal.SIGKILL)


def kill_worker(host):
    return lambda outcome: os.kill(int(Path(outcome.folder, "notes", f"pid-{host}").read_text()), signal.SIGKILL)


def names_on_loopback(outcome):
    for host in range(2):
        outcome.hosts.write_hosts_file(host, own_name_at="127.0.1.1")


_HOST_0_IS_SILENT = r"The host of rank 0.* no longer answers"
_RANK_1_IS_SILENT = r"rank 1 no longer answers"
_NO_AGENT = "torchrun, which started this rank, is gone"
_KILLED = r"Signal 9 \(SIGKILL\)"
_ON_LOOPBACK = r"host name node\d must resolve to .*, but is 127\.0\.1\.1 on .*Set GLOO_SOCKET_IFNAME"
CASES = {
    "cable of host 1 pulled": Case((_RANK_1_IS_SILENT, _HOST_0_IS_SILENT), waits=TIMEOUT_SECONDS, fault=cut),
    "cable pulled for 5 s": Case(
        ("^psnr_y", "epoch 11 replica"), (0, 0), CUT_SECONDS + TIMEOUT_SECONDS, cut_and_heal, SHORT
    ),
    "torchrun of host 0 killed": Case((_NO_AGENT, _HOST_0_IS_SILENT), (-9, 1), fault=kill_agent(0)),
    "torchrun of host 1 killed": Case((r"[Rr]ank 1 (ended|no longer)", _NO_AGENT), (1, -9), fault=kill_agent(1)),
    "rank 0 killed": Case((_KILLED, _HOST_0_IS_SILENT), fault=kill_worker(0)),
    "rank 1 killed": Case((_RANK_1_IS_SILENT, _KILLED), fault=kill_worker(1)),
    "nothing, `check`": Case(("^OK: 2 ranks on 2 hosts", ""), (0, 0), check=True),
    "host names on 127.0.1.1, `check`": Case(
        (_ON_LOOPBACK, _ON_LOOPBACK), check=True, before=names_on_loopback, interface=""
    ),
    "cable pulled before the start, `check`": Case(
        ("rank 1 of 2 did not", r"must open at node0:.* No route to host\. .* every host reaches it"),
        waits=2 * TIMEOUT_SECONDS,  # torch tries once more where the first attempt ends before its time
        check=True,
        before=cut,
    ),
}


def findings(outcome):
    """What is wrong with an outcome, one sentence each."""
    case, found = outcome.case, list(outcome.wrong)
    allowed = case.waits + SLACK_SECONDS
    for host in range(2):
        if outcome.codes[host] != case.codes[host]:
            found.append(f"host {host} must end with {case.codes[host]}, but did with {outcome.codes[host]}")
        if not 0 <= outcome.seconds[host] <= allowed:
            found.append(f"host {host} must end within {allowed:.0f} s, but took {outcome.seconds[host]:.1f}")
        # Of two agents that end together, the slower one may add that it lost the other.
        said = outcome.output(host) if case.codes[host] == 0 else outcome.end(host)
        if not re.search(case.says[host], said, re.MULTILINE):
            found.append(f"host {host} must end with {case.says[host]!r}, but does with {outcome.end(host)!r}")
    return found


def as_markdown(outcomes):
    """The table, for the documentation."""
    lines = ["| what happens | host | exit code | all ended after | last lines |", "|---|---|---|---|---|"]
    for name, outcome in outcomes.items():
        for host in range(2):
            text = re.sub(r"\[/\S+/gloo/\S+\]", "gloo:", outcome.end(host)).replace("|", "\\|").replace("`", "'")
            text = re.sub(r"(?<=PID )\d+|(?<=pid )\d+|(?<=node0:)\d+|(?<=\]:)\d+|/\S+(?=/weights)", "...", text)
            shown = f"`{text[:900]}`" if text else "no message"
            seconds = f"{outcome.seconds[host]:.0f} s" if outcome.case.fault else "-"
            lines.append(f"| {name} | {host} | {outcome.codes[host]} | {seconds} | {shown} |")
    return "\n".join(lines) + "\n"


HEADER = f"""# What each cut in the network looks like

Written by `tests-integration/network_matrix.py` from runs on two hosts with one rank each, which are network namespaces of one
Linux machine: `apps/train.py` under one `torchrun` agent per host over gloo, and [`check`](check.md). A pulled cable tells
nobody: then the first thing to be seen is that a time is up, `system.distributed.timeout_minutes` and
`training.main_work_timeout_minutes`, both {TIMEOUT_SECONDS} s here (30 and 120 minutes by default). "All ended" is counted
from what happens to the end of the last process of the host, on a machine with two cores and other work.

Host 0 keeps where every rank was last seen, so its report names the rank that is gone; host 1 can only say that host
0 no longer answers.

"""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="a part of the names of the cases to run")
    parser.add_argument("--write", type=Path, help="write the table there")
    asked, outcomes, failed = parser.parse_args(), {}, False
    if reason := why_no_hosts():
        sys.exit(reason)
    with tempfile.TemporaryDirectory(prefix="network-") as folder:
        for number, (name, case) in enumerate(CASES.items()):
            if asked.only in (None, name) or asked.only in name:
                outcomes[name] = outcome = run_case(case, Path(folder, str(number)))
                wrong = findings(outcome)
                failed |= bool(wrong)
                seconds = " and ".join(f"{each:.1f} s" for each in outcome.seconds)
                print(
                    f"{name}: {seconds}", *[f"{h}: {outcome.end(h)}" for h in range(2)], *wrong, sep="\n  ", flush=True
                )
        if asked.write:
            asked.write.write_text(HEADER + as_markdown(outcomes))
    sys.exit(failed)


if __name__ == "__main__":
    main()
