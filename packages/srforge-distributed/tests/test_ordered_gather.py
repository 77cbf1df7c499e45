import pytest
import torch

from srforge.distributed.active import set_active_strategy
from srforge.distributed.errors import CollectiveError
from srforge.distributed.ordered_gather import gather_in_order
from srforge.distributed.testing import FakeStrategy


@pytest.fixture(autouse=True)
def _restore():
    yield
    set_active_strategy(None)


def letter(indices):
    """What a rank sends that holds the squares of these samples."""
    return ((len(indices), len(indices)), [(index, index**2) for index in indices])


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("num_samples", [0, 1, 97, 99, 100, 101])
def test_exactly_every_sample_comes_back_in_dataset_order(num_samples, world_size):
    order = torch.randperm(num_samples, generator=torch.Generator().manual_seed(num_samples)).tolist()
    shards = [order[rank::world_size] for rank in range(world_size)]
    for rank in range(world_size):
        others = [letter(shard) for other, shard in enumerate(shards) if other != rank]
        set_active_strategy(FakeStrategy(rank, world_size, peers=others))
        own = shards[rank]
        gathered = gather_in_order([index**2 for index in own], own, num_samples=num_samples)
        assert gathered == [index**2 for index in range(num_samples)]


def test_tensors_come_back_detached():
    values = torch.ones(2, 3, requires_grad=True) * 2
    first, second = gather_in_order(values, torch.tensor([1, 0]))
    assert not first.requires_grad
    assert second.tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("own", "other", "named"), [([0, 1], [1, 2], "rank 0 and from rank 1"), ([3, 3], [4], "rank 0 and from rank 0")]
)
def test_duplicates_are_refused_by_rank(own, other, named):
    set_active_strategy(FakeStrategy(0, 2, peers=[letter(other)]))
    with pytest.raises(CollectiveError, match=f"each sample must be gathered once, but sample . came from {named}"):
        gather_in_order([0] * len(own), own)


def test_missing_samples_are_refused_when_their_number_is_known():
    set_active_strategy(FakeStrategy(0, 2, peers=[letter([1])]))
    with pytest.raises(CollectiveError, match=r"samples 0 to 3 must be gathered, but 2 of them are missing.* first 2"):
        gather_in_order([0], [0], num_samples=4)


def test_unequal_lengths_on_another_rank_are_an_error_here():
    set_active_strategy(FakeStrategy(0, 2, peers=[((2, 1), [(1, 1)])]))
    with pytest.raises(CollectiveError, match=r"`indices` must have one entry .* rank 1 gave 1 for 2 values"):
        gather_in_order([0], [0])
