"""Batches that cannot be made: the error names the entry, what differs and what to do."""

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, default_collate

from srforge.data import DataLoaderFactory
from srforge.data.collation import collate_samples
from srforge.distributed import ConfigurationError

IMAGE = torch.zeros(3, 4, 5)


class Given(Dataset):
    """Samples as they are given."""

    def __init__(self, *samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


class Stream(IterableDataset):
    def __iter__(self):
        return iter([{"hr": torch.zeros(2)}, {"hr": torch.zeros(3)}])


def test_samples_that_fit_are_collated_as_torch_does_it():
    samples = [{"lr": IMAGE + i, "name": f"a{i}", "sizes": (i, [2.5])} for i in range(3)]
    batch, expected = collate_samples(samples), default_collate(samples)
    assert torch.equal(batch.pop("lr"), expected.pop("lr"))
    assert str(batch) == str(expected)


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (
            [{"lr": IMAGE, "hr": {"B2": torch.zeros(1, 2)}}, {"lr": IMAGE, "hr": {"B2": torch.zeros(1, 3)}}],
            r"sample\['hr'\]\['B2'\] must have one shape .* \(1, 2\), \(1, 3\)\. .*a batch size of 1",
        ),
        ([torch.zeros(n) for n in range(1, 8)], r"sample must have one shape .* and 3 more"),
        ([(IMAGE, None), (IMAGE, None)], r"sample\[1\] must hold something in every sample"),
        ([{"a": 1}, {"b": 1}], "sample must have the same keys .* only some have a, b"),
        ([{"a": [1, 2]}, {"a": [1]}], r"sample\['a'\] must have one length .* \[1, 2\]"),
        ([{"a": 1.0}, {"a": "x"}], r"sample\['a'\] must be of one type in a batch, but is float, str"),
    ],
)
def test_what_does_not_fit_is_named(samples, message):
    with pytest.raises(ConfigurationError, match=message):
        collate_samples(samples)


def test_what_torch_cannot_collate_for_another_reason_keeps_its_error():
    with pytest.raises(TypeError, match="default_collate"):
        collate_samples([{"a": object()}, {"a": object()}])


@pytest.mark.parametrize("training", [True, False])
def test_every_loader_of_the_factory_names_it(training):
    dataset = Given({"hr": torch.zeros(2)}, {"hr": torch.zeros(3)})
    loader = DataLoaderFactory(dataset, 2, shuffle=training, seed=0).get_loader()
    with pytest.raises(ConfigurationError, match=r"sample\['hr'\] must have one shape"):
        list(loader)
    with pytest.raises(ConfigurationError, match=r"sample\['hr'\] must have one shape"):
        list(DataLoaderFactory(Stream(), 2, shuffle=False, seed=0).get_loader())


def test_a_data_set_that_makes_batches_itself_is_left_alone():
    dataset = Given({"hr": torch.zeros(2, 1), "names": None}, {"hr": torch.zeros(3, 1), "names": None})
    batches = list(DataLoaderFactory(dataset, None, shuffle=False, seed=0).get_loader())
    assert [len(batch["hr"]) for batch in batches] == [2, 3]


@pytest.mark.parametrize("others", [torch.float32, torch.uint16, torch.int16])
@pytest.mark.parametrize("convert", [lambda image: image, lambda image: image.numpy()], ids=["torch", "numpy"])
def test_images_of_mixed_types_are_named_and_not_promoted(others, convert):
    """Torch makes floats of uint8 beside floats: 255 where the others have 1."""
    images = [convert(torch.ones(3, 4, 4).to(dtype)) for dtype in (torch.uint8, others)]
    kinds = rf"must have one dtype in a batch, but has (torch.)?uint8, {images[1].dtype!s}"
    for samples, path in (
        ([{"lr": 1, "hr": image} for image in images], r"sample\['hr'\]"),
        ([(0, {"a": [image]}) for image in images], r"sample\[1\]\['a'\]\[0\]"),
        (images, "sample"),
    ):
        with pytest.raises(ConfigurationError, match=path + " " + kinds):
            collate_samples(samples)


def test_numbers_and_floats_of_mixed_types_are_still_torchs_business():
    half, single = torch.ones(3, 4, 4).half(), torch.ones(3, 4, 4)
    assert collate_samples([half, single]).dtype == torch.float32
    assert collate_samples([{"label": torch.tensor(1)}, {"label": torch.tensor(0.5)}])["label"].tolist() == [1.0, 0.5]
    assert collate_samples([(1, "a"), (2.0, "b")])[1] == ("a", "b")
    labels, mask = torch.ones(4, 4, dtype=torch.int32), torch.ones(4, 4, dtype=torch.bool)
    assert collate_samples([labels, labels.long()]).dtype == torch.int64
    assert collate_samples([mask, labels]).dtype == torch.int32
