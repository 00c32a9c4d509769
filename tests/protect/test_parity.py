"""Any losses are rebuilt to the byte: every loss pattern of small groups, against a reference that shares no code."""

from __future__ import annotations

import ctypes.util
import importlib.metadata
from collections.abc import Collection, Sequence
from functools import cache
from itertools import combinations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.errors import BadConfig, MissingPackage, TooManyLost
from everstep.protect import reed_solomon
from everstep.protect.coder import coder_for
from everstep.protect.parity import Read, encode, rebuild
from everstep.protect.reed_solomon import ReedSolomon
from everstep.protect.stripes import Geometry, Place
from everstep.protect.xor import Xor

DATA, PARITY = Place.DATA, Place.PARITY


# -- the reference: dicts and single bytes


@cache
def times(a: int, b: int) -> int:
    product = 0
    while b:
        product ^= a * (b & 1)
        a = (a << 1) ^ (0x11D if a & 0x80 else 0)
        b >>= 1
    return product


@cache
def inverse(a: int) -> int:
    return next(b for b in range(256) if times(a, b) == 1)


def weight(geometry: Geometry, row: int, column: int) -> int:
    return 1 if geometry.losses == 1 else inverse((geometry.width + row) ^ column)


def naive_parity(geometry: Geometry, data: Sequence[bytes]) -> list[bytes]:
    """Every member's parity file, as the docstring of `stripes` describes it."""
    n, m = len(geometry.members), geometry.losses
    blocks: dict[tuple[int, int], bytes] = {}  # by stripe and column
    for member, content in enumerate(data):
        step = -(-len(content) // (64 * (n - m))) * 64
        for index in range(n - m):
            stripe = (member + 1 + index) % n
            blocks[stripe, (member - stripe - m) % n] = content[index * step : (index + 1) * step]
    files = []
    for member in range(n):
        file = b""
        for row in range(m):
            stripe = (member - row) % n
            columns = [blocks[stripe, column] for column in range(n - m)]
            out = bytearray(max(map(len, columns)))
            for column, block in enumerate(columns):
                factor = weight(geometry, row, column)
                for place, byte in enumerate(block):
                    out[place] ^= times(factor, byte)
            file += out
        files.append(file)
    return files


# -- a group in memory


class Group:
    """Members with data and parity; reading one that is lost fails the test."""

    def __init__(self, lengths: Sequence[int], losses: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.data = [rng.bytes(length) for length in lengths]
        self.geometry = Geometry(
            members=tuple(f"n{number}" for number in range(len(lengths))), lengths=tuple(lengths), losses=losses
        )
        self.parity: list[bytes] = [b""] * len(lengths)
        self.lost: set[int] = set()
        self.batches: list[list[Read]] = []

    def read(self, batch: Sequence[Read]) -> None:
        self.batches.append(list(batch))
        for one in batch:
            assert one.member not in self.lost
            held = (self.data if one.place is DATA else self.parity)[one.member]
            assert 0 < len(one.into) <= len(held) - one.offset
            one.into[:] = held[one.offset : one.offset + len(one.into)]

    def encode(self, chunk_bytes: int = 96) -> list[bytes]:
        for member in range(self.geometry.size):
            self.lost = {member}  # nobody needs its own data for its own parity
            file = bytearray(self.geometry.parity_bytes(member))
            encode(self.geometry, member, self.read, writer(file), chunk_bytes=chunk_bytes)
            self.parity[member] = bytes(file)
        self.lost = set()
        return self.parity

    def rebuild(self, lost: Collection[int], member: int, place: Place, chunk_bytes: int = 96) -> bytes:
        self.lost = {*lost, member}
        file = bytearray(self.geometry.lengths[member] if place is DATA else self.geometry.parity_bytes(member))
        rebuild(self.geometry, lost, member, place, self.read, writer(file), chunk_bytes=chunk_bytes)
        return bytes(file)


def writer(file: bytearray, base: int = 0):
    """Every byte once, in order."""
    expected = base

    def write(offset: int, content: memoryview) -> None:
        nonlocal expected
        assert offset == expected and len(content)
        expected += len(content)
        file[offset - base : offset - base + len(content)] = content
        assert expected - base <= len(file)

    return write


GROUPS = [(n, m) for n in range(2, 7) for m in range(1, 4) if m < n]
sizes_of = st.one_of(st.sampled_from([0, 1, 7, 8, 63, 64, 65, 100]), st.integers(0, 900))


def patterns(n: int, m: int) -> list[tuple[int, ...]]:
    return [lost for count in range(1, m + 1) for lost in combinations(range(n), count)]


@pytest.mark.parametrize(("n", "m"), GROUPS)
@pytest.mark.parametrize("kind", ["unequal", "equal", "one has all", "nothing"])
def test_every_loss_pattern_is_rebuilt_to_the_byte(n: int, m: int, kind: str) -> None:
    lengths = {
        "unequal": [0, 1, 777, 64, 333, 1200][:n][::-1],
        "equal": [500] * n,
        "one has all": [*[0] * (n - 1), 701],
        "nothing": [0] * n,
    }[kind]
    group = Group(lengths, m)
    assert group.encode() == naive_parity(group.geometry, group.data)
    for lost in patterns(n, m):
        for member in lost:
            assert group.rebuild(lost, member, DATA) == group.data[member], (lost, member)
            assert group.rebuild(lost, member, PARITY) == group.parity[member], (lost, member)


@given(st.data())
@settings(max_examples=150)
def test_groups_of_any_sizes_are_encoded_as_the_reference_and_rebuilt(draw: st.DataObject) -> None:
    n, m = draw.draw(st.sampled_from(GROUPS))
    lengths = draw.draw(st.lists(sizes_of, min_size=n, max_size=n))
    chunk = draw.draw(st.sampled_from([1, 7, 64, 100, 1 << 20]))
    group = Group(lengths, m, seed=draw.draw(st.integers(0, 99)))
    assert group.encode(chunk) == naive_parity(group.geometry, group.data)
    lost = draw.draw(st.sampled_from(patterns(n, m)))
    for member in lost:
        assert group.rebuild(lost, member, DATA, chunk) == group.data[member]
        assert group.rebuild(lost, member, PARITY, chunk) == group.parity[member]


@given(st.data())
@settings(max_examples=100)
def test_any_range_is_rebuilt_alone_and_reads_no_more_than_its_share(draw: st.DataObject) -> None:
    n, m = draw.draw(st.sampled_from(GROUPS))
    group = Group(draw.draw(st.lists(st.integers(1, 900), min_size=n, max_size=n)), m)
    group.encode()
    lost = draw.draw(st.sampled_from(patterns(n, m)))
    member, place = lost[0], draw.draw(st.sampled_from([DATA, PARITY]))
    whole = (group.data if place is DATA else group.parity)[member]
    start, stop = sorted(draw.draw(st.tuples(*[st.integers(0, len(whole))] * 2)))
    group.lost, group.batches, piece = set(lost), [], bytearray(stop - start)
    rebuild(
        group.geometry, lost, member, place, group.read, writer(piece, start), start=start, stop=stop, chunk_bytes=50
    )
    assert piece == whole[start:stop]
    assert sum(len(one.into) for batch in group.batches for one in batch) <= group.geometry.width * (stop - start)


def test_large_members_over_many_chunks_of_the_usual_size() -> None:
    lengths = [5_000_001, 3_000_000, 0, 4_999_999, 1, 2_500_123]
    for losses in (1, 2, 3):
        group = Group(lengths, losses)
        group.encode(1 << 18)
        lost = tuple(range(losses))
        for member in lost:
            assert group.rebuild(lost, member, DATA, 1 << 18) == group.data[member]
            assert group.rebuild(lost, member, PARITY, 1 << 18) == group.parity[member]
        assert max(len(one.into) for batch in group.batches for one in batch) == 1 << 18


def test_a_batch_asks_each_member_once_so_that_all_can_be_read_at_the_same_time() -> None:
    group = Group([1000] * 5, 2)
    group.encode(chunk_bytes=64)
    for batch in group.batches:
        assert len({one.member for one in batch}) == len(batch)
    assert max(map(len, group.batches)) == 3


# -- geometry


@given(lengths=st.lists(sizes_of, min_size=2, max_size=9), losses=st.integers(1, 4))
def test_every_byte_of_data_is_in_one_stripe_and_no_stripe_has_a_member_twice(lengths: list[int], losses: int) -> None:
    if losses >= len(lengths):
        return
    geometry = Geometry(members=tuple(map(str, range(len(lengths)))), lengths=tuple(lengths), losses=losses)
    spans: dict[tuple[int, Place], list[tuple[int, int]]] = {}
    for stripe in range(geometry.size):
        blocks = [*geometry.data_blocks(stripe), *geometry.parity_blocks(stripe)]
        assert [block.column for block in blocks] == list(range(geometry.size))
        assert sorted(block.member for block in blocks) == list(range(geometry.size))
        parity = [block.member for block in blocks if block.place is PARITY]
        assert parity == [(stripe + row) % geometry.size for row in range(losses)]
        assert {block.length for block in blocks[-losses:]} == {geometry.stripe_bytes(stripe)}
        for block in blocks:
            spans.setdefault((block.member, block.place), []).append((block.offset, block.offset + block.length))
    for member, length in enumerate(lengths):
        for place, whole in ((DATA, length), (PARITY, geometry.parity_bytes(member))):
            at = 0
            for begin, end in sorted(spans[member, place]):
                assert begin == at
                at = end
            assert at == whole


def test_equal_members_hold_a_share_of_parity_and_nothing_is_padded() -> None:
    geometry = Geometry(members=tuple("abcde"), lengths=(4096 * 3,) * 5, losses=2)
    assert {geometry.parity_bytes(member) for member in range(5)} == {4096 * 2}
    lone = Geometry(members=tuple("abc"), lengths=(0, 1, 0), losses=1)
    assert sum(lone.parity_bytes(member) for member in range(3)) == 1


def test_a_geometry_is_json_and_believes_nothing() -> None:
    geometry = Geometry(members=("a", "b", "c"), lengths=(5, 0, 10**12), losses=2)
    text = msgspec.json.encode(geometry)
    assert msgspec.json.decode(text, type=Geometry) == geometry
    for wrong in (
        {"members": ["a", "a"], "lengths": [1, 1], "losses": 1},
        {"members": ["a", "b"], "lengths": [1], "losses": 1},
        {"members": ["a", "b"], "lengths": [1, -1], "losses": 1},
        {"members": ["a", "b"], "lengths": [1, 1], "losses": 2},
        {"members": ["a", "b"], "lengths": [1, 1], "losses": 0},
        {"members": [], "lengths": [], "losses": 0},
    ):
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(msgspec.json.encode(wrong), type=Geometry)


# -- saying no


def test_one_loss_too_many_says_who_is_missing() -> None:
    group = Group([10] * 4, 2)
    group.encode()
    with pytest.raises(TooManyLost, match=r"n0, n1, n3 are missing from a parity group of 4, and .* 2 of") as found:
        group.rebuild({0, 1, 3}, 1, DATA)
    assert (found.value.missing, found.value.losses) == (("n0", "n1", "n3"), 2)
    with pytest.raises(ValueError, match="no members"):
        group.rebuild({9}, 1, DATA)


def test_what_a_reader_raises_goes_through_and_nothing_is_written_of_that_chunk() -> None:
    group, written = Group([1000] * 3, 1), []

    def broken(batch: Sequence[Read]) -> None:
        if len(group.batches) == 2:
            raise ConnectionResetError("n2 is gone")
        group.read(batch)

    with pytest.raises(ConnectionResetError, match="n2 is gone"):
        encode(group.geometry, 0, broken, lambda offset, content: written.append(offset), chunk_bytes=64)
    assert written == [0, 64]


def test_without_the_library_one_sentence_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(reed_solomon, "files", absent)
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: None)
    reed_solomon._library.cache_clear()
    try:
        with pytest.raises(MissingPackage, match=r"needs pyeclib: pip install pyeclib, or .*everstep\[nodes\]"):
            coder_for(4, 2)
        assert isinstance(coder_for(4, 1), Xor)  # needs no library
    finally:
        reed_solomon._library.cache_clear()


def test_c_is_never_given_what_would_not_fit() -> None:
    coder = ReedSolomon(2, 2)
    a, b = np.zeros(64, np.uint8), np.zeros(65, np.uint8)
    with pytest.raises(ValueError, match="room for the longest"):
        coder.combine(b"\1\2", [a, b], np.empty(64, np.uint8))
    with pytest.raises(ValueError, match="a weight"):
        coder.combine(b"\1", [a, a], np.empty(64, np.uint8))
    with pytest.raises(ValueError, match="without gaps"):
        coder.combine(b"\1\2", [a, np.zeros(128, np.uint8)[::2]], np.empty(64, np.uint8))
    fixed = np.empty(64, np.uint8)
    fixed.flags.writeable = False
    with pytest.raises(ValueError, match="room"):
        coder.combine(b"\1\2", [a, a], fixed)
    with pytest.raises(ValueError, match="different columns"):
        coder.weights(2, [1, 1])
    with pytest.raises(BadConfig, match="at most 256 members, not 257"):
        ReedSolomon(254, 3)


@pytest.mark.parametrize("losses", [1, 2, 3])
@given(lengths=st.lists(st.integers(0, 200), min_size=4, max_size=4), extra=st.integers(0, 70))
def test_chunks_of_any_lengths_at_any_address_are_summed(losses: int, lengths: list[int], extra: int) -> None:
    """The library's inner loops take 64 bytes at a time; heads and tails are where they would go wrong."""
    coder = coder_for(4, losses)
    rng = np.random.default_rng(sum(lengths))
    chunks = [np.frombuffer(rng.bytes(length + 1), np.uint8)[1:] for length in lengths]
    room = np.full(max(lengths) + extra + 64, 0xAA, np.uint8)
    out = room[: max(lengths) + extra]
    for row in range(losses):
        weights = coder.weights(4 + row, range(4))
        coder.combine(weights, chunks, out)
        expected = [0] * len(out)
        for factor, chunk in zip(weights, chunks, strict=True):
            for place, byte in enumerate(chunk.tolist()):
                expected[place] ^= times(factor, byte)
        assert out.tolist() == expected
        assert set(room[len(out) :].tolist()) == {0xAA}
