"""Resume on fleets: the number of ranks may change, rank 0 reads for all, and nobody is left behind at the end."""

import pytest
import torch

from harness import RankError
from kill_training import Network
from resume_cases import (
    continue_run,
    leave_after_work,
    save_where_nothing_can_be_saved,
    warm_start_on_every_rank,
)

NUM_SAMPLES, GLOBAL_BATCH = 29, 8


@pytest.mark.slow
@pytest.mark.timeout(300)  # fifteen processes start one after the other
def test_every_epoch_covers_the_data_exactly_while_the_world_changes(fleet, tmp_path):
    """4 -> 2 -> 1 -> 8 ranks, one epoch each, at one global batch: as one rank would have seen it."""
    whole = fleet(continue_run, 1, str(tmp_path / "whole"), 4, NUM_SAMPLES, GLOBAL_BATCH)[0]
    expected = {key: sorted(samples) for key, samples in whole["seen"].items()}
    assert [len(expected[epoch, step]) for epoch in range(4) for step in range(4)] == [8, 8, 8, 5] * 4
    for epoch, world_size in enumerate((4, 2, 1, 8)):
        ranks = fleet(
            continue_run, world_size, str(tmp_path / "run"), epoch + 1, NUM_SAMPLES, GLOBAL_BATCH, timeout=110
        )
        assert [rank["resumed"] for rank in ranks] == [epoch or None] * world_size
        for step in range(4):
            found = sorted(sample for rank in ranks for sample in rank["seen"].get((epoch, step), []))
            assert found == expected[epoch, step], "the same samples with the same augmentation in every step"
        seen = [index for step in range(4) for index, _ in expected[epoch, step]]
        assert sorted(seen) == list(range(NUM_SAMPLES))
        validated = [index for rank in ranks for samples in rank["validated"].values() for index, _ in samples]
        assert sorted(validated) == list(range(5))
        assert {rank["steps"] for rank in ranks} == {4 * (epoch + 1)}
        assert len({rank["digest"] for rank in ranks}) == 1


def test_rank_0_reads_the_weights_of_a_warm_start_for_all(fleet, tmp_path):
    torch.manual_seed(99)
    torch.save(Network().state_dict(), tmp_path / "weights.pth")
    for is_same, error in fleet(warm_start_on_every_rank, 2, str(tmp_path)):
        assert is_same
        assert error.startswith("CheckpointError: ")
        assert "absent.pth cannot be read" in error


def test_rank_0_may_end_as_soon_as_its_work_is_done(fleet):
    assert fleet(leave_after_work, 3) == ["left", "heard", "heard"]


def test_a_save_that_fails_on_rank_0_ends_every_rank(fleet, tmp_path):
    (tmp_path / "file").write_text("in the way of the folder")
    with pytest.raises(RankError, match=r"CheckpointError: .*epoch-00000.pt could not be written") as caught:
        fleet(save_where_nothing_can_be_saved, 2, str(tmp_path))
    assert "exit codes [1, 1]" in str(caught.value)
