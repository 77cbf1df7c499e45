"""Perceptual loss: distances between features of VGG19, whose weights come from a file that the user has.

The layers are defined here; torchvision is no dependency, and nothing is downloaded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from srforge.distributed.errors import ConfigurationError
from srforge.sr.colour import require_float

_WIDTHS = ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4))
_IMAGENET_MEAN = (0.485, 0.456, 0.406)
_IMAGENET_STD = (0.229, 0.224, 0.225)
_ESRGAN_LAYERS = {"conv1_2": 0.1, "conv2_2": 0.1, "conv3_4": 1.0, "conv4_4": 1.0, "conv5_4": 1.0}


def vgg19_layers() -> dict[str, nn.Module]:
    """The 16 convolutions of VGG19 with their ReLUs and poolings, freshly initialised, by name and in order.

    Returns:
        ``conv1_1 relu1_1 conv1_2 relu1_2 pool1 conv2_1 ... conv5_4 relu5_4 pool5``. The position of a layer is the
        number that torchvision gives it in ``features``.

    Source: K. Simonyan, A. Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition", 2015.
    """
    layers: dict[str, nn.Module] = {}
    channels = 3
    for block, (width, num_convolutions) in enumerate(_WIDTHS, start=1):
        for index in range(1, num_convolutions + 1):
            layers[f"conv{block}_{index}"] = nn.Conv2d(channels, width, 3, padding=1)
            layers[f"relu{block}_{index}"] = nn.ReLU()
            channels = width
        layers[f"pool{block}"] = nn.MaxPool2d(2)
    return layers


class PerceptualLoss(nn.Module):
    """Weighted L1 distances between VGG19 features of two images, one value a sample.

    It holds no trainable parameter and does not belong to the model: give it to the objective. Its weights move to the
    device of the first images it sees.

    Args:
        weights: File with VGG19 weights as torchvision names them (``features.0.weight`` ...; a classifier in it is
            left out), saved by ``torch.save``.
        layers: Weight of each layer by name (see ``vgg19_layers``). None: those of Real-ESRGAN, before their ReLUs.
        bands: Channels that stand for red, green and blue where images have more than three. One channel is repeated.

    Raises:
        ConfigurationError: The file is missing or holds other weights, or a layer does not exist.

    Source: J. Johnson et al., "Perceptual Losses for Real-Time Style Transfer and Super-Resolution", 2016.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        weights: str | Path,
        layers: Mapping[str, float] | None = None,
        bands: tuple[int, int, int] | None = None,
    ) -> None:
        super().__init__()
        self.layer_weights = dict(_ESRGAN_LAYERS if layers is None else layers)
        available = vgg19_layers()
        unknown = [name for name in self.layer_weights if name not in available]
        if unknown or not self.layer_weights:
            raise ConfigurationError(
                f"`layers` must name layers of VGG19 (conv1_1 relu1_1 ... pool5), but has {unknown or 'none'}. "
                "Use for example {'conv5_4': 1.0}."
            )
        self.bands = bands
        names = list(available)
        last = max(names.index(name) for name in self.layer_weights)
        self.network = nn.ModuleDict(dict(list(_with_weights(available, Path(weights)).items())[: last + 1]))
        self.register_buffer("mean", torch.tensor(_IMAGENET_MEAN).view(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor(_IMAGENET_STD).view(1, 3, 1, 1))
        self.requires_grad_(False)
        self.eval()

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Compare two batches.

        Args:
            prediction: ``(N, C, H, W)`` in [0, 1] with C of 1, 3, or any with ``bands``; sides of at least 16 pixels.
            target: The same shape; it gets no gradient.

        Returns:
            ``(N,)``: sum over layers of weight times mean absolute difference.

        Raises:
            ConfigurationError: The channels cannot be shown as RGB, the shapes differ, or an image is not floating point.
        """
        if prediction.shape != target.shape:
            raise ConfigurationError(
                f"`prediction` must have the shape of `target` {tuple(target.shape)}, but is {tuple(prediction.shape)}. "
                "Compare the scale and out_channels of the model with the data."
            )
        require_float(prediction, target)
        if self.mean.device != prediction.device:
            self.to(prediction.device)
        predicted = self._features(prediction)
        with torch.no_grad():
            wanted = self._features(target)
        distances = [
            weight * (predicted[name] - wanted[name]).abs().mean(dim=(1, 2, 3))
            for name, weight in self.layer_weights.items()
        ]
        return torch.stack(distances).sum(dim=0)

    def _features(self, images: Tensor) -> dict[str, Tensor]:
        features = (self._as_rgb(images) - self.mean) / self.std
        kept = {}
        for name, layer in self.network.items():
            # The ReLUs are not in place: they would overwrite the convolution's features that were just kept.
            features = cast("Tensor", layer(features))
            if name in self.layer_weights:
                kept[name] = features
        return kept

    def _as_rgb(self, images: Tensor) -> Tensor:
        num_channels = images.shape[1]
        if self.bands is not None and max(self.bands) < num_channels:
            return torch.cat([images[:, band : band + 1] for band in self.bands], dim=1)
        if num_channels == 1:
            return images.expand(-1, 3, -1, -1)
        if num_channels != 3 or self.bands is not None:
            raise ConfigurationError(
                f"`bands` must name three of the {num_channels} channels, but is {self.bands}. "
                "VGG19 sees red, green and blue only."
            )
        return images


def _read_weights(path: Path) -> Mapping[object, Any]:
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # A cut download makes torch raise whatever unpickling ran into: UnpicklingError, EOFError, RuntimeError.
        raise ConfigurationError(
            f"`weights` must be a file that torch.load reads, but {path} is damaged or something else: "
            f"{type(error).__name__}. Save the state_dict there anew."
        ) from error
    if not isinstance(stored, Mapping):
        raise ConfigurationError(
            f"`weights` must hold a state_dict, but {path} holds a {type(stored).__name__}. Save the state_dict of vgg19."
        )
    return stored


def _with_weights(layers: dict[str, nn.Module], path: Path) -> dict[str, nn.Module]:
    """Load the file into the layers, in place."""
    if not path.is_file():
        raise ConfigurationError(
            f"`weights` must be a file of VGG19 weights, but {path} does not exist. Nothing is downloaded: save "
            "torchvision's vgg19(weights='IMAGENET1K_V1').state_dict() there with torch.save."
        )
    stored = _read_weights(path)
    wanted = nn.Sequential(*layers.values())
    found = {re.sub(r"^features\.", "", str(key)): value for key, value in stored.items()}
    state = {key: value for key, value in found.items() if key in wanted.state_dict()}
    misfits = [key for key, value in wanted.state_dict().items() if key not in state or state[key].shape != value.shape]
    if misfits:
        raise ConfigurationError(
            f"`weights` must hold VGG19 weights named features.0.weight and so on, but in {path} features.{misfits[0]} "
            "is missing or of another shape. Save the state_dict of vgg19 (not vgg19_bn)."
        )
    wanted.load_state_dict(state)
    return layers
