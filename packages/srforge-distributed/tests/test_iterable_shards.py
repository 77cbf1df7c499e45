import itertools
import logging
import random
import threading

import pytest
import torch
from torch.utils.data import ChainDataset, DataLoader, IterableDataset

from srforge.distributed.errors import CollectiveError, ConfigurationError
from srforge.distributed.iterable_shards import ShardedIterable, stop_together
from srforge.distributed.seeding import preserved_rng
from srforge.distributed.testing import FakeStrategy


class Noisy(IterableDataset):
    """Elements (index, draw, epoch); the draw comes from a global generator, as augmentation does."""

    def __init__(self, length):
        self.length, self.epoch = length, None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for index in range(self.length):
            yield index, random.random() + float(torch.rand(())), self.epoch


class Skipping(Noisy):
    """Yields its own shard alone."""

    shard = None

    def set_shard(self, index, num_shards):
        self.shard = index, num_shards

    def __iter__(self):
        return (element for element in super().__iter__() if element[0] % self.shard[1] == self.shard[0])


class SplittingWorkers(Noisy):
    """Splits over workers itself, as torch's documentation shows."""

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        return itertools.islice(super().__iter__(), worker.id, None, worker.num_workers)


def shards(world_size, make, num_workers=0, *, epoch=0, **options):
    found = []
    for rank in range(world_size):
        dataset = ShardedIterable(make(), seed=1, rank=rank, world_size=world_size, **options)
        dataset.set_epoch(epoch)
        loader = DataLoader(
            dataset, batch_size=None, num_workers=num_workers, multiprocessing_context=CONTEXT[num_workers > 0]
        )
        found.append(list(loader))
    return found


CONTEXT = {False: None, True: "fork"}


@pytest.mark.parametrize("make", [lambda: Noisy(23), lambda: Skipping(23)], ids=["strided", "skipping"])
@pytest.mark.parametrize(("world_size", "num_workers"), [(1, 0), (2, 0), (3, 0), (5, 0), (2, 2), (3, 2)])
def test_each_element_comes_once_over_ranks_and_workers(make, world_size, num_workers):
    elements = list(itertools.chain.from_iterable(shards(world_size, make, num_workers, epoch=4)))
    assert sorted(element[0] for element in elements) == list(range(23))
    assert {element[2] for element in elements} == {4}


def test_an_element_does_not_depend_on_who_makes_it():
    expected = sorted(shards(1, lambda: Noisy(20))[0])
    for world_size, num_workers in ((2, 0), (3, 2)):
        elements = itertools.chain.from_iterable(shards(world_size, lambda: Noisy(20), num_workers))
        assert sorted(elements) == expected


def test_epochs_and_shards_draw_apart():
    first, second = (sorted(shards(1, lambda: Noisy(20), epoch=epoch)[0]) for epoch in (0, 1))
    assert {element[1] for element in first}.isdisjoint(element[1] for element in second)
    drawn = [element[1] for shard in shards(2, lambda: Skipping(20)) for element in shard]
    assert len(set(drawn)) == 20


def test_a_data_set_that_splits_over_workers_itself_is_split_over_ranks_alone():
    elements = itertools.chain.from_iterable(shards(2, lambda: SplittingWorkers(23), 2, by_worker=False))
    assert sorted(element[0] for element in elements) == list(range(23))


def test_a_data_set_that_splits_over_workers_itself_is_refused_unless_its_user_decided():
    make = lambda: SplittingWorkers(23)  # noqa: E731 - as in the other tests
    with pytest.raises(
        ConfigurationError, match=r"`by_worker` must be False .*SplittingWorkers asks for the number of"
    ):
        shards(2, make, 2)
    assert sum(map(len, shards(1, make, 1))) == 23  # one worker loses nothing
    assert sum(map(len, shards(1, make, 2, by_worker=True))) < 23


