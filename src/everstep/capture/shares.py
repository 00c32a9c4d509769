"""Which rows of what ranks have in common each of them keeps.

`share` cuts common tensors among the ranks, by rows, so that each rank copies about the same number of bytes; it is a
function of the listing alone, so the ranks need not talk. Of what ranks have together only the replicas of a box share
the work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
from torch import Tensor

from everstep.capture.layout import DTYPES, Entry
from everstep.capture.sharded import Sharers
from everstep.image import Wanted


@dataclass(frozen=True, slots=True)
class Share:
    """The rows of an entry that this rank keeps."""

    entry: Entry
    first: int
    rows: int

    def source(self, tensor: Tensor | None = None) -> Tensor:
        tensor = (self.entry.tensor if tensor is None else tensor).detach()
        return tensor if tensor.dim() == 0 or self.rows == tensor.shape[0] else tensor.narrow(0, self.first, self.rows)

    def wanted(self) -> Wanted:
        entry, local = self.entry, tuple(self.entry.tensor.shape)
        start = (entry.start[0] + self.first, *entry.start[1:]) if local else ()
        return Wanted(
            name=entry.name, dtype=DTYPES[entry.tensor.dtype], shape=entry.shape, start=start,
            extent=(self.rows, *local[1:]) if local else (), private=not entry.common, order=_order(entry.tensor),
        )  # fmt: skip

    def chunks(self, most: int) -> Iterator[Share]:
        """The same rows in shares of at most so many bytes, as far as rows can be cut."""
        at_once = max(1, self.rows * most // max(1, self.bytes))
        for first in range(self.first, self.first + self.rows, at_once):
            yield Share(self.entry, first, min(at_once, self.first + self.rows - first))

    @property
    def bytes(self) -> int:
        tensor = self.entry.tensor
        return tensor.nbytes if tensor.dim() == 0 else tensor.nbytes // max(1, tensor.shape[0]) * self.rows


def _order(tensor: Tensor) -> tuple[int, ...] | msgspec.UnsetType:
    """How the dimensions lie in memory, if otherwise than they are numbered: a copy in that order moves whole runs.

    Only where rows come first and nothing lies between: other tensors are put in order as they are copied.
    """
    if tensor.is_contiguous():
        return msgspec.UNSET
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda one: -strides[one])
    return tuple(order) if order[0] == 0 and tensor.permute(order).is_contiguous() else msgspec.UNSET


def share(entries: Sequence[Entry], rank: int, world: int) -> list[Share]:
    """What this rank keeps: all of its own, and its part of what others have too, cut between rows.

    A parameter and its optimizer's state are cut at the same rows, so that whoever keeps some rows of them can repeat
    their update. What has other rows than its parameter stays with the parameter's first row.
    """
    everybody = Sharers("everybody", rank, world)
    groups: dict[Sharers, dict[str, list[Entry]]] = {}  # those who have the same entries -> families
    for entry in entries:
        if entry.common:
            families = groups.setdefault(entry.box.sharers if entry.box is not None else everybody, {})
            families.setdefault(entry.family, []).append(entry)
    spans = {sharers: _spans(families, sharers) for sharers, families in groups.items()}
    kept: list[Share] = []
    for entry in entries:
        if not entry.common:
            kept.append(Share(entry, 0, _rows(entry)))
            continue
        if entry.box is not None and not entry.tensor.numel() and 0 not in entry.shape:
            continue  # others have all of it
        sharers = entry.box.sharers if entry.box is not None else everybody
        first, last = spans[sharers][entry.family]
        if last < 0:
            continue
        if entry.tensor.shape == groups[sharers][entry.family][0].tensor.shape:
            kept.append(Share(entry, first, last - first))
        elif first == 0:
            kept.append(Share(entry, 0, _rows(entry)))
    return kept


def _spans(families: dict[str, list[Entry]], sharers: Sharers) -> dict[str, tuple[int, int]]:
    """Of each family the rows that this one of the sharers keeps, from and to; to -1: none."""
    row_bytes = {name: sum(map(_row_bytes, _alike(members))) for name, members in families.items()}
    total = sum(row_bytes[name] * _rows(members[0]) for name, members in families.items())
    low, high = (total * one // sharers.count for one in (sharers.index, sharers.index + 1))
    spans: dict[str, tuple[int, int]] = {}
    at = 0
    for name, members in families.items():
        rows, size = _rows(members[0]), row_bytes[name]
        if size == 0:
            spans[name] = (0, rows if sharers.index == 0 else -1)
        else:
            first, last = (min(rows, max(0, -((at - edge) // size))) for edge in (low, high))
            spans[name] = (first, last if first < last else -1)
        at += size * rows
    return spans


def _rows(entry: Entry) -> int:
    return entry.tensor.shape[0] if entry.tensor.dim() else 1


def _row_bytes(entry: Entry) -> int:
    return entry.tensor.nbytes // max(1, _rows(entry))


def _alike(family: list[Entry]) -> list[Entry]:
    """The members that are cut like their parameter, which comes first."""
    return [entry for entry in family if entry.tensor.shape == family[0].tensor.shape]
