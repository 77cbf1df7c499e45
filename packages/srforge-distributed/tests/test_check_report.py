import pytest

from srforge.distributed.check_report import as_text, problems_of, slowest_rank, warnings_of


def row(rank, **changed):
    usual = {"rank": rank, "host": f"n{rank}", "pid": 100 + rank, "device": "cuda:0", "device_uuid": f"u{rank}"}
    usual |= {"backend": "nccl", "interface": "eth0", "torch": "2.13", "srforge": "0.1", "gpus": ["H200"]}
    return {**usual, "visible_devices": None, **changed}


THREE = (row(0), row(1), row(2))


def report(rows=THREE, **changed):
    usual = {
        "world_size": len(rows),
        "ranks": list(rows),
        "clock_skew_seconds": [0.0] * len(rows),
        "collectives": {"all_reduce": {"wrong_on_ranks": [], "seconds": 0.1}},
        "all_reduce": [{"bytes": 2**20, "seconds": 0.002, "gigabytes_per_second": 0.5}],
        "matmul_milliseconds": [1.0] * len(rows),
        "problems": [],
        "warnings": [],
    }
    return {**usual, **changed}


def test_sound_fleet_has_no_finding_and_its_verdict_is_the_last_line():
    assert problems_of(report()) == []
    assert warnings_of(report()) == []
    assert as_text(report()).splitlines()[-1] == "OK: 3 ranks on 3 hosts."


def test_wrong_result_is_a_problem_and_the_verdict():
    broken = report(collectives={"broadcast": {"wrong_on_ranks": [0, 2], "seconds": 0.1}})
    broken["problems"] = problems_of(broken)
    assert broken["problems"] == ["broadcast gave a wrong result on rank 0, 2"]
    assert as_text(broken).splitlines()[-1] == "FAILED: broadcast gave a wrong result on rank 0, 2."


@pytest.mark.parametrize(
    ("changed", "warning"),
    [
        ({"clock_skew_seconds": [0.0, -3.5, 0.9]}, "the clock of rank 1 (n1) is -3.5 s from rank 0's: use NTP"),
        ({"matmul_milliseconds": [1.0, 1.0, 7.0]}, "rank 2 (n2) takes 7.0 times as long as the others"),
        ({"rows": (row(0), row(1, device_uuid="u0"))}, "ranks 0, 1 share one GPU"),
        ({"rows": (row(0), row(1, device="cpu", device_uuid=""))}, "rank 1 (n1) trains on the CPU, but sees 1 GPU"),
    ],
)
def test_what_trains_badly_is_warned_of(changed, warning):
    found = report(**changed)
    assert warnings_of(found) == [warning]
    found["warnings"] = [warning]
    assert as_text(found).splitlines()[-2] == f"warning: {warning}"
    assert as_text(found).splitlines()[-1].endswith("; 1 warning.")


def test_slowest_rank_is_measured_against_the_others():
    assert slowest_rank(report(matmul_milliseconds=[1.0, 10.0])) == (1, 10.0)
    assert slowest_rank(report(matmul_milliseconds=[1.0])) == (0, 1.0)
    assert slowest_rank(report(matmul_milliseconds=[2.0, 6.0, 2.0])) == (1, 3.0)


def test_table_shows_each_rank_its_gpus_and_the_message_sizes():
    text = as_text(report(rows=(row(0), row(1, gpus=[], visible_devices=""))))
    assert "0     n0    100  cuda:0  nccl     eth0       2.13   0.1" in text
    assert "rank 0 sees 1 x H200" in text
    assert "rank 1 sees no GPU (CUDA_VISIBLE_DEVICES=)" in text
    assert "1 MiB          2.00 ms  0.500 GB/s" in text
