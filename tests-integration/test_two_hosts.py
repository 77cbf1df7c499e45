"""Two hosts, and what the network does to them; ``network_matrix.py`` runs every case and writes the table of the docs."""

import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from hosts import made_hosts, why_no_hosts
from network_matrix import CASES, LIMIT_SECONDS, findings, run_case

HEALED = "cable pulled for 5 s"
#: Another rank that is killed shows nothing that a killed torchrun does not; the table has it.
LEFT_OUT = ("rank 0 killed",)


@pytest.fixture(scope="module", autouse=True)
def need_hosts():
    if reason := why_no_hosts():
        pytest.skip(reason)


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_SECONDS + 30)
@pytest.mark.parametrize("name", [name for name in CASES if name not in (HEALED, *LEFT_OUT)])
def test_each_side_ends_in_time_and_says_what_it_knows(tmp_path, name):
    outcome = run_case(CASES[name], tmp_path / "case")
    assert findings(outcome) == [], [outcome.output(host)[-3000:] for host in range(2)]


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_SECONDS + 30)
def test_training_goes_on_over_a_healed_cable_to_the_weights_of_an_undisturbed_one(tmp_path):
    cases = {"healed": CASES[HEALED], "undisturbed": replace(CASES[HEALED], fault=None, waits=LIMIT_SECONDS)}
    with ThreadPoolExecutor() as pool:
        outcomes = list(pool.map(lambda name: run_case(cases[name], tmp_path / name), cases))
    for outcome in outcomes:
        assert findings(outcome) == [], [outcome.output(host)[-3000:] for host in range(2)]
    healed, undisturbed = (load_file(next(each.folder.glob("runs/*/weights.safetensors"))) for each in outcomes)
    assert healed.keys() == undisturbed.keys()
    assert all(torch.equal(healed[name], undisturbed[name]) for name in healed)


WAIT_FOR_RANK_0 = """
import time, torch
from srforge.distributed import get_active_strategy, main_work, rank_entrypoint, setup_device

@rank_entrypoint
def main():
    setup_device(torch.nn.Linear(1, 1), "cpu")
    print("waiting", flush=True)
    with main_work(get_active_strategy(), "saving", 6 / 60):
        time.sleep(60 * get_active_strategy().is_main)

main()
"""


@pytest.mark.slow
def test_rank_that_waits_for_rank_0_behind_a_pulled_cable_waits_no_longer_than_it_may(tmp_path):
    """It asks a store that never answers again, and there is no collective whose time could be up."""
    logs = [tmp_path / "0", tmp_path / "1"]
    told = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "node0",
        "MASTER_PORT": "29500",
    }
    told |= {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    with made_hosts(2) as hosts:
        command = [sys.executable, "-c", WAIT_FOR_RANK_0]
        ranks = [hosts.start(rank, command, logs[rank], told | {"RANK": str(rank)}) for rank in range(2)]
        while not all("waiting" in log.read_text() for log in logs):
            time.sleep(0.05)
            assert [rank.poll() for rank in ranks] == [None, None], logs[1].read_text()
        time.sleep(0.5)  # for rank 1 to be in the wait
        hosts.cut(1)
        assert ranks[1].wait(30) == 1
        assert ranks[0].poll() is None
    said = logs[1].read_text().splitlines()
    assert re.search(r"rank 0 must (answer|be done)", said[-2]), said
    assert "The host of rank 0, where the ranks report, no longer answers" in said[-1]


def test_hosts_and_what_runs_on_them_are_gone_after_an_exception(tmp_path):
    made = []

    def fail_on_hosts():
        with made_hosts(2) as hosts:
            made.extend([hosts, hosts.start(1, ["sleep", "60"], tmp_path / "log")])
            assert hosts.pids(0) == []
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_on_hosts()
    hosts, process = made
    assert process.wait(10) == -9
    present = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert not any(space in present for space in [hosts.switch, *hosts.spaces])


def test_a_host_has_its_own_name_and_reaches_the_other_until_the_cable_is_pulled(tmp_path):
    def reaches(host, name):
        probe = f"import socket; socket.create_connection(('{name}', 9), 1)"
        ended = subprocess.run(
            hosts.command(host, ["python3", "-c", probe]), capture_output=True, text=True, check=False, timeout=30
        )
        return "Connection refused" in ended.stderr  # by a living host, where nobody listens

    with made_hosts(2) as hosts:
        named = subprocess.run(hosts.command(1, ["hostname"]), capture_output=True, text=True, check=True).stdout
        assert named.strip() == "node1"
        assert reaches(0, "node1")
        hosts.cut(1)
        assert not reaches(0, "node1")
        hosts.heal(1)
        assert reaches(0, "node1")
