"""Rising integers as the gaps between them: a byte each, where one element in a hundred is kept, instead of four.

    u64 first | u64 bytes of a unit, 1 or 2 | units

A gap is what lies between two neighbours: their difference less one. Each gap is a unit. One that does not fit is the
largest unit, which counts in full and says that the gap goes on, as often as it takes, and then the rest.

Needs numpy. What the integers mean it does not know.
"""

from __future__ import annotations

import struct
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from everstep.errors import Damaged
from everstep.image import ImageLayout
from everstep.types import Gaps

_HEAD = struct.Struct("<QQ")
_KINDS: dict[str, Literal[4, 8]] = {"I32": 4, "I64": 8}  # what is looked at, as an image calls it
_LEAST_BYTES = 64  # of an array that is worth it
_UNITS: dict[int, np.dtype[Any]] = {1: np.dtype("<u1"), 2: np.dtype("<u2")}

_Array = npt.NDArray[Any]


def shorten(
    layout: ImageLayout, data: memoryview, end: int
) -> tuple[list[memoryview], tuple[tuple[int, int], ...], Gaps]:
    """An image from its header to `end`, its rising arrays as gaps: payload, ranges and gaps of a frame."""
    parts: list[memoryview] = []
    ranges: list[tuple[int, int]] = []
    gaps: list[tuple[int, Literal[4, 8], int]] = []
    at = len(layout.header)
    for piece in layout.pieces:
        item, begin = _KINDS.get(piece.dtype), len(layout.header) + piece.offset
        if item is None or piece.length < _LEAST_BYTES:
            continue
        stored = to_gaps(data[begin : begin + piece.length], item)
        if stored is None:
            continue
        if begin > at:
            parts.append(data[at:begin])
            ranges.append((at, begin - at))
        parts.append(memoryview(stored))
        ranges.append((begin, piece.length))
        gaps.append((begin, item, len(stored)))
        at = begin + piece.length
    return [*parts, data[at:end]], (*ranges, (at, end - at)), tuple(gaps)


def to_gaps(data: memoryview, item: int) -> bytes | None:
    """The gaps of integers of so many bytes; None if they do not rise from 0 or above, or would not take less so."""
    values: _Array = np.frombuffer(data, f"<i{item}")
    if len(values) < 2 or values[0] < 0 or not (values[1:] > values[:-1]).all():
        return None
    gaps = np.diff(values)
    gaps -= 1
    units = _units(gaps, 1, 2 * len(gaps))
    width = 2 if units is None else 1
    units = _units(gaps, 2, len(data)) if units is None else units
    if units is None or _HEAD.size + units.nbytes >= len(data):
        return None
    return _HEAD.pack(int(values[0]), width) + units.tobytes()


def _units(gaps: _Array, width: int, at_most_bytes: int) -> _Array | None:
    """Gaps in units of so many bytes; None if they take more than that."""
    unit = _UNITS[width]
    largest = np.iinfo(unit).max
    long = np.flatnonzero(gaps >= largest)
    times, rest = np.divmod(gaps[long], largest)
    if width * (len(gaps) + int(times.sum())) > at_most_bytes:
        return None
    units = gaps.astype(unit)
    units[long] = rest
    return np.insert(units, np.repeat(long, times), largest)


def from_gaps(stored: memoryview, item: int, length: int) -> memoryview:
    """The integers again, `length` bytes of them. Damaged if these are no gaps of so many."""
    count, kind = length // item, np.dtype(f"<i{item}")
    first, width = _HEAD.unpack_from(stored) if len(stored) >= _HEAD.size else (0, 0)
    if width not in _UNITS or (len(stored) - _HEAD.size) % width:
        raise Damaged("an array that is kept as gaps is not spelled as one")
    units: _Array = np.frombuffer(stored, _UNITS[width], offset=_HEAD.size)
    largest = np.iinfo(units.dtype).max
    last = np.flatnonzero(units != largest)  # the last unit of each gap
    is_whole = len(last) == count - 1 and (not len(units) or units[-1] != largest)
    highest = first + int(units.sum(dtype=np.uint64)) + count - 1
    if not is_whole or highest > np.iinfo(kind).max:
        raise Damaged(f"the gaps of an array are not those of {count} integers")
    values = np.arange(count, dtype=kind)
    values += first
    values[1:] += np.cumsum(units, dtype=kind)[last]
    return values.data.cast("B")
