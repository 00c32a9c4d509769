"""One number for the whole state, made where the state lies.

The digest of a tensor is the sum over its words of bits * weight(index), times an odd number made of its name, modulo
2**64. Sums add up: the digests of rows, slabs and ranks give that of the whole, in any order, on any device. Weights
are odd, so that a change in one word always shows; they differ, so that changes in two words do not cancel.

What is multiplied with what depends on where tensors lie, and is looked up once for a state: a digest is then a few
calls for hundreds of tensors. None of them waits for a device: whoever wants the number converts it. Modulo 2**64 is
what int64 does by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from everstep.capture.shares import Share

MODULUS = 1 << 64
_BLOCK = 1 << 14  # words that share a table of weights; each block scales it by a number of its own
_WIDTHS = (1, 1 << 5, 1 << 10, _BLOCK)  # of rows: what is smaller than a block does not take the time of one
_ROWS = {"cpu": 16, "cuda": 512}  # blocks at once: they fit a cache, or make a launch worth while
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def digest(name: str, rows: Tensor, first_element: int = 0) -> Tensor:
    """The digest of some rows of a tensor, the first of whose elements has this index in the whole one; 0-dim int64."""
    return _Plan([_Part(name, rows, first_element)]).total()


class StateDigest:
    """Of what optimizers overwrite, for as long as it lies in the same tensors."""

    def __init__(self, shares: Sequence[Share]) -> None:
        self.shares = shares
        parts: tuple[list[_Part], list[_Part]] = ([], [])
        for share in shares:
            tensor = share.entry.tensor
            if share.entry.gate is not None:
                row_elements = tensor.numel() // max(1, tensor.shape[0]) if tensor.dim() else 1
                part = _Part(share.entry.name, share.source(), share.first * row_elements)
                parts[not share.entry.common].append(part)
        self._common, self._private = map(_Plan, parts)

    def take(self) -> tuple[Tensor, Tensor]:
        """This rank's part of the common tensors, and its own, as of now; two 0-dim int64.

        The number that proves a step to a rank is the sum of all ranks' common parts and of its own private one.
        """
        return self._common.total(), self._private.total()


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


class _Plan:
    """The digest of all parts, added up where they lie."""

    @torch.no_grad()
    def __init__(self, parts: Iterable[_Part]) -> None:
        found: dict[tuple[torch.device, torch.dtype, int], _Pile] = {}
        for part in parts:
            factor = _signed(xxh3_64_intdigest(part.name.encode()) | 1)
            rows = part.rows.detach()
            for piece, first in _pieces(rows, part.first_element * _words_of(rows.itemsize)):
                count = piece.numel() * _words_of(piece.itemsize)
                if not count:
                    continue
                width = next((width for width in _WIDTHS if first % _BLOCK + count <= width), _BLOCK)
                kind = piece.device, _WORDS[piece.itemsize], width
                if kind not in found:
                    found[kind] = _Pile(*kind)
                found[kind].add(piece, first, factor)
        self._products = [pile.settled() for pile in found.values()]

    @torch.no_grad()
    def total(self) -> Tensor:
        return added([product.total() for product in self._products])


def _words_of(itemsize: int) -> int:
    return max(1, itemsize // 4)


def _pieces(rows: Tensor, first: int) -> Iterator[tuple[Tensor, int]]:
    """All words in their logical order, with the index of the first: as words, or strided and not too many at once."""
    if rows.is_contiguous():
        yield rows.view(-1).view(_WORDS[rows.itemsize]), first
        return
    per_element = _words_of(rows.itemsize)
    most = (_ROWS[rows.device.type] - 1) * _BLOCK // per_element  # they may begin in the middle of a block
    if rows.numel() <= most:
        yield rows, first
        return
    row_elements = rows.numel() // rows.shape[0]
    for some in rows.split(most // row_elements) if row_elements <= most else rows.unbind():
        yield from _pieces(some, first)
        first += some.numel() * per_element


@dataclass(slots=True)
class _Batch:
    """Rows that are multiplied by one call: as they lie in a tensor, or gathered first."""

    own: Tensor | None = None
    rows: int = 0
    words: int = 0  # of theirs; the rest is padding
    places: list[int] = field(default_factory=list)  # of the gathered: which word each begins at
    sources: list[Tensor] = field(default_factory=list)


class _Work(NamedTuple):
    """The same, with its memory."""

    sources: list[Tensor]
    targets: list[Tensor]
    is_padded: bool
    blocks: Tensor
    products: Tensor
    sums: Tensor


class _Pile:
    """Rows of one width. Each word lies where its index says, so that the table of weights fits every row."""

    def __init__(self, device: torch.device, dtype: torch.dtype, width: int) -> None:
        self._device, self._dtype, self._width = device, dtype, width
        self._most = _ROWS[device.type] * _BLOCK // width  # rows at once
        self._batches: list[_Batch] = []
        self._rows = 0  # in all
        self._spans: list[tuple[int, int, int]] = []  # rows, how far blocks are ahead of them, name's factor

    def add(self, piece: Tensor, first: int, factor: int) -> None:
        """Words, which are taken apart as need be, or something strided, which is not."""
        is_strided, count = not piece.is_contiguous(), piece.numel() * _words_of(piece.itemsize)
        at = 0
        while at < count:
            block, column = divmod(first + at, _BLOCK)
            wanted = -(-(column + count - at) // self._width)  # rows
            if not column and (count - at) // self._width >= self._most and not is_strided:
                rows, words = self._most, self._most * self._width
                batch = self._new(piece[at : at + words].view(rows, self._width))
            else:
                batch = self._with_room_for(wanted if is_strided else 1)
                rows = min(wanted, self._most - batch.rows)
                words = min(count - at, rows * self._width - column)
                batch.places.append(batch.rows * self._width + column)
                batch.sources.append(piece if is_strided else piece[at : at + words])
            batch.rows += rows
            batch.words += words
            self._spans.append((rows, block - self._rows, factor))
            self._rows += rows
            at += words

    def _new(self, own: Tensor | None = None) -> _Batch:
        self._batches.append(_Batch(own))
        return self._batches[-1]

    def _with_room_for(self, rows: int) -> _Batch:
        for last in self._batches[-1:]:
            if last.own is None and last.rows + rows <= self._most:
                return last
        return self._new()

    def settled(self) -> _Product:
        """All are there: take the memory in which they are gathered and multiplied, and find every place in it."""
        most = max(batch.rows for batch in self._batches)
        gathered = max((batch.rows for batch in self._batches if batch.own is None), default=0)
        words = torch.empty(gathered * self._width, dtype=self._dtype, device=self._device)
        products = torch.empty((most, self._width), dtype=torch.int64, device=self._device)
        rows, blocks_ahead, names = torch.tensor(self._spans).unbind(1)
        blocks = torch.arange(self._rows) + blocks_ahead.repeat_interleave(rows)
        factors = (_mixed(blocks) * names.repeat_interleave(rows)).to(self._device, non_blocking=True)
        sums = torch.empty_like(factors)
        work = [
            _Work(
                sources=batch.sources,
                targets=[_place(words, at, source) for at, source in zip(batch.places, batch.sources, strict=True)],
                is_padded=batch.words < batch.rows * self._width,
                blocks=words.view(-1, self._width)[: batch.rows] if batch.own is None else batch.own,
                products=products[: batch.rows],
                sums=some,
            )
            for batch, some in zip(self._batches, sums.split([b.rows for b in self._batches]), strict=True)
        ]
        return _Product(work, _table(self._device)[: self._width], sums, factors)


class _Product(NamedTuple):
    """A pile, ready to be multiplied with its weights as often as anybody likes."""

    work: list[_Work]
    table: Tensor
    sums: Tensor  # of the rows
    factors: Tensor

    def total(self) -> Tensor:
        for one in self.work:
            if one.targets:
                if one.is_padded:
                    one.blocks.zero_()
                torch._foreach_copy_(one.targets, one.sources)
            torch.mul(one.blocks, self.table, out=one.products)
            torch.sum(one.products, 1, out=one.sums)
        return (self.sums * self.factors).sum()


def _place(words: Tensor, at: int, source: Tensor) -> Tensor:
    """Where a piece goes, as what it is."""
    count = source.numel() * _words_of(source.itemsize)
    return words[at : at + count].view(source.dtype).view(source.shape)


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
