"""The check on fleets of real processes."""

import json
import subprocess
import sys

from harness import free_port, kill_session, rank_environment

CHECK = (sys.executable, "-m", "srforge.distributed", "check", "--device", "cpu", "--max-mebibytes", "1")


def check(ranks, world_size, *options):
    """Start the check on some ranks of a fleet; their exit codes and outputs."""
    port = free_port()
    processes = [
        subprocess.Popen(
            [*CHECK, *options],
            env=rank_environment(rank, world_size, port),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for rank in ranks
    ]
    try:
        outputs = [process.communicate(timeout=90) for process in processes]
    finally:
        for process in processes:
            kill_session(process)
    return [process.returncode for process in processes], outputs


def test_two_ranks_pass_and_rank_0_alone_reports():
    codes, outputs = check([0, 1], 2, "--json")
    assert codes == [0, 0], outputs
    report = json.loads(outputs[0][0])
    assert outputs[1][0] == ""
    assert [row["rank"] for row in report["ranks"]] == [0, 1]
    assert {row["interface"] for row in report["ranks"]} == {"lo"}
    assert report["problems"] == []
    assert max(map(abs, report["clock_skew_seconds"])) < 1  # one host, one clock
    assert [timing["bytes"] for timing in report["all_reduce"]] == [4096, 65536, 1048576]
    assert "all_reduce" in report["collectives"]


def test_ranks_that_did_not_arrive_are_named():
    codes, outputs = check([0, 2], 4, "--timeout", "4")
    assert codes == [1, 1]
    for _, err in outputs:
        assert "ranks 1, 3 of 4 did not" in err.splitlines()[-1]
