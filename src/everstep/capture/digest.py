"""One number for the whole state, made where the state lies.

The digest of a tensor is the sum over its words of bits * weight(index), times an odd number made of its name, modulo
2**64. Sums add up: the digests of rows, slabs and ranks give that of the whole, in any order, on any device. Weights
are odd, so that a change in one word always shows; they differ, so that changes in two words do not cancel.

Nothing here waits for a device: whoever wants the number converts it. Modulo 2**64 is what int64 does by itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from everstep.capture.layout import Share

MODULUS = 1 << 64
_BLOCK = 1 << 14  # words that share a table of weights; each block scales it by a number of its own
_CHUNK = {"cpu": 1 << 18, "cuda": 1 << 22}  # words at once; their int64 fit a cache, or make a launch worth while
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


@torch.no_grad()
def digest(name: str, rows: Tensor, first_element: int = 0) -> Tensor:
    """The digest of some rows of a tensor, the first of whose elements has this index in the whole one; 0-dim int64."""
    rows = rows.detach()
    if rows.is_contiguous():
        rows = rows.view(-1)
    total = torch.zeros((), dtype=torch.int64, device=rows.device)
    if rows.numel():
        row_elements = rows.numel() // rows.shape[0]
        at_once = max(1, _CHUNK[rows.device.type] // row_elements)
        for first in range(0, rows.shape[0], at_once):
            words = _words(rows[first : first + at_once])
            total += _sum(words, (first_element + first * row_elements) * max(1, rows.itemsize // 4))
    return total * _signed(xxh3_64_intdigest(name.encode()) | 1)


@torch.no_grad()
def state_digest(shares: Iterable[Share]) -> tuple[Tensor, Tensor]:
    """Of what optimizers overwrite, this rank's part of the common tensors, and its own; two 0-dim int64.

    The number that proves a step to a rank is the sum of all ranks' common parts and of its own private one.
    """
    sums: tuple[list[Tensor], list[Tensor]] = ([], [])
    for share in shares:
        tensor = share.entry.tensor
        if share.entry.gate is not None:
            row_elements = tensor.numel() // max(1, tensor.shape[0]) if tensor.dim() else 1
            sums[not share.entry.common].append(digest(share.entry.name, share.source(), share.first * row_elements))
    return added(sums[0]), added(sums[1])


def number(*sums: Tensor) -> int:
    """Digests added up as a number; waits for the device."""
    return sum(int(one) for one in sums) % MODULUS


def added(sums: Iterable[Tensor]) -> Tensor:
    """The sum of digests, which may lie on several devices."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for one in sums:
        by_device.setdefault(one.device, []).append(one)
    total = torch.zeros((), dtype=torch.int64)
    for some in by_device.values():
        total = torch.stack(some).sum() + total  # a 0-dim host tensor goes to a device without a wait
    return total


def _words(tensor: Tensor) -> Tensor:
    """The bits of a tensor as integers, in its logical order."""
    flat = tensor.reshape(-1)
    return flat.view(_WORDS[flat.itemsize])


def _sum(words: Tensor, first: int) -> Tensor:
    """The weighted sum of consecutive words, of which the first has this index."""
    table = _table(words.device)
    count, block, at = words.numel(), first // _BLOCK, -first % _BLOCK
    head = words[: min(at, count)]
    total = (head * table[first % _BLOCK :][: head.numel()]).sum() * _signed(_mix(block)) if at else 0
    block += at > 0
    full = max(0, count - at) // _BLOCK
    if full:
        sums = (words[at : at + full * _BLOCK].view(full, _BLOCK) * table).sum(1)
        total = total + (sums * _mixed(torch.arange(block, block + full, device=words.device))).sum()
    tail = words[at + full * _BLOCK :] if at < count else words[:0]
    if tail.numel():
        total = total + (tail * table[: tail.numel()]).sum() * _signed(_mix(block + full))
    return torch.as_tensor(total, dtype=torch.int64, device=words.device)


@cache
def _table(device: torch.device) -> Tensor:
    """The weights of a block; a constant."""
    return _mixed(torch.arange(-_BLOCK, 0, device=device))


_FACTORS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def _mix(index: int) -> int:
    """splitmix64, made odd."""
    x = (index + 1) * _FACTORS[0] % MODULUS
    x = (x ^ (x >> 30)) * _FACTORS[1] % MODULUS
    x = (x ^ (x >> 27)) * _FACTORS[2] % MODULUS
    return x ^ (x >> 31) | 1


def _mixed(index: Tensor) -> Tensor:
    """The same for many."""
    x = (index + 1) * _signed(_FACTORS[0])
    x = (x ^ _shifted(x, 30)) * _signed(_FACTORS[1])
    x = (x ^ _shifted(x, 27)) * _signed(_FACTORS[2])
    return (x ^ _shifted(x, 31)) | 1


def _shifted(x: Tensor, by: int) -> Tensor:
    """To the right, filled with zeros as unsigned integers are."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _signed(number: int) -> int:
    return number - MODULUS if number >= MODULUS // 2 else number
