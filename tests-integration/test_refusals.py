"""Ranks that were started differently are refused by the training script, on every rank and at once."""

import subprocess
import sys
from pathlib import Path

import pytest

from failure_run import ARGUMENTS
from harness import free_port, kill_session, rank_environment

APP = Path(__file__).parents[1] / "apps" / "train.py"


@pytest.mark.parametrize(
    ("own_arguments", "own_world_sizes", "message"),
    [
        (("training.epochs=2", "training.epochs=3"), (2, 2), "`training.epochs` is 2 on rank 0 and 3 on rank 1"),
        (
            ("++system.distributed.timeout_minutes=2", "++system.distributed.timeout_minutes=3"),
            (2, 2),
            "`timeout_minutes` is ",
        ),
        (("training.epochs=2", "training.epochs=2"), (2, 3), "WORLD_SIZE is "),
    ],
)
def test_difference_is_named_on_both_ranks(tmp_path, own_arguments, own_world_sizes, message):
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, str(APP), *ARGUMENTS, f"run.root={tmp_path}", own],
            env=rank_environment(rank, world_size, port),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for rank, (own, world_size) in enumerate(zip(own_arguments, own_world_sizes, strict=True))
    ]
    try:
        said = [process.communicate(timeout=100)[1] for process in processes]
    finally:
        for process in processes:
            kill_session(process)
    assert [process.returncode for process in processes] == [1, 1], said
    assert all(message in text for text in said), "\n".join(said)
