import pytest
import torch
from torch import nn
from torch.nn import functional

from srforge.distributed.errors import ConfigurationError
from srforge.sr import PerceptualLoss
from srforge.sr.perceptual import vgg19_layers

# torchvision's numbers of VGG19's convolutions in `features`, and their widths.
CONVOLUTIONS = {0: 64, 2: 64, 5: 128, 7: 128, 10: 256, 12: 256, 14: 256, 16: 256,
                19: 512, 21: 512, 23: 512, 25: 512, 28: 512, 30: 512, 32: 512, 34: 512}  # fmt: skip


@pytest.fixture(scope="module")
def weights():
    """Random weights as torchvision names them, with the start of a classifier."""
    generator = torch.Generator().manual_seed(0)
    state, channels = {"classifier.0.bias": torch.zeros(4)}, 3
    for number, width in CONVOLUTIONS.items():
        state[f"features.{number}.weight"] = torch.randn(width, channels, 3, 3, generator=generator) * 0.05
        state[f"features.{number}.bias"] = torch.randn(width, generator=generator) * 0.1
        channels = width
    return state


@pytest.fixture(scope="module")
def weights_file(weights, tmp_path_factory):
    path = tmp_path_factory.mktemp("vgg") / "vgg19.pt"
    torch.save(weights, path)
    return path


def reference_features(images, weights, last):
    """VGG19 by hand up to the output of convolution number `last`."""
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    features = (images - mean.view(3, 1, 1)) / std.view(3, 1, 1)
    for number in CONVOLUTIONS:
        if number in (5, 10, 19, 28):
            features = functional.max_pool2d(features, 2)
        features = functional.conv2d(
            features, weights[f"features.{number}.weight"], weights[f"features.{number}.bias"], padding=1
        )
        if number == last:
            return features
        features = functional.relu(features)
    raise AssertionError


def test_loss_is_the_weighted_feature_distance_before_the_relu(weights, weights_file):
    prediction, target = torch.rand(2, 3, 24, 32), torch.rand(2, 3, 24, 32)
    loss = PerceptualLoss(weights_file, {"conv2_2": 0.5, "conv3_4": 2.0})
    distances = [
        (reference_features(prediction, weights, last) - reference_features(target, weights, last))
        .abs()
        .mean((1, 2, 3))
        for last in (7, 16)
    ]
    torch.testing.assert_close(loss(prediction, target), 0.5 * distances[0] + 2.0 * distances[1])


def test_layers_after_the_deepest_asked_one_are_dropped(weights_file):
    assert list(PerceptualLoss(weights_file, {"relu1_2": 1.0}).network) == ["conv1_1", "relu1_1", "conv1_2", "relu1_2"]


def test_the_prediction_gets_a_gradient_and_the_weights_and_target_do_not(weights_file):
    loss = PerceptualLoss(weights_file)
    prediction = torch.rand(1, 3, 16, 16, requires_grad=True)
    target = torch.rand(1, 3, 16, 16, requires_grad=True)
    loss(prediction, target).sum().backward()
    assert prediction.grad.any()
    assert target.grad is None
    assert not any(parameter.requires_grad for parameter in loss.parameters())


def test_equal_images_have_no_distance(weights_file):
    images = torch.rand(2, 3, 16, 16)
    assert PerceptualLoss(weights_file)(images, images).tolist() == [0.0, 0.0]


def test_grey_is_repeated_and_bands_are_chosen(weights_file):
    loss = PerceptualLoss(weights_file, {"conv1_2": 1.0})
    grey = torch.rand(2, 1, 16, 16), torch.rand(2, 1, 16, 16)
    rgb = tuple(image.repeat(1, 3, 1, 1) for image in grey)
    torch.testing.assert_close(loss(*grey), loss(*rgb))
    many = torch.rand(2, 13, 16, 16), torch.rand(2, 13, 16, 16)
    chosen = PerceptualLoss(weights_file, {"conv1_2": 1.0}, bands=(3, 2, 1))
    torch.testing.assert_close(chosen(*many), loss(*(image[:, [3, 2, 1]] for image in many)))
    with pytest.raises(ConfigurationError, match=r"`bands` must name three of the 13 channels, but is None"):
        loss(*many)
    with pytest.raises(ConfigurationError, match=r"`bands` must name three of the 3 channels, but is \(3, 2, 1\)"):
        chosen(torch.rand(1, 3, 16, 16), torch.rand(1, 3, 16, 16))


def test_layer_positions_are_those_of_torchvision():
    numbers = [index for index, layer in enumerate(vgg19_layers().values()) if isinstance(layer, nn.Conv2d)]
    assert numbers == list(CONVOLUTIONS)


def test_bad_arguments_are_refused(weights, weights_file, tmp_path):
    with pytest.raises(
        ConfigurationError, match=r"`weights` must be a file of VGG19 weights, but .*none.pt does not exist"
    ):
        PerceptualLoss(tmp_path / "none.pt")
    with pytest.raises(ConfigurationError, match=r"`layers` must name layers of VGG19 .* but has \['conv9_9'\]"):
        PerceptualLoss(weights_file, {"conv9_9": 1.0})
    with pytest.raises(ConfigurationError, match=r"`layers` must name layers of VGG19 .* but has none"):
        PerceptualLoss(weights_file, {})
    torch.save({key: value for key, value in weights.items() if "34" not in key}, tmp_path / "cut.pt")
    with pytest.raises(ConfigurationError, match=r"`weights` must hold VGG19 weights .* features.34.weight is missing"):
        PerceptualLoss(tmp_path / "cut.pt")


@pytest.mark.parametrize("cut", [0, 100, 200_000])
def test_damaged_weights_are_named_with_their_file(weights, tmp_path, cut):
    whole = tmp_path / "whole.pt"
    torch.save({"features.0.weight": weights["features.28.weight"][:32]}, whole)
    (tmp_path / "cut.pt").write_bytes(whole.read_bytes()[:cut])
    with pytest.raises(
        ConfigurationError, match=r"`weights` must be a file that torch.load reads, but .*cut.pt is dam"
    ):
        PerceptualLoss(tmp_path / "cut.pt")


@pytest.mark.parametrize("stored", [[torch.zeros(1)], torch.zeros(1), 3])
def test_weights_that_are_no_state_dict_are_refused(tmp_path, stored):
    torch.save(stored, tmp_path / "other.pt")
    with pytest.raises(ConfigurationError, match=r"`weights` must hold a state_dict, but .*other.pt holds a"):
        PerceptualLoss(tmp_path / "other.pt")


def test_images_that_do_not_compare_are_refused(weights_file):
    loss = PerceptualLoss(weights_file, {"conv1_1": 1.0})
    image = torch.rand(2, 3, 16, 16)
    with pytest.raises(ConfigurationError, match=r"must have the shape of `target` \(1, 3, 16, 16\), but is \(2, 3"):
        loss(image, image[:1])  # torch would broadcast
    with pytest.raises(
        ConfigurationError, match=r"must be floating point in \[0, 1\], but are torch.float32 and torch.ui"
    ):
        loss(image, image.byte())
