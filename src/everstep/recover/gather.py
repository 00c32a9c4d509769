"""Rows that one rank has, on all ranks: in few messages, whatever the tensors are.

Any backend, any device: messages lie where the backend takes them. Every rank must name the same tensors in the same
order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

PACK_BYTES = 32 << 20


@torch.no_grad()
def broadcast(tensors: Iterable[Tensor], *, source: int, rank: int) -> None:
    """Give every rank what `source` has in these tensors."""
    for pack in _packs(chunk for tensor in tensors for chunk in _chunks(tensor)):
        _send(pack, source, rank)


def _chunks(tensor: Tensor) -> Iterator[Tensor]:
    """Some rows at a time."""
    rows = tensor.shape[0]
    at_once = max(1, PACK_BYTES * rows // max(1, tensor.nbytes))
    return (tensor[first : first + at_once] for first in range(0, rows, at_once))


def _packs(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    pack: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if pack and size + tensor.nbytes > PACK_BYTES:
            yield pack
            pack, size = [], 0
        pack.append(tensor)
        size += tensor.nbytes
    if pack:
        yield pack


def _send(tensors: Sequence[Tensor], source: int, rank: int) -> None:
    """One message for many tensors."""
    ends = [0]
    for tensor in tensors:
        ends.append(ends[-1] + -(-tensor.nbytes // 16) * 16)  # so that any dtype begins where it may
    on_device = "nccl" in str(dist.get_backend())
    flat = torch.empty(ends[-1], dtype=torch.uint8, device=torch.cuda.current_device() if on_device else "cpu")
    views = [flat[at : at + t.nbytes].view(t.dtype).view(t.shape) for t, at in zip(tensors, ends, strict=False)]
    if rank == source:
        torch._foreach_copy_(views, list(tensors))
    dist.broadcast(flat, src=source)
    if rank != source:
        torch._foreach_copy_(list(tensors), views)
