"""Real photographs without a download: those that ship inside the scikit-image wheel, read by path.

Training takes random crops of some photographs; validation takes fixed boxes of others.
"""

from __future__ import annotations

import functools
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from torch.utils.data import Dataset

from srforge.distributed.errors import ConfigurationError
from srforge.sr.datasets.crops import as_tensor, augmented, degrade, random_window

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

_TRAINING = (
    "astronaut.png",
    "hubble_deep_field.jpg",
    "ihc.png",
    "motorcycle_left.png",
    "motorcycle_right.png",  # the stereo twin of motorcycle_left: in training or nowhere
    "retina.jpg",
    "rocket.jpg",
)
_BOX = 168  # a multiple of 2, 3, 4, 6, 7, 8
_VALIDATION = (  # photograph, top, left
    ("chelsea.png", 40, 60),
    ("chelsea.png", 60, 240),
    ("coffee.png", 20, 20),
    ("coffee.png", 20, 210),
    ("coffee.png", 210, 130),
    ("coffee.png", 200, 400),
)


class DemoPhotographs(Dataset["dict[str, Tensor]"]):
    """The data set of ``demo_photographs``; it pickles as paths, and decodes each photograph once per process.

    Args:
        folder: Where the photographs lie.
        boxes: (file name, top, left) of validation boxes, or empty for random crops of the training photographs.
        scale: SR factor.
        patch: Side of a training crop in LR pixels.
    """

    def __init__(self, folder: Path, boxes: tuple[tuple[str, int, int], ...], scale: int, patch: int) -> None:
        self.folder, self.boxes, self.scale, self.patch = folder, boxes, scale, patch

    def __len__(self) -> int:
        """Number of photographs (training) or boxes (validation)."""
        return len(self.boxes or _TRAINING)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return ``{"lr": (3, h, w), "hr": (3, H, W)}``, uint8."""
        if not 0 <= index < len(self):
            raise IndexError(index)  # ends a plain for-loop over the data set
        if self.boxes:
            name, top, left = self.boxes[index]
            side = _BOX - _BOX % self.scale
            hr = _decoded(self.folder / name)[top : top + side, left : left + side]
            return {"lr": as_tensor(degrade(hr, self.scale)), "hr": as_tensor(hr)}
        name, scale, patch = _TRAINING[index], self.scale, self.patch
        hr, lr = _decoded_pair(self.folder / name, scale)
        top, left = random_window(lr.shape[0], lr.shape[1], patch, name)
        lr, hr = augmented(
            lr[top : top + patch, left : left + patch],
            hr[top * scale : (top + patch) * scale, left * scale : (left + patch) * scale],
        )
        return {"lr": as_tensor(lr), "hr": as_tensor(hr)}


def demo_photographs(split: str, *, scale: int, patch: int = 24) -> DemoPhotographs:
    """Photographs for trying things out: seven for training, six boxes of 168 pixels from two others for validation.

    Args:
        split: ``"train"`` (random crops, flips and quarter turns, one sample a photograph: let the loader repeat them)
            or ``"validation"`` (fixed boxes).
        scale: SR factor, 1 to 8.
        patch: Side of a training crop in LR pixels; has no meaning in validation.

    Returns:
        Data set of samples ``{"lr": (3, h, w), "hr": (3, H, W)}``, uint8.

    Raises:
        ConfigurationError: ``split`` or ``scale`` is another value, or the photographs are not installed.
    """
    if split not in ("train", "validation"):
        raise ConfigurationError(f"`split` must be 'train' or 'validation', but is {split!r}. Choose one of them.")
    if scale not in range(1, 9):
        raise ConfigurationError(f"`scale` must be a whole number from 1 to 8, but is {scale}. Use 2, 3 or 4.")
    spec = find_spec("skimage")
    folder = Path(spec.origin).parent / "data" if spec is not None and spec.origin is not None else None
    boxes = _VALIDATION if split == "validation" else ()
    names = {name for name, _, _ in boxes} or set(_TRAINING)
    missing = sorted(names) if folder is None else sorted(name for name in names if not (folder / name).is_file())
    if folder is None or missing:
        raise ConfigurationError(
            f"`split` must find the photographs of scikit-image, but {missing[0]} is not installed. "
            "Install them with: pip install 'srforge-sr[demo]'"
        )
    return DemoPhotographs(folder, boxes, scale, patch)


@functools.cache
def _decoded(path: Path) -> np.ndarray:
    """A photograph, ``(H, W, 3)`` uint8, read once per process: decoding it for each crop would be most of the time."""
    from srforge.data.images import read_image

    image: np.ndarray = read_image(path, alpha="drop", channels=3)
    return image


@functools.cache
def _decoded_pair(path: Path, scale: int) -> tuple[np.ndarray, np.ndarray]:
    hr = _decoded(path)
    hr = hr[: hr.shape[0] - hr.shape[0] % scale, : hr.shape[1] - hr.shape[1] % scale]
    return hr, degrade(hr, scale)
