"""Large images in tiles: what a model does to a whole image, at the memory of a part of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from srforge.distributed.errors import ConfigurationError


def forward_in_tiles(network: Callable[[Tensor], Tensor], lr: Tensor, *, tile: int, overlap: int = 16) -> Tensor:
    """Apply a network tile by tile; each output pixel comes from one tile that sees ``overlap`` pixels around it.

    Equal to one pass over the whole image where the network's receptive field reaches no farther than ``overlap``.

    Args:
        network: Takes ``(N, C, h, w)`` and returns ``(N, C', h * scale, w * scale)``, for one whole ``scale``.
        lr: ``(N, C, H, W)``, floating point.
        tile: Side of a tile without its surroundings, in LR pixels, >= 1.
        overlap: Width of the surroundings that are computed and dropped, in LR pixels, >= 0.

    Returns:
        ``(N, C', H * scale, W * scale)``.

    Raises:
        ConfigurationError: An argument is out of its range, or the output is no whole multiple of the input.
    """
    if tile < 1 or overlap < 0:
        raise ConfigurationError(
            f"`tile` must be at least 1 and `overlap` at least 0, but are {tile} and {overlap}. Correct them."
        )
    height, width = lr.shape[-2:]
    if height <= tile and width <= tile:
        return network(lr)
    result: Tensor | None = None
    for top, bottom in _spans(height, tile):
        for left, right in _spans(width, tile):
            above, beside = min(overlap, top), min(overlap, left)
            seen = lr[..., top - above : bottom + overlap, left - beside : right + overlap]
            output = network(seen)
            scale = output.shape[-1] // seen.shape[-1]
            if scale < 1 or output.shape[-2:] != torch.Size([seen.shape[-2] * scale, seen.shape[-1] * scale]):
                raise ConfigurationError(
                    f"`network` must enlarge by a whole factor, but made {tuple(output.shape)} of {tuple(seen.shape)}. "
                    "Use another network."
                )
            if result is None:
                result = output.new_empty(*output.shape[:-2], height * scale, width * scale)
            result[..., top * scale : bottom * scale, left * scale : right * scale] = output[
                ..., above * scale : (above + bottom - top) * scale, beside * scale : (beside + right - left) * scale
            ]
    assert result is not None
    return result


def _spans(length: int, tile: int) -> Iterator[tuple[int, int]]:
    for start in range(0, length, tile):
        yield start, min(start + tile, length)
