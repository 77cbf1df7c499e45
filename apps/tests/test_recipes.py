"""The recipes of adversarial training compose, build, and run a step."""

from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from torch.utils.data import Dataset

import schema
from assembly import make_loader, make_model, make_runners
from building import batch_sizes, plain
from srforge.distributed import set_active_strategy, setup_device
from srforge.training import GANRunner, R1Penalty, TrainingRunner

CONFIG = Path(__file__).resolve().parents[1] / "conf"


class Pairs(Dataset):
    """Noise; ``scale`` times as large in HR."""

    def __init__(self, scale, patch):
        self.scale, self.patch = scale, patch

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return {"lr": torch.rand(3, self.patch, self.patch), "hr": torch.rand(3, *2 * (self.scale * self.patch,))}


@pytest.fixture(autouse=True)
def alone():
    torch.set_num_threads(1)
    set_active_strategy(None)
    yield
    set_active_strategy(None)


def built(*overrides):
    """Return the training loop of a composed configuration, and a batch for it."""
    schema.register()
    with initialize_config_dir(str(CONFIG), version_base="1.3"):
        config = compose("train", [*overrides, "system.num_workers=0"])
    settings = plain(config)
    model, device = setup_device(make_model(config, settings), "cpu")
    sizes = batch_sizes({**settings["training"], "batch_size": 2, "global_batch_size": None}, 1)
    loader = make_loader(Pairs(config.data.scale, 8), settings, sizes, 0, device, training=True)
    return make_runners(config, settings, model, loader)[0], next(iter(loader))


def test_a_plain_model_has_one_optimizer():
    runner, _ = built()
    assert isinstance(runner, TrainingRunner)
    assert set(runner.optimizers) == {"model"}


def test_the_small_recipe_has_an_optimizer_and_a_rate_for_each_part():
    runner, batch = built("run=gan_demo", "parts.discriminator.lr=0.125", "optimizer.lr=0.25")
    assert isinstance(runner, GANRunner)
    rates = {name: optimizer.param_groups[0]["lr"] for name, optimizer in runner.optimizers.items()}
    assert rates == {"generator": 0.25, "discriminator": 0.125}
    assert isinstance(runner.hooks.hooks[0], R1Penalty)
    runner.dry_step(batch)
    assert all(p.grad is not None for p in runner.model.parameters())


def test_the_large_recipe_builds_and_runs(tmp_path):
    from srforge.sr.perceptual import vgg19_layers

    weights = torch.nn.Sequential(*vgg19_layers().values()).state_dict()
    torch.save({f"features.{name}": value for name, value in weights.items()}, tmp_path / "vgg.pt")
    runner, batch = built(
        "run=realesrgan",
        f"objective.terms.perceptual.function.weights={tmp_path / 'vgg.pt'}",
        "data.train.dataset.hr_folder=unused",
        "data.validation.hr_folder=unused",
        "model.generator.num_features=4",
        "model.generator.num_blocks=1",
        "model.generator.growth=2",
        "model.discriminator.num_features=2",
        "training.precision=fp32",
    )
    assert isinstance(runner, GANRunner)
    assert set(runner.objective.terms) == {"l1", "perceptual"}
    assert runner.ema is not None
    runner.dry_step(batch)
    assert all(p.grad is not None for p in runner.model.parameters())


def test_the_memory_format_is_settled_before_the_model_is_wrapped():
    schema.register()
    with initialize_config_dir(str(CONFIG), version_base="1.3"):
        config = compose("train", ["training.channels_last=true"])
    images = [p for p in make_model(config, plain(config)).parameters() if p.ndim == 4]
    assert images
    assert all(p.is_contiguous(memory_format=torch.channels_last) for p in images)
