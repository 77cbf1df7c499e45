from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, DistributedSampler, IterableDataset, Subset

from srforge.distributed import ConfigurationError, ShardedSampler
from srforge.distributed.testing import FakeStrategy
from srforge.training.batches import (
    FirstBatchKept,
    first_batch,
    micro_batches,
    num_samples_of,
    refuse_unsharded,
    skipped_samples,
    to_device,
)

CPU = torch.device("cpu")


class Pair(NamedTuple):
    a: Any
    b: str


class Numbers(IterableDataset):
    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return iter(float(i) for i in range(self.length))


def planned_loader(num_samples, rank, world_size, batch_size, accumulate):
    sampler = ShardedSampler(
        num_samples,
        rank=rank,
        world_size=world_size,
        batch_size=batch_size,
        shuffle=True,
        training=True,
        seed=0,
        accumulate=accumulate,
    )
    return DataLoader(list(range(num_samples)), batch_size=batch_size, sampler=sampler)


@pytest.mark.parametrize(("num_samples", "accumulate"), [(16, 1), (17, 1), (10, 2), (3, 1), (23, 3)])
def test_scaled_means_add_up_to_the_mean_over_the_windows_real_samples(num_samples, accumulate):
    world_size, batch_size = 2, 2
    windows = {}
    for rank in range(world_size):
        window = []
        for micro in micro_batches(
            planned_loader(num_samples, rank, world_size, batch_size, accumulate), FakeStrategy(rank, world_size)
        ):
            window.append(micro)
            if micro.ends_window:
                windows.setdefault(rank, []).append(window)
                window = []
        assert window == [], "the last micro-batch ends a window"
    seen = []
    for ranks in zip(windows[0], windows[1], strict=True):
        flat = [micro for window in ranks for micro in window]
        real = [x for micro in flat for x in micro.data[: micro.count].tolist()]
        # What the optimizer sees: micro-batches are summed on a rank, ranks are averaged.
        mean = sum(micro.loss_scale * micro.data.double().mean().item() for micro in flat) / world_size
        assert mean == pytest.approx(sum(real) / len(real), rel=1e-12)
        seen += real
    assert sorted(seen) == list(range(num_samples))


def test_a_stream_has_windows_of_equal_weights_and_a_short_last_one():
    loader = DataLoader(Numbers(10), batch_size=2)
    micros = list(micro_batches(loader, FakeStrategy(0, 1), accumulate=3))
    assert [(m.index, m.ends_window, round(m.loss_scale, 4)) for m in micros] == [
        (0, False, 0.3333),
        (1, False, 0.3333),
        (2, True, 0.3333),
        (3, False, 0.5),
        (4, True, 0.5),
    ]


def test_a_collate_function_that_leaves_samples_out_is_an_error():
    loader = planned_loader(8, 0, 1, 4, 1)
    loader.collate_fn = lambda samples: torch.tensor([sample for sample in samples if sample != 3])
    with pytest.raises(ConfigurationError, match=r"must hold the 4 samples .* but holds 3"):
        list(micro_batches(loader, FakeStrategy(0, 1)))


def test_max_windows_ends_after_whole_windows():
    loader = planned_loader(40, 0, 1, 2, 2)
    assert [m.index for m in micro_batches(loader, FakeStrategy(0, 1), max_windows=3)] == [0, 1, 2, 3, 4, 5]
    assert list(micro_batches(loader, FakeStrategy(0, 1), max_windows=0)) == []


def test_integer_images_become_floats_and_labels_stay():
    batch = {
        "lr": {"red": torch.tensor([0, 255], dtype=torch.uint8)},
        "hr": torch.tensor([0, 65535, 32768], dtype=torch.int32).to(torch.uint16),
        "label": torch.tensor([3]),
        "pair": Pair(torch.tensor([1.5]), "name"),
        "names": ["a", "b"],
    }
    moved = to_device(batch, CPU)
    assert moved["lr"]["red"].tolist() == [0.0, 1.0]
    assert moved["hr"].tolist() == pytest.approx([0.0, 1.0, 32768 / 65535])
    assert moved["hr"].dtype == torch.float32
    assert moved["label"].dtype == torch.int64
    assert moved["pair"].b == "name"
    assert isinstance(moved["pair"], Pair)
    assert moved["names"] == ["a", "b"]


def test_channels_last_is_for_images():
    moved = to_device({"lr": torch.zeros(2, 3, 4, 5), "v": torch.zeros(2, 3)}, CPU, channels_last=True)
    assert moved["lr"].is_contiguous(memory_format=torch.channels_last)
    assert moved["v"].is_contiguous()


def test_the_number_of_samples_is_that_of_the_first_tensor():
    assert num_samples_of({"scalar": torch.tensor(1.0), "lr": {"red": torch.zeros(5, 2)}}) == 5
    with pytest.raises(ConfigurationError, match=r"at least one tensor of shape \(N"):
        num_samples_of({"a": 1})


def test_a_streams_first_batch_is_seen_and_yielded_again_once():
    loader = FirstBatchKept(DataLoader(Numbers(6), batch_size=2))
    assert first_batch(loader).tolist() == [0.0, 1.0]
    assert [batch.tolist() for batch in loader] == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    assert [batch.tolist() for batch in loader] == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    assert first_batch(FirstBatchKept(DataLoader(Numbers(0)))) is None


def test_a_map_style_loaders_first_batch_is_that_of_its_order():
    loader = planned_loader(12, 1, 2, 3, 1)
    assert first_batch(loader).tolist() == next(iter(loader)).tolist()
    nothing = ShardedSampler(1, rank=1, world_size=2, batch_size=1, shuffle=False, training=False, seed=0)
    empty = DataLoader([0], sampler=nothing)
    assert first_batch(empty) is None


def test_a_loader_without_batches_gives_a_single_sample():
    loader = DataLoader([torch.tensor([7.0])], batch_size=None)
    assert first_batch(loader).tolist() == [7.0]


def test_a_loader_that_gives_all_ranks_the_same_is_refused():
    plain, sharded = DataLoader([1, 2, 3], shuffle=True), planned_loader(8, 0, 2, 2, 1)
    with pytest.raises(ConfigurationError, match="RandomSampler, which gives all of them the same"):
        refuse_unsharded(plain, FakeStrategy(0, 2))
    for loader, strategy in ((plain, FakeStrategy(0, 1)), (sharded, FakeStrategy(0, 2)), ([1], FakeStrategy(0, 2))):
        refuse_unsharded(loader, strategy)
    refuse_unsharded(DataLoader(Numbers(3)), FakeStrategy(0, 2))
    refuse_unsharded(DataLoader([1, 2], sampler=DistributedSampler([1, 2], 2, 0)), FakeStrategy(0, 2))


def test_skipped_samples_are_counted_through_wrappers_and_once():
    class Skipping(list):
        def __init__(self, *values):
            super().__init__(values)
            self.skipped = [1, 2]

        def take_skipped(self):
            taken, self.skipped = self.skipped, []
            return taken

    first, second = Skipping(1, 2, 3), Skipping(4)
    loader = DataLoader(ConcatDataset([Subset(first, [0, 1]), second]))
    assert skipped_samples(loader)["skipped_samples"].total == 4
    assert skipped_samples(loader)["skipped_samples"].total == 0
    assert skipped_samples(DataLoader([1])) == {}
    assert skipped_samples([1]) == {}
