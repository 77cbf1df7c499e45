"""Many tensors as few flat ones: what the initial broadcast, ``sync_buffers`` and the fingerprints send.

Tensors are seen as integers of the same width, so that every type travels bit for bit, NaN payloads included.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from srforge.distributed.errors import ConfigurationError
from srforge.distributed.parts import plain_name

PACK_BYTES = 64 * 2**20

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def named_tensors(model: nn.Module, *, buffers: bool = True) -> list[tuple[str, Tensor]]:
    """Return the parameters, then the buffers of a model under their plain names, tied ones once.

    Raises:
        ConfigurationError: A tensor is sparse, quantized, lazy or without storage: it cannot be compared or sent.
    """
    named: list[tuple[str, Tensor]] = list(model.named_parameters())
    if buffers:
        named += model.named_buffers()
    found = [(plain_name(model, name), tensor) for name, tensor in _refuse_shapeless(named)]
    for name, tensor in found:
        kind = "sparse" if tensor.layout != torch.strided else "quantized" if tensor.is_quantized else ""
        kind = kind or ("on the meta device" if tensor.is_meta else "")
        if kind:
            raise ConfigurationError(
                f"`{name}` must be a dense tensor with storage, but is {kind}. Make it dense before setup_device."
            )
    return found


def _refuse_shapeless(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in named:
        if nn.parameter.is_lazy(tensor):
            raise ConfigurationError(
                f"`{name}` must have a shape, but is uninitialised (lazy). Run one forward pass before setup_device."
            )
        yield name, tensor


def as_integers(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor, shape ``(n,)``, as integers of its element width (complex: of its parts').

    A view where the tensor is contiguous, else a copy.
    """
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    tensor = tensor.contiguous().reshape(-1)
    return tensor.view(_INTEGERS[tensor.element_size()])


def packs(tensors: Iterable[Tensor], limit: int = PACK_BYTES) -> Iterator[list[Tensor]]:
    """Yield the tensors in groups of one integer width, in order, each of at most ``limit`` bytes (or one tensor)."""
    groups: dict[int, list[Tensor]] = {}
    sizes: dict[int, int] = {}
    for tensor in tensors:
        width = tensor.element_size() // (2 if tensor.is_complex() else 1)
        size = tensor.numel() * tensor.element_size()
        if groups.get(width) and sizes[width] + size > limit:
            yield groups.pop(width)
            sizes[width] = 0
        groups.setdefault(width, []).append(tensor)
        sizes[width] = sizes.get(width, 0) + size
    yield from groups.values()


def flatten(pack: Sequence[Tensor]) -> Tensor:
    """Return one pack as one flat integer tensor that shares no memory with it."""
    return torch.cat([as_integers(tensor) for tensor in pack])


def unflatten(flat: Tensor, pack: Sequence[Tensor]) -> None:
    """Write the bits of ``flat`` back into the tensors of the pack, in place."""
    start = 0
    for tensor in pack:
        parts = 2 if tensor.is_complex() else 1
        piece = flat[start : start + tensor.numel() * parts]
        start += piece.numel()
        if tensor.is_complex():
            # A copy: a complex view must start at an even element.
            real = piece.clone().view(tensor.real.dtype).reshape(*tensor.shape, 2)
            tensor.detach().copy_(torch.view_as_complex(real))
        else:
            tensor.detach().copy_(piece.view(tensor.dtype).reshape(tensor.shape))
