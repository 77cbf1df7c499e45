"""What a report of ``check`` means, and how it is shown: pure functions of the report."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

_MAX_SKEW_SECONDS = 1.0
_SLOW_FACTOR = 2.0
_COLUMNS = ("rank", "host", "pid", "device", "backend", "interface", "torch", "srforge")


def problems_of(report: dict[str, Any]) -> list[str]:
    """Return what makes training impossible or wrong, one sentence each."""
    return [
        f"{name} gave a wrong result on rank {', '.join(map(str, found['wrong_on_ranks']))}"
        for name, found in report["collectives"].items()
        if found["wrong_on_ranks"]
    ]


def warnings_of(report: dict[str, Any]) -> list[str]:
    """Return what will train, but not as it should."""
    ranks = report["ranks"]
    found = []
    for rank, skew in enumerate(report["clock_skew_seconds"]):
        if abs(skew) > _MAX_SKEW_SECONDS:
            found.append(f"the clock of rank {rank} ({ranks[rank]['host']}) is {skew:+.1f} s from rank 0's: use NTP")
    slowest, factor = slowest_rank(report)
    if factor > _SLOW_FACTOR:
        found.append(f"rank {slowest} ({ranks[slowest]['host']}) takes {factor:.1f} times as long as the others")
    devices = Counter(row["device_uuid"] for row in ranks if row["device_uuid"])
    for uuid in [uuid for uuid, count in devices.items() if count > 1]:
        sharing = [str(row["rank"]) for row in ranks if row["device_uuid"] == uuid]
        found.append(f"ranks {', '.join(sharing)} share one GPU")
    found += [
        f"rank {row['rank']} ({row['host']}) trains on the CPU, but sees {len(row['gpus'])} GPU"
        for row in ranks
        if row["device"] == "cpu" and row["gpus"]
    ]
    return found


def slowest_rank(report: dict[str, Any]) -> tuple[int, float]:
    """Return the rank whose device took longest for the same product, and how many medians of the others that is."""
    times = report["matmul_milliseconds"]
    slowest = max(range(len(times)), key=times.__getitem__)
    others = [*times[:slowest], *times[slowest + 1 :]] or times
    return slowest, times[slowest] / max(statistics.median(others), 1e-9)


def as_text(report: dict[str, Any]) -> str:
    """Return the report for a reader, the verdict last."""
    rows = [[str(row[name]) for name in _COLUMNS] for row in report["ranks"]]
    lines = [*_table(_COLUMNS, rows), ""]
    for row in report["ranks"]:
        if row["gpus"] or row["visible_devices"] is not None:
            names = ", ".join(f"{count} x {name}" for name, count in Counter(row["gpus"]).items()) or "no GPU"
            hint = "" if row["visible_devices"] is None else f" (CUDA_VISIBLE_DEVICES={row['visible_devices']})"
            lines.append(f"rank {row['rank']} sees {names}{hint}")
    skew = max(report["clock_skew_seconds"]) - min(report["clock_skew_seconds"])
    lines.append(f"clock skew     {1e3 * skew:.1f} ms between the ranks")
    verdicts = [
        f"{name} {'WRONG' if found['wrong_on_ranks'] else 'ok'}" for name, found in report["collectives"].items()
    ]
    lines.append(f"collectives    {', '.join(verdicts)}")
    slowest, factor = slowest_rank(report)
    lines.append(f"slowest rank   {slowest}, {factor:.2f} times the others' median for the same product")
    if report["all_reduce"]:
        timings = [
            [_spelled(each["bytes"]), f"{1e3 * each['seconds']:.2f} ms", f"{each['gigabytes_per_second']:.3f} GB/s"]
            for each in report["all_reduce"]
        ]
        lines += ["", *_table(("all_reduce of", "latency", "bandwidth"), timings)]
    lines += ["", *(f"warning: {text}" for text in report["warnings"]), _verdict(report)]
    return "\n".join(lines)


def _verdict(report: dict[str, Any]) -> str:
    if report["problems"]:
        return f"FAILED: {'; '.join(report['problems'])}."
    hosts = len({row["host"] for row in report["ranks"]})
    count = len(report["warnings"])
    size = report["world_size"]
    fleet = f"{size} rank{'s' * (size > 1)} on {hosts} host{'s' * (hosts > 1)}"
    return f"OK: {fleet}; {count} warning{'s' * (count != 1)}." if count else f"OK: {fleet}."


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in (titles, *rows)) for column in range(len(titles))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (titles, *rows)
    ]


def _spelled(size: float) -> str:
    return f"{size / 2**20:g} MiB" if size >= 2**20 else f"{size / 2**10:g} KiB"
