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
_MANY = {"cpu": 16, "cuda": 64}  # blocks of one tensor that are worth launches of their own, and are not copied first
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
    """Blocks of words, multiplied and added up: those of many small tensors together, by a few launches for all."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._blocks = torch.zeros((_ROWS[device.type], _BLOCK), dtype=dtype, device=device)
        self._targets: list[Tensor] = []
        self._sources: list[Tensor] = []
        self._numbers: list[int] = []  # of each row that of its block,
        self._names: list[int] = []  # and the factor of its name
        self.total = torch.zeros((), dtype=torch.int64, device=device)

    def add(self, words: Tensor, first: int, factor: int) -> None:
        """Each word lies in its row where its index says, so that the table of weights fits every row."""
        at, many = 0, _MANY[words.device.type]
        while at < words.numel():
            if len(self._numbers) == len(self._blocks):
                self.flush()
            row, (block, column) = len(self._numbers), divmod(first + at, _BLOCK)
            left = words.numel() - at
            if not column and left >= many * _BLOCK:
                rows = min(left // _BLOCK, len(self._blocks))
                self._add_whole(words[at : at + rows * _BLOCK].view(rows, _BLOCK), block, factor)
                at += rows * _BLOCK
                continue
            if column or left < _BLOCK:
                count, rows = min(left, _BLOCK - column), 1
                self._targets.append(self._blocks[row, column : column + count])
                self._sources.append(words[at : at + count])
            else:
                rows = min(left // _BLOCK, len(self._blocks) - row)
                count = rows * _BLOCK
                self._targets.append(self._blocks[row : row + rows])
                self._sources.append(words[at : at + count].view(rows, _BLOCK))
            self._numbers += range(block, block + rows)
            self._names += [factor] * rows
            at += count

    def _add_whole(self, blocks: Tensor, first: int, factor: int) -> None:
        """Blocks of one tensor, where they lie."""
        sums = (blocks * _table(blocks.device)).sum(1)
        last = first + len(blocks)
        self.total += (sums * _numbers_mixed(blocks.device, last.bit_length())[first:last]).sum() * factor

    def flush(self) -> None:
        if self._numbers:
            torch._foreach_copy_(self._targets, self._sources)
            blocks = self._blocks[: len(self._numbers)]
            sums = (blocks * _table(blocks.device)).sum(1)
            factors = _mixed(torch.tensor(self._numbers)) * torch.tensor(self._names)
            self.total += (sums * factors.to(blocks.device, non_blocking=True)).sum()  # kilobytes go without a wait
            blocks.zero_()
            self._targets, self._sources, self._numbers, self._names = [], [], [], []


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


@cache
def _numbers_mixed(device: torch.device, bits: int) -> Tensor:
    """What the first 2**bits blocks of a tensor scale their table by; a constant."""
    return _mixed(torch.arange(1 << bits, device=device))


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
