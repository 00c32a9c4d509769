"""Indices that rise are kept as the gaps between them, and come back to the bit; other arrays are left alone."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.errors import Damaged
from everstep.image import Wanted, lay_out
from everstep.recover.shelf import RecordImage
from everstep.store.gaps import from_gaps, shorten, to_gaps
from everstep.types import ImageInfo

INFO = ImageInfo(format=1, run="a" * 32, rank=0, world=1)
gaps_of_all_kinds = st.lists(
    st.one_of(st.integers(0, 300), st.sampled_from([254, 255, 509, 510, 65534, 65535, 65536, 131070]))
)


def data_of(integers: list[int], item: int) -> memoryview:
    return np.array(integers, f"<i{item}").data.cast("B")


@given(first=st.integers(0, 2**20), gaps=gaps_of_all_kinds, item=st.sampled_from([4, 8]))
def test_rising_integers_come_back_to_the_bit_and_never_take_more(first: int, gaps: list[int], item: int) -> None:
    data = data_of([first, *(first + 1 + at + sum(gaps[: at + 1]) for at in range(len(gaps)))], item)
    stored = to_gaps(data, item)
    if stored is not None:
        assert len(stored) < len(data)
        assert from_gaps(memoryview(stored), item, len(data)) == data
    elif len(gaps) > 100:
        assert sum(gaps) > 2**16 * len(gaps), "they would have taken less"


@pytest.mark.parametrize(
    "integers",
    [
        [*range(50), 49], [*range(50), 10], [-1, *range(50)], [*range(50, 0, -1)], [7] * 50,
        [0, 2**31 - 1, -2, *range(50)], [2**31 - 1, -(2**31), *range(50)],
    ],
    ids=str,
)  # fmt: skip
def test_what_does_not_rise_is_left_alone(integers: list[int]) -> None:
    assert to_gaps(data_of(integers, 4), 4) is None
    assert to_gaps(data_of([one << 32 for one in integers], 8), 8) is None


def test_the_largest_integers_come_back_too() -> None:
    for item, top in ((4, 2**31 - 1), (8, 2**63 - 1)):
        data = data_of([*range(top - 99, top + 1)], item)
        stored = to_gaps(data, item)
        assert stored is not None and from_gaps(memoryview(stored), item, len(data)) == data


@pytest.mark.parametrize(("ratio", "most"), [(0.05, 1.01), (0.01, 1.1), (0.001, 2.01)])
def test_an_index_takes_about_a_byte_where_one_element_in_a_hundred_is_kept(ratio: float, most: float) -> None:
    count = 100_000
    indices = np.sort(np.random.default_rng(0).choice(int(count / ratio), count, replace=False))
    stored = to_gaps(indices.astype("<i4").data.cast("B"), 4)
    assert stored is not None and len(stored) <= most * count


def test_however_unevenly_one_in_a_hundred_lies_an_index_takes_less_than_one_byte_and_a_half() -> None:
    together = [*range(5_000), *range(990_000, 995_000)]
    stored = to_gaps(data_of(together, 4), 4)
    assert stored is not None and len(stored) <= 1.5 * len(together)


def head(first: int, width: int) -> bytes:
    return struct.pack("<QQ", first, width)


BAD = {
    "nothing": b"",
    "half a head": head(1, 1)[:9],
    "no such unit": head(1, 4) + bytes(36),
    "a unit of nothing": head(1, 0) + bytes(9),
    "half a unit": head(1, 2) + bytes(17),
    "too few": head(1, 1) + bytes(8),
    "too many": head(1, 1) + bytes(10),
    "a gap that does not end": head(1, 1) + bytes(8) + b"\xff",
    "a gap that goes on behind the last": head(1, 1) + bytes(9) + b"\xff",
    "beyond what an integer holds": head(2**31 - 5, 1) + bytes(9),
    "an absurd first": head(2**64 - 1, 1) + bytes(9),
}


@pytest.mark.parametrize("what", BAD)
def test_what_are_no_gaps_of_so_many_integers_is_damage(what: str) -> None:
    assert from_gaps(memoryview(head(1, 1) + bytes(9)), 4, 40) == data_of([*range(1, 11)], 4)
    with pytest.raises(Damaged, match="gaps"):
        from_gaps(memoryview(BAD[what]), 4, 40)


def test_a_record_gives_every_piece_wherever_its_rising_arrays_lie() -> None:
    """Pieces of two buffers, with arrays between them that do not rise and one that is too short to be worth it."""
    random = np.random.default_rng(1)
    arrays = {
        "packed.0.indices": np.arange(7, 707, 7, dtype="<i4"), "packed.0.values": random.random(100).astype("<f4"),
        "packed.1.indices": np.arange(0, 90_000, 300, dtype="<i4"), "packed.1.values": random.random(300).astype("<f4"),
        "packed.1.order": random.permutation(300).astype("<i4"), "few": np.arange(3, dtype="<i4"),
        "packed.2.indices": np.arange(5, 2_005, 2, dtype="<i8"), "bytes": np.arange(200, dtype="u1"),
    }  # fmt: skip
    kinds = {"<i4": "I32", "<f4": "F32", "<i8": "I64", "|u1": "U8"}
    wanted = [
        Wanted(name=name, dtype=kinds[one.dtype.str], shape=one.shape, start=(0,), extent=one.shape)
        for name, one in arrays.items()
    ]
    layout = lay_out(wanted, INFO, 100)
    whole = bytearray(layout.total_bytes)
    whole[: len(layout.header)] = layout.header
    for piece in layout.pieces:
        begin = len(layout.header) + piece.offset
        whole[begin : begin + piece.length] = arrays[piece.name].tobytes()
    end = layout.extras_offset + 50
    parts, ranges, gaps = shorten(layout, memoryview(whole), end)
    payload = b"".join(parts)
    assert len(gaps) == 3 and sum(length for _, length in ranges) == end - len(layout.header)
    assert len(payload) < end - len(layout.header) - 3 * (100 + 300 + 1000)
    record = RecordImage(layout, INFO, memoryview(payload), ranges, gaps).make_whole()
    for piece in layout.pieces:
        assert record.bytes_at(len(layout.header) + piece.offset, piece.length) == arrays[piece.name].tobytes()
        assert record.bytes_at(len(layout.header) + piece.offset + 8, 4) == arrays[piece.name].tobytes()[8:12]
    assert record.bytes_at(layout.extras_offset, 50) == whole[layout.extras_offset : end]
