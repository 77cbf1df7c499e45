import random
from collections import UserDict

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

from srforge.data.attributes import find_generators


class Holder(Dataset):
    def __init__(self, held):
        self.held = held

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return index


class Slotted:
    __slots__ = ("rng",)

    def __init__(self, rng):
        self.rng = rng


KINDS = {
    "python": lambda: random.Random(0),
    "numpy": lambda: np.random.default_rng(0),
    "numpy, legacy": lambda: np.random.RandomState(0),
    "numpy, bits": lambda: np.random.PCG64(0),
    "torch": torch.Generator,
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_generator_is_found(kind):
    generator = KINDS[kind]()
    assert find_generators(Holder(generator), "dataset") == [("dataset.held", generator)]


def test_generators_are_found_wherever_a_data_set_holds_them():
    first, second, third, fourth = (random.Random(seed) for seed in range(4))
    dataset = Subset(
        ConcatDataset([Holder([first, {"crop": second}]), Holder(Slotted(third)), Holder((4, {fourth}))]), [0]
    )
    assert [path for path, _ in find_generators(dataset, "dataset")] == [
        "dataset.dataset.datasets[0].held[0]",
        "dataset.dataset.datasets[0].held[1]['crop']",
        "dataset.dataset.datasets[1].held.rng",
        "dataset.dataset.datasets[2].held[1]{...}",
    ]


def test_a_mapping_that_may_be_a_file_is_not_read():
    class Closed(UserDict):
        def __iter__(self):
            raise ValueError("invalid location identifier")

    assert find_generators(Holder(Closed()), "dataset") == []


def test_a_data_set_without_generators_gives_none_and_cycles_end():
    dataset = Holder({"files": [f"{number}.png" for number in range(100_000)], "scale": 4, "lr": torch.zeros(3)})
    dataset.itself = dataset
    assert find_generators(dataset, "dataset") == []
