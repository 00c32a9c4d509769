"""Tensors by their bits: NaN is NaN, and 0.0 is not -0.0."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one dtype have the same bits in the same order; their shapes are not compared."""
    words = _WORDS.get(one.itemsize, torch.uint8)
    return torch.equal(*(tensor.detach().reshape(-1).view(words) for tensor in (one, other)))


def cut_up(flat: Tensor, parameters: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """A buffer of gradients as flat pieces, one a parameter; views."""
    pieces: tuple[Tensor, ...] = flat.split([parameter.numel() for parameter in parameters])
    return pieces
