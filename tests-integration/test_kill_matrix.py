"""The short form of the kill matrix: every phase once, over two rows. ``kill_matrix.py`` is the long one."""

import os
import random

import pytest
import torch

from kill_matrix import Case, run_matrix
from kill_points import PHASES
from run_comparison import differences

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the driver watches ranks through Linux process handles"),
]

ROWS = (
    (Case(world_size=2, workers=0, gan=True), PHASES[::4]),
    (Case(world_size=2, workers=0), PHASES[2::4]),
    (Case(world_size=1, workers=2, persistent=True), PHASES[1::2]),
)


@pytest.mark.timeout(280)
@pytest.mark.parametrize(("case", "phases"), ROWS, ids=[str(case) for case, _ in ROWS])
def test_killed_training_ends_on_the_bits_of_training_that_was_not(tmp_path, case, phases):
    seed = random.randrange(2**32)
    print("seed", seed)
    wanted = random.Random(seed).sample(phases, len(phases))
    kills = run_matrix([case], [wanted], seed=seed, folder=tmp_path)
    assert {kill.phase for kill in kills} >= set(phases)


@pytest.mark.parametrize(
    ("other", "where"),
    [
        ({"weight": torch.tensor([0.0, -0.0]), "step": 3}, ["state.weight"]),
        ({"weight": torch.zeros(2, dtype=torch.float64), "step": 3}, ["state.weight"]),
        ({"weight": torch.zeros(2), "step": 3.0}, ["state.step"]),
        ({"step": 3, "weight": torch.zeros(2)}, ["keys of state"]),
        ({"weight": torch.zeros(2), "step": 3}, []),
    ],
)
def test_a_difference_of_one_bit_is_found(other, where):
    assert differences({"weight": torch.zeros(2), "step": 3}, other) == where
