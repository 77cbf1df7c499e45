"""Reading ``.npy``: one array of shape ``(H, W)`` or ``(H, W, C)``, and nothing else in the file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from srforge.data.image_formats import StoredImage, UnreadableContentError, check_dtype, check_size

if TYPE_CHECKING:
    from pathlib import Path

SIGNATURE = b"\x93NUMPY"


def read_npy(path: Path) -> StoredImage:
    """Read a ``.npy`` file. Pickled objects are never loaded.

    Args:
        path: The file.

    Returns:
        The array as stored, in native byte order; no channel of it is alpha.

    Raises:
        UnreadableContentError: The file is damaged, cut, too long or no image.
    """
    try:
        # Mapped, not read: the header is checked against the file before memory is taken.
        mapped = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError:
        raise
    except Exception as error:
        # A damaged header makes NumPy raise whatever evaluating it ran into: ValueError, SyntaxError, TokenError.
        raise UnreadableContentError(
            f"must be a whole .npy file, but NumPy says: {error}. Replace the file."
        ) from error
    if mapped.ndim not in (2, 3):
        raise UnreadableContentError(
            f"must hold an array (H, W) or (H, W, C), but its shape is {mapped.shape}. Reshape it."
        )
    check_dtype(mapped.dtype)
    pixels = mapped if mapped.ndim == 3 else mapped[:, :, None]
    check_size(*pixels.shape)
    surplus = path.stat().st_size - mapped.offset - mapped.nbytes
    if surplus:
        raise UnreadableContentError(
            f"must hold one array and nothing else, but has {surplus} bytes after it. Save the array anew."
        )
    return StoredImage(np.array(pixels, dtype=pixels.dtype.newbyteorder("="), order="C"))
