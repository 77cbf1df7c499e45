"""Folders of images as pairs: HR images, and LR images from a second folder or made by bicubic reduction."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from torch.utils.data import Dataset

from srforge.distributed.errors import ConfigurationError
from srforge.sr.datasets.crops import as_tensor, augmented, degrade, degraded_window, random_window

if TYPE_CHECKING:
    from torch import Tensor

_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".tif", ".tiff", ".npy"})
_FOREIGN_SUFFIXES = frozenset(
    {".bmp", ".webp", ".gif", ".jfif", ".jpe", ".jp2", ".ppm", ".pgm", ".heic", ".avif", ".exr"}
)


class PairedImages(Dataset["dict[str, Tensor]"]):
    """Pairs of images that lie in folders; it holds paths only and reads in ``__getitem__``.

    HR images are cut at the bottom and right to multiples of ``scale``, in training as in validation; an LR image must
    then be exactly ``1 / scale`` of its HR image. An LR file belongs to the HR file of the same stem, or of the stem
    followed by ``x<scale>`` (``0801.png`` and ``0801x2.png``); the suffixes may differ.

    Args:
        hr_folder: HR images: png, jpg, jpeg, tif, tiff, npy; other files and hidden files are left out, images of
            other formats with a warning. Values are uint8, uint16, or floating point in [0, 1].
        lr_folder: LR images. None: each HR image is reduced bicubically, antialiased, and rounded to its dtype.
        scale: SR factor, >= 1.
        patch: Side of the random crop in LR pixels. None: whole images.
        augment: Whether each sample is flipped and turned by quarters at random.
        channels: Channels that every image must have or is brought to by ``srforge.data.read_image``. None: as stored.
        alpha: ``"drop"``, ``"keep"`` or ``"error"``, as in ``srforge.data.read_image``.
        on_error: ``"raise"``: an unreadable file stops the run when it is met. ``"skip"``: all files are read once
            now, and pairs with an unreadable file are left out, with one warning that counts them; the same pairs on
            every rank. The paths of their HR files are in ``skipped``.

    Raises:
        ConfigurationError: A folder is missing or holds no image, pairs are incomplete, or an argument is out of range.
    """

    def __init__(
        self,
        hr_folder: str | Path,
        lr_folder: str | Path | None = None,
        *,
        scale: int,
        patch: int | None = None,
        augment: bool = False,
        channels: int | None = 3,
        alpha: Literal["drop", "keep", "error"] = "drop",
        on_error: str = "raise",
    ) -> None:
        if int(scale) != scale or scale < 1:
            raise ConfigurationError(f"`scale` must be a whole number of at least 1, but is {scale}. Use 2, 3 or 4.")
        if patch is not None and patch < 1:
            raise ConfigurationError(f"`patch` must be at least 1 LR pixel, but is {patch}. Use None for whole images.")
        if on_error not in ("raise", "skip"):
            raise ConfigurationError(f"`on_error` must be 'raise' or 'skip', but is {on_error!r}. Choose one of them.")
        self.scale, self.patch, self.augment = int(scale), patch, augment
        self.channels, self.alpha = channels, alpha
        hr_paths = _image_paths("hr_folder", Path(hr_folder))
        lr_paths = None if lr_folder is None else _image_paths("lr_folder", Path(lr_folder))
        self.pairs = _paired(hr_paths, lr_paths, self.scale)
        self.skipped: list[Path] = []
        if on_error == "skip":
            self._leave_out_unreadable()

    def __len__(self) -> int:
        """Number of pairs."""
        return len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Read one pair.

        Args:
            index: Position in the order of the HR files' names.

        Returns:
            ``{"lr": (C, h, w), "hr": (C, h * scale, w * scale)}`` in the dtype of the files; a crop has
            ``h = w = patch``.

        Raises:
            ImageReadError: A file cannot be read.
            ConfigurationError: The sizes of a pair do not fit, the image is smaller than the crop, or its values have
                no stated range.
        """
        hr_path, lr_path = self.pairs[index]
        hr = self._read(hr_path)
        lr = None if lr_path is None else self._read(lr_path)
        hr = _fitted(hr, lr, self.scale, hr_path, lr_path)
        if self.patch is None:
            lr = degrade(hr, self.scale) if lr is None else lr
        else:
            lr, hr = self._cropped(lr, hr, hr_path.name)
        if self.augment:
            lr, hr = augmented(lr, hr)
        return {"lr": as_tensor(lr), "hr": as_tensor(hr)}

    def _cropped(self, lr: np.ndarray | None, hr: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
        scale, patch = self.scale, self.patch
        assert patch is not None
        top, left = random_window(hr.shape[0] // scale, hr.shape[1] // scale, patch, name)
        window = slice(top, top + patch), slice(left, left + patch)
        lr = degraded_window(hr, scale, top, left, patch) if lr is None else lr[window]
        return lr, hr[top * scale : (top + patch) * scale, left * scale : (left + patch) * scale]

    def _read(self, path: Path) -> np.ndarray:
        # Imported here so that models and metrics load without an image library.
        from srforge.data.images import read_image

        image: np.ndarray = read_image(path, alpha=self.alpha, channels=self.channels)
        _require_stated_range(image, path)
        return image

    def _leave_out_unreadable(self) -> None:
        from srforge.data.images import ImageReadError

        readable, reasons = [], []
        for pair in self.pairs:
            try:
                for path in pair:
                    if path is not None:
                        self._read(path)
            except ImageReadError as error:  # noqa: PERF203 - each file may fail on its own
                self.skipped.append(pair[0])
                reasons.append(str(error))
            else:
                readable.append(pair)
        if not readable:
            raise ConfigurationError(
                f"`hr_folder` must hold a readable image, but none of {len(self.pairs)} pairs is, first: {reasons[0]} "
                "Correct the folder or `channels`."
            )
        if reasons:
            warnings.warn(
                f"{len(reasons)} of {len(self.pairs)} pairs are left out, a file is unreadable, first: {reasons[0]}",
                stacklevel=3,
            )
        self.pairs = readable


def _image_paths(key: str, folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise ConfigurationError(f"`{key}` must be a folder of images, but {folder} is none. Correct the path.")
    paths = [path for path in folder.iterdir() if path.suffix.lower() in _SUFFIXES and not path.name.startswith(".")]
    if not paths:
        raise ConfigurationError(
            f"`{key}` must be a folder of images ({' '.join(sorted(_SUFFIXES))}), but {folder} holds none. "
            "Correct the path, or unpack the images there."
        )
    foreign = sorted(path for path in folder.iterdir() if path.suffix.lower() in _FOREIGN_SUFFIXES)
    if foreign:
        warnings.warn(
            f"`{key}` must hold images in {' '.join(sorted(_SUFFIXES))}, but {len(foreign)} beside the {len(paths)} in "
            f"{folder} are left out, first {foreign[0].name}. Convert them.",
            stacklevel=4,
        )
    return sorted(paths)


def _require_stated_range(image: np.ndarray, path: Path) -> None:
    """Refuse types whose range nobody stated, and floating point that is far from [0, 1] (NaN may mark what is missing)."""
    if image.dtype in ("uint8", "uint16"):
        return
    if image.dtype.kind != "f":
        raise ConfigurationError(
            f"{path} must be uint8, uint16, or floating point in [0, 1], but is {image.dtype}. Convert the data set once."
        )
    if (image > 2).any() or (image < -1).any():  # a resized image overshoots [0, 1] a little
        raise ConfigurationError(
            f"{path} must have floating point values in [0, 1], but reaches from {np.nanmin(image):g} to "
            f"{np.nanmax(image):g}. Divide the data set by its peak once."
        )


def _paired(hr_paths: list[Path], lr_paths: list[Path] | None, scale: int) -> list[tuple[Path, Path | None]]:
    if lr_paths is None:
        return [(path, None) for path in hr_paths]
    by_stem = {path.stem: path for path in lr_paths}
    partners = [by_stem.get(path.stem, by_stem.get(f"{path.stem}x{scale}")) for path in hr_paths]
    alone = [path for path, partner in zip(hr_paths, partners, strict=True) if partner is None]
    if alone:
        raise ConfigurationError(
            f"`lr_folder` must hold a file for each of the {len(hr_paths)} HR images, but lacks {len(alone)}, "
            f"first {alone[0].stem} or {alone[0].stem}x{scale} in {lr_paths[0].parent}. Add it or remove {alone[0]}."
        )
    spare = sorted(set(lr_paths) - set(partners))
    if spare or len(set(partners)) < len(partners):
        raise ConfigurationError(
            f"`lr_folder` must hold one file for each of the {len(hr_paths)} HR images, but holds {len(lr_paths)}, "
            f"of which {(spare or sorted(lr_paths))[0]} does not pair with exactly one. Remove the others."
        )
    return list(zip(hr_paths, partners, strict=True))


def _fitted(hr: np.ndarray, lr: np.ndarray | None, scale: int, hr_path: Path, lr_path: Path | None) -> np.ndarray:
    """The HR image cut to multiples of ``scale``; an LR image must be exactly 1 / ``scale`` of it."""
    height, width = hr.shape[0] // scale, hr.shape[1] // scale
    if min(height, width) < 1:
        raise ConfigurationError(
            f"`hr_folder` must hold images of at least scale={scale} pixels a side, but {hr_path} is "
            f"{hr.shape[0]}x{hr.shape[1]}. Remove it."
        )
    if lr is not None and lr.shape[:2] != (height, width):
        raise ConfigurationError(
            f"`lr_folder` must hold images of 1/{scale} of the HR size, but {lr_path} is {lr.shape[0]}x{lr.shape[1]} "
            f"and {hr_path} is {hr.shape[0]}x{hr.shape[1]}, which needs {height}x{width}. "
            "Correct `scale` or make the LR image again."
        )
    return hr[: height * scale, : width * scale]
