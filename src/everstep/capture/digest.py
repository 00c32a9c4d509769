"""One number for the whole state, made where the state lies.

The digest of a tensor is the sum over its words of bits * weight(index), times an odd number made of its name, modulo
2**64. Sums add up: the digests of rows, slabs and ranks give that of the whole, in any order, on any device. Weights
are odd, so that a change in one word always shows; they differ, so that changes in two words do not cancel.

Nothing here waits for a device: whoever wants the number converts it. Modulo 2**64 is what int64 does by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from everstep.capture.layout import Share

MODULUS = 1 << 64
_BLOCK = 1 << 14  # words that share a table of weights; each block scales it by a number of its own
_ROWS = {"cpu": 16, "cuda": 512}  # blocks at once: they fit a cache, or make a launch worth while
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


@torch.no_grad()
def digest(name: str, rows: Tensor, first_element: int = 0) -> Tensor:
    """The digest of some rows of a tensor, the first of whose elements has this index in the whole one; 0-dim int64."""
    return added(_sums([_Part(name, rows, first_element)]))


@torch.no_grad()
def state_digest(shares: Iterable[Share]) -> tuple[Tensor, Tensor]:
    """Of what optimizers overwrite, this rank's part of the common tensors, and its own; two 0-dim int64.

    The number that proves a step to a rank is the sum of all ranks' common parts and of its own private one.
    """
    parts: tuple[list[_Part], list[_Part]] = ([], [])
    for share in shares:
        tensor = share.entry.tensor
        if share.entry.gate is not None:
            row_elements = tensor.numel() // max(1, tensor.shape[0]) if tensor.dim() else 1
            part = _Part(share.entry.name, share.source(), share.first * row_elements)
            parts[not share.entry.common].append(part)
    return added(_sums(parts[0])), added(_sums(parts[1]))


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


class _Part(NamedTuple):
    """Some rows of a tensor, the first of whose elements has this index in the whole one."""

    name: str
    rows: Tensor
    first_element: int

    def slabs(self) -> Iterator[tuple[Tensor, int]]:
        """The bits as integers in their logical order, with the index of the first; bounded copies, if they must be."""
        rows = self.rows.detach()
        per_element = max(1, rows.itemsize // 4)
        if rows.is_contiguous():
            yield rows.view(-1).view(_WORDS[rows.itemsize]), self.first_element * per_element
        elif rows.numel():
            row_elements = rows.numel() // rows.shape[0]
            at_once = max(1, _ROWS[rows.device.type] * _BLOCK // row_elements)
            for first in range(0, rows.shape[0], at_once):
                words = rows[first : first + at_once].reshape(-1).view(_WORDS[rows.itemsize])
                yield words, (self.first_element + first * row_elements) * per_element


class _Pile:
    """Blocks of words of many tensors, multiplied and added up together: a few launches for all of them."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._blocks = torch.zeros((_ROWS[device.type], _BLOCK), dtype=dtype, device=device)
        self._targets: list[Tensor] = []
        self._sources: list[Tensor] = []
        self._factors = torch.empty((2, len(self._blocks)), dtype=torch.int64)  # of each row its block, and its name
        self._rows = 0
        self.total = torch.zeros((), dtype=torch.int64, device=device)

    def add(self, words: Tensor, first: int, factor: int) -> None:
        """Each word lies in its row where its index says, so that the table of weights fits every row."""
        at = 0
        while at < words.numel():
            if self._rows == len(self._blocks):
                self.flush()
            row, (block, column) = self._rows, divmod(first + at, _BLOCK)
            left = words.numel() - at
            if column or left < _BLOCK:
                count, rows = min(left, _BLOCK - column), 1
                self._targets.append(self._blocks[row, column : column + count])
                self._sources.append(words[at : at + count])
            else:
                rows = min(left // _BLOCK, len(self._blocks) - row)
                count = rows * _BLOCK
                self._targets.append(self._blocks[row : row + rows])
                self._sources.append(words[at : at + count].view(rows, _BLOCK))
            self._rows += rows
            torch.arange(block, block + rows, out=self._factors[0, row : self._rows])
            self._factors[1, row : self._rows] = factor
            at += count

    def flush(self) -> None:
        if self._rows:
            torch._foreach_copy_(self._targets, self._sources)
            blocks, (numbers, names) = self._blocks[: self._rows], self._factors[:, : self._rows]
            sums = (blocks * _table(blocks.device)).sum(1)
            factors = _mixed(numbers) * names  # a few kilobytes, which go to a device without a wait
            self.total += (sums * factors.to(blocks.device, non_blocking=True)).sum()
            blocks.zero_()
            self._targets, self._sources, self._rows = [], [], 0


def _sums(parts: Iterable[_Part]) -> list[Tensor]:
    """The digests of all parts, added up where they lie."""
    piles: dict[tuple[torch.device, torch.dtype], _Pile] = {}
    for part in parts:
        factor = _signed(xxh3_64_intdigest(part.name.encode()) | 1)
        for words, first in part.slabs():
            kind = words.device, words.dtype
            if kind not in piles:
                piles[kind] = _Pile(*kind)
            piles[kind].add(words, first, factor)
    for pile in piles.values():
        pile.flush()
    return [pile.total for pile in piles.values()]


@cache
def _table(device: torch.device) -> Tensor:
    """The weights of a block; a constant."""
    return _mixed(torch.arange(-_BLOCK, 0, device=device))


_FACTORS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def _mixed(index: Tensor) -> Tensor:
    """splitmix64, made odd."""
    x = (index + 1) * _signed(_FACTORS[0])
    x = (x ^ _shifted(x, 30)) * _signed(_FACTORS[1])
    x = (x ^ _shifted(x, 27)) * _signed(_FACTORS[2])
    return (x ^ _shifted(x, 31)) | 1


def _shifted(x: Tensor, by: int) -> Tensor:
    """To the right, filled with zeros as unsigned integers are."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _signed(number: int) -> int:
    return number - MODULUS if number >= MODULUS // 2 else number
