import pytest
import torch

from srforge.distributed.errors import ConfigurationError
from srforge.sr import PatchDiscriminator, UNetDiscriminator, VGGDiscriminator

NORMS = ("none", "batch", "instance", "spectral")


def discriminators(channels):
    return [
        UNetDiscriminator(channels, 4),
        VGGDiscriminator(channels, 4),
        *(PatchDiscriminator(channels, 4, norm=norm) for norm in NORMS),
    ]


@pytest.mark.parametrize("channels", [1, 3, 13])
@pytest.mark.parametrize("size", [(32, 32), (48, 64), (37, 43)])
def test_discriminators_give_logits_for_any_size_and_channels(channels, size):
    images = torch.rand(2, channels, *size)
    for discriminator in discriminators(channels):
        logits = discriminator(images)
        assert logits.shape[:2] == (2, 1)
        assert torch.isfinite(logits).all()
    assert UNetDiscriminator(channels, 4)(images).shape == (2, 1, *size)
    assert VGGDiscriminator(channels, 4)(images).shape == (2, 1)


@pytest.mark.parametrize("index", range(2 + len(NORMS)))
def test_every_parameter_and_the_images_get_a_gradient(index):
    torch.manual_seed(0)
    discriminator = discriminators(3)[index]
    images = torch.rand(3, 3, 40, 40, requires_grad=True)
    discriminator(images).square().mean().backward()
    assert [n for n, p in discriminator.named_parameters() if p.grad is None or not p.grad.any()] == []
    assert images.grad.any()


def test_unet_has_the_size_of_the_published_one():
    assert sum(parameter.numel() for parameter in UNetDiscriminator().parameters()) == 4_376_897


@pytest.mark.parametrize("level", range(3))
def test_each_level_of_the_unet_reaches_the_way_up(level):
    torch.manual_seed(0)
    discriminator, seen = UNetDiscriminator(3, 4), []
    discriminator.up[level].register_forward_hook(lambda module, inputs, output: torch.zeros_like(output))
    following = [*discriminator.up, discriminator.refine[0]][level + 1]
    following.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    images = torch.rand(1, 3, 16, 16, requires_grad=True)
    discriminator(images)
    seen[0].square().sum().backward()
    assert images.grad.any()  # only over the skip: what came from below was replaced by 0


def test_spectral_norm_bounds_what_one_layer_can_do():
    torch.manual_seed(0)  # where the two largest singular values are close, the iteration converges slowly
    discriminator = UNetDiscriminator(3, 4)
    for _ in range(40):  # power iteration runs once a forward in training
        discriminator(torch.rand(1, 3, 16, 16))
    weight = discriminator.eval().down[0].weight.detach()
    assert float(torch.linalg.matrix_norm(weight.flatten(1), 2)) == pytest.approx(1.0, abs=1e-3)


def test_a_patch_logit_sees_seventy_pixels():
    torch.manual_seed(0)
    discriminator = PatchDiscriminator(1, 4, norm="none")
    images = torch.rand(1, 1, 160, 160, requires_grad=True)
    logits = discriminator(images)
    logits[0, 0, 9, 9].backward()
    rows = images.grad[0, 0].any(dim=1).nonzero().flatten()
    assert len(rows) == 70
    assert int(rows[-1] - rows[0]) == 69


def test_bad_arguments_are_refused():
    with pytest.raises(
        ConfigurationError, match=r"`norm` must be one of none, batch, instance, spectral, but is 'layer'"
    ):
        PatchDiscriminator(norm="layer")
    with pytest.raises(ConfigurationError, match=r"`num_layers` must be at least 1, but is 0"):
        PatchDiscriminator(num_layers=0)
    with pytest.raises(ConfigurationError, match=r"`images` must be at least 32x32 for VGGDiscriminator, but is 31x40"):
        VGGDiscriminator(3, 4)(torch.rand(2, 3, 31, 40))
    for discriminator in discriminators(3):
        with pytest.raises(
            ConfigurationError, match=r"must be \(N, 3, h, w\) for in_channels=3, but is \(2, 1, 32, 32\)"
        ):
            discriminator(torch.rand(2, 1, 32, 32))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_patches_too_small_for_the_layers_are_refused(norm, num_layers):
    discriminator = PatchDiscriminator(3, 4, num_layers=num_layers, norm=norm)
    smallest = 3 * 2**num_layers
    assert discriminator(torch.rand(2, 3, smallest, smallest)).shape == (2, 1, 1, 1)
    with pytest.raises(
        ConfigurationError,
        match=rf"`images` must be at least {smallest}x{smallest} for PatchDiscriminator .* but is {smallest - 1}x40",
    ):
        discriminator(torch.rand(2, 3, smallest - 1, 40))


def test_wrong_channels_are_named_as_images():
    for discriminator in discriminators(3):
        with pytest.raises(ConfigurationError, match=r"`images` must be \(N, 3, h, w\) for in_channels=3"):
            discriminator(torch.rand(2, 1, 64, 64))
