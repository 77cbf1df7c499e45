import pytest
import torch

from srforge.distributed.errors import CollectiveError, ConfigurationError
from srforge.distributed.metric_tree import MetricSum
from srforge.distributed.testing import FakeStrategy


def test_any_rank_of_any_world_can_be_had():
    strategy = FakeStrategy(777, 1024)
    assert (strategy.rank, strategy.world_size, strategy.is_main, strategy.name) == (777, 1024, False, "ddp")
    assert FakeStrategy(0, 1).name == "single"


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 2), (2, 2), (0, 0)])
def test_ranks_out_of_range_are_refused(rank, world_size):
    with pytest.raises(ConfigurationError, match=rf"`rank` must be in \[0, world_size={world_size}\), but is {rank}"):
        FakeStrategy(rank, world_size)


def test_peers_of_another_number_are_refused():
    with pytest.raises(ConfigurationError, match="`peers` must hold one value for each of the 2 other ranks"):
        FakeStrategy(0, 3, peers=[1, 2, 3])


def test_without_peers_every_rank_says_the_same():
    strategy = FakeStrategy(1, 3)
    assert strategy.all_gather(torch.tensor([1, 2])).tolist() == [[1, 2]] * 3
    assert strategy.all_gather_object("x") == ["x"] * 3
    assert strategy.broadcast_object("x") == "x"
    strategy.barrier()
    assert strategy.reduce_metrics({"loss": MetricSum(3.0, 2)}) == {"loss": 1.5}
    assert strategy.calls == ["all_gather", "all_gather_object", "broadcast_object", "barrier"] + ["all_gather"] * 2


def test_listed_peers_stand_in_rank_order():
    strategy = FakeStrategy(1, 3, peers=["zero", "two"])
    assert strategy.all_gather_object("one") == ["zero", "one", "two"]
    assert strategy.broadcast_object("one") == "zero"
    assert strategy.broadcast_object("one", source=2) == "two"
    assert strategy.all_gather(torch.tensor(1)).tolist() == [1, 1, 1]
    tensors = FakeStrategy(0, 2, peers=[torch.tensor(7)])
    assert tensors.all_gather(torch.tensor(1)).tolist() == [1, 7]
    assert tensors.all_gather_object("x") == ["x", "x"]


def test_a_function_answers_for_each_other_rank():
    strategy = FakeStrategy(0, 4, peers=lambda operation, rank, value: value * 10**rank)
    assert strategy.all_gather_object(1) == [1, 10, 100, 1000]
    assert strategy.all_gather(torch.tensor(2)).tolist() == [2, 20, 200, 2000]


def test_peers_metrics_go_through_the_real_reduction():
    strategy = FakeStrategy(0, 2, peers=[{"psnr": MetricSum(8.0, 2), "extra": MetricSum(5, 1)}])
    assert strategy.reduce_metrics({"psnr": MetricSum(5.0, 5)}) == {"psnr": 13 / 7, "extra": 5.0}
    assert strategy.last_reduction.missing == {"extra": (0,)}
    assert len(strategy.calls) == 3
    with pytest.raises(CollectiveError, match="`psnr` must be the same kind"):
        strategy.reduce_metrics({"psnr": MetricSum(5.0, 5, "max")})


def test_a_model_is_prepared_and_left_unwrapped():
    model = torch.nn.Linear(2, 2)
    strategy = FakeStrategy(1, 4)
    assert not strategy.is_prepared(model)
    prepared = strategy.prepare(model)
    assert prepared is model
    assert strategy.is_prepared(prepared)
    strategy.check_replicas(prepared)
    strategy.sync_buffers(prepared)
    with strategy.no_sync(prepared):
        pass


def test_abort_ends_the_test_and_not_the_process():
    with pytest.raises(SystemExit, match="3"):
        FakeStrategy(0, 2).abort(3)
