import math
import pickle
import random
from importlib.machinery import ModuleSpec

import pytest
import torch

from srforge.distributed.errors import ConfigurationError
from srforge.sr import EDSR, bicubic_downscale, bicubic_upscale, demo_photographs, l1, psnr_y, to_float
from srforge.sr.datasets import demo

pytest.importorskip("skimage", reason="the photographs are those of scikit-image, the extra srforge-sr[demo]")


@pytest.mark.parametrize("scale", [2, 3, 4])
def test_training_samples_are_aligned_crops(scale):
    random.seed(0)
    dataset = demo_photographs("train", scale=scale, patch=16)
    for index in range(len(dataset)):
        sample = dataset[index]
        assert (sample["lr"].shape, sample["hr"].shape) == ((3, 16, 16), (3, 16 * scale, 16 * scale))
        assert sample["lr"].dtype == sample["hr"].dtype == torch.uint8
        # Inside the kernel's reach of the border the crop's own reduction is the crop of the reduction.
        own = bicubic_downscale(sample["hr"], scale)[:, 2:-2, 2:-2].int()
        assert (own - sample["lr"][:, 2:-2, 2:-2].int()).abs().max() <= 1


def test_validation_boxes_are_fixed_and_of_other_photographs():
    dataset = demo_photographs("validation", scale=3)
    assert len(dataset) == 6
    for index in range(len(dataset)):
        first, second = dataset[index], dataset[index]
        assert torch.equal(first["hr"], second["hr"])
        assert first["hr"].shape == (3, 168, 168)
        assert torch.equal(first["lr"], bicubic_downscale(first["hr"], 3))
    assert not {name for name, _, _ in demo._VALIDATION} & set(demo._TRAINING)
    assert not any(name.startswith("motorcycle") for name, _, _ in demo._VALIDATION)


def test_validation_boxes_do_not_overlap():
    for index, (name, top, left) in enumerate(demo._VALIDATION):
        for other, other_top, other_left in demo._VALIDATION[:index]:
            assert name != other or abs(top - other_top) >= demo._BOX or abs(left - other_left) >= demo._BOX


def test_it_pickles_as_paths():
    dataset = demo_photographs("train", scale=2)
    dataset[0]
    assert len(pickle.dumps(dataset)) < 1000


def test_a_plain_loop_over_the_data_set_ends():
    assert sum(1 for _ in demo_photographs("validation", scale=2)) == 6


@pytest.mark.parametrize("seed", [0, 1])
def test_the_small_model_beats_bicubic_by_half_a_decibel_after_150_steps(seed):
    """The demo's recipe with a bare loop: Adam, warm-up, cosine."""
    random.seed(seed)
    torch.manual_seed(seed)
    training, validation = demo_photographs("train", scale=2), demo_photographs("validation", scale=2)
    model = EDSR(2, num_features=16, num_blocks=3)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(150):
        rate = min((step + 1) / 8, 0.5 * (1 + math.cos(math.pi * step / 150)))
        optimizer.param_groups[0]["lr"] = 2e-3 * rate
        samples = [training[index % len(training)] for index in range(16 * step, 16 * step + 16)]
        lr, hr = (to_float(torch.stack([sample[key] for sample in samples])) for key in ("lr", "hr"))
        optimizer.zero_grad()
        l1(model(lr), hr).mean().backward()
        optimizer.step()
    gains = []
    for index in range(len(validation)):
        lr, hr = (to_float(validation[index][key]).unsqueeze(0) for key in ("lr", "hr"))
        sr = model(lr).detach()
        gains.append(psnr_y(sr, hr, scale=2) - psnr_y(bicubic_upscale(lr, 2), hr, scale=2))
    assert torch.cat(gains).mean() > 0.5
    assert (torch.cat(gains) > 0).all()


def test_absent_photographs_name_the_extra(monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"astronaut.png is not installed. .*pip install 'srforge-sr\[demo\]'"):
        demo_photographs("train", scale=2)
    elsewhere = ModuleSpec("skimage", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(demo, "find_spec", lambda name: elsewhere)
    with pytest.raises(ConfigurationError, match=r"chelsea.png is not installed"):
        demo_photographs("validation", scale=2)


def test_bad_arguments_are_refused():
    with pytest.raises(ConfigurationError, match=r"`split` must be 'train' or 'validation', but is 'test'"):
        demo_photographs("test", scale=2)
    with pytest.raises(ConfigurationError, match=r"`scale` must be a whole number from 1 to 8, but is 9"):
        demo_photographs("train", scale=9)