def test_without_workers_the_training_process_keeps_its_generators():
    with preserved_rng():
        torch.manual_seed(5)
        undisturbed = torch.rand(6)
        torch.manual_seed(5)
        drawn, elements = [], []
        for element in ShardedIterable(Noisy(6), seed=1, rank=0, world_size=1):
            elements.append(element)
            drawn.append(float(torch.rand(())))
    assert drawn == undisturbed.tolist()
    assert list(map(list, elements)) == shards(1, lambda: Noisy(6))[0]


def test_living_workers_see_each_new_epoch():
    dataset = ShardedIterable(Noisy(6), seed=1, rank=0, world_size=1)
    loader = DataLoader(
        dataset, batch_size=None, num_workers=2, persistent_workers=True, multiprocessing_context="fork"
    )
    epochs = []
    for epoch in range(3):
        dataset.set_epoch(epoch)
        epochs.append(sorted(loader))
    assert [{element[2] for element in elements} for elements in epochs] == [{0}, {1}, {2}]
    assert epochs[1] == sorted(shards(1, lambda: Noisy(6), epoch=1)[0])
    del loader


def test_data_sets_in_a_chain_are_told_the_epoch():
    (elements,) = shards(1, lambda: ChainDataset([Noisy(2), Noisy(2)]), epoch=3)
    assert [element[2] for element in elements] == [3, 3, 3, 3]


def test_what_is_not_iterable_is_refused():
    with pytest.raises(ConfigurationError, match="`dataset` must be iterable, but int has no `__iter__`"):
        ShardedIterable(3, seed=0, rank=0, world_size=1)


class Meeting:
    """An all-gather among threads, one per rank; a rank that stays away is an error, not a hang."""

    def __init__(self, world_size):
        self.barrier = threading.Barrier(world_size, timeout=10)
        self.values = [None] * world_size

    def strategy(self, rank):
        strategy = FakeStrategy(rank, len(self.values))
        strategy.all_gather = lambda tensor: self.gather(rank, tensor)
        return strategy

    def gather(self, rank, tensor):
        self.values[rank] = tensor
        self.barrier.wait()
        gathered = torch.stack(self.values)
        self.barrier.wait()
        return gathered


def run_ranks(all_batches):
    """What each rank got, and its error."""
    meeting, found = Meeting(len(all_batches)), [([], [None]) for _ in all_batches]

    def run(rank):
        try:
            found[rank][0].extend(stop_together(all_batches[rank], meeting.strategy(rank)))
        except (CollectiveError, OSError) as error:
            found[rank][1][0] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(all_batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
        assert not thread.is_alive()
    return found


@pytest.mark.parametrize("lengths", [(5, 2), (2, 5), (0, 3), (3, 0, 1), (4, 4), (0, 0), (1, 1, 1, 7)])
def test_all_ranks_stop_when_the_first_one_ends(lengths):
    for batches, error in run_ranks([range(length) for length in lengths]):
        assert error == [None]
        assert batches == list(range(min(lengths)))


def failing_after(count):
    yield from range(count)
    raise OSError("disk gone")


def test_a_rank_that_fails_ends_the_others_with_its_name():
    found = run_ranks([range(9), failing_after(3), range(9)])
    assert isinstance(found[1][1][0], OSError)
    for rank in (0, 2):
        assert isinstance(found[rank][1][0], CollectiveError)
        assert "Making batch 3 must work on every rank, but failed on [1]" in str(found[rank][1][0])


def test_ranks_that_end_early_are_named_once(caplog):
    with caplog.at_level(logging.WARNING):
        run_ranks([range(5), range(2), range(5), range(2)])
        run_ranks([range(3), range(3)])
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["Ranks [1, 3] had no batch after the first 2: every rank stops there."]


def test_one_process_needs_no_collective():
    strategy = FakeStrategy(0, 1)
    assert list(stop_together(range(4), strategy)) == [0, 1, 2, 3]
    assert strategy.calls == []
