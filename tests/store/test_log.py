"""The log gives back what was appended, up to the first frame that is not good, and says why it ends there."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from everstep import testing
from everstep.errors import Damaged, Mismatch, NewerFormat, NotEnoughSpace, TierFailed
from everstep.image import BLOCK, FORMAT, Wanted, lay_out
from everstep.store import frame as frames
from everstep.store.disk import DiskTier
from everstep.store.frame import Record, encode_frame
from everstep.store.gaps import to_gaps
from everstep.store.log import LogRead, LogWriter, cut_after, log_folder, log_name, read_log, scan, segments
from everstep.types import Frame, ImageInfo

RUN, START, RANK = "a" * 32, 100, 3
INFO = ImageInfo(format=1, run=RUN, rank=RANK, world=4)
LAYOUT = lay_out([Wanted(name="grad.w", dtype="F32", shape=(3000,), start=(0,), extent=(3000,))], INFO, 100)
BASE = len(LAYOUT.header)
NAME = log_name(START, RANK)


def a_frame(step: int, **other: Any) -> Frame:
    fields = {
        "format": 1, "run": RUN, "generation": "b" * 32, "step": step, "rank": RANK, "world": 4, "cut_time": 1.5,
        "kind": "record", "layout": LAYOUT.digest, "ranges": ((BASE, 10), (BASE + 100, 5000)),
    }  # fmt: skip
    return Frame(**(fields | other))


def content(step: int, length: int = 5010) -> bytes:
    return bytes((step * 31 + at) % 251 for at in range(length))


def a_record(step: int, **other: Any) -> tuple[Frame, list[memoryview]]:
    data = memoryview(content(step))
    return a_frame(step, **other), [data[:10], data[10:]]


def a_writer(tier: DiskTier, start: int = START) -> LogWriter:
    return LogWriter(tier, start, RANK, RUN, LAYOUT.header)


def a_log(root: Path, steps: int = 4, group: int = 1) -> DiskTier:
    """A tier with a log of some steps, so many to a group commit."""
    tier = DiskTier(root)
    writer = a_writer(tier)
    for first in range(START + 1, START + steps + 1, group):
        writer.append([a_record(step) for step in range(first, min(first + group, START + steps + 1))])
    return tier


def found(log: LogRead) -> list[int]:
    """The steps of a log, each with the right bytes."""
    for record in log.records:
        assert log.payload(record) == content(record.frame.step)
    return [record.frame.step for record in log.records]


def change(tier: DiskTier, data: bytes) -> None:
    (tier.root / NAME).write_bytes(data)


# -- there and back


@pytest.mark.parametrize("group", [1, 3])
def test_what_was_appended_comes_back(tmp_path: Path, group: int) -> None:
    tier = a_log(tmp_path, 5, group)
    for read in (read_log, scan):
        log = read(tier, START, RANK, RUN)
        assert found(log) == [101, 102, 103, 104, 105]
        assert log.layout == LAYOUT and log.info == INFO and log.problem == ""
        assert log.end == tier.size(NAME) and log.last == 105
        assert log.records[0].frame == a_frame(101)
        assert log.payload(log.records[0]).readonly
    assert segments(tier) == [START] and log_folder(START) == "log-0000000100"


def test_a_log_that_is_not_there_says_so(tmp_path: Path) -> None:
    for read in (read_log, scan):
        with pytest.raises(FileNotFoundError):
            read(DiskTier(tmp_path), START, RANK, RUN)
    assert segments(DiskTier(tmp_path)) == []


def test_a_large_record_comes_back_and_so_does_an_empty_one(tmp_path: Path) -> None:
    wanted = Wanted(name="grad.w", dtype="F32", shape=(3_000_000,), start=(0,), extent=(3_000_000,))
    layout = lay_out([wanted], INFO, 100)
    data = content(1, 997) * 12000
    ranges = ((len(layout.header) + 5, len(data)),)
    tier = DiskTier(tmp_path)
    writer = LogWriter(tier, START, RANK, RUN, layout.header)
    writer.append([(a_frame(101, layout=layout.digest, ranges=ranges), [memoryview(data)])])
    writer.append([(a_frame(102, layout=layout.digest, ranges=()), [])])
    log = read_log(tier, START, RANK, RUN)
    assert [bytes(log.payload(record)) for record in log.records] == [data, b""]


def test_a_group_commit_is_one_flush(tmp_path: Path) -> None:
    tier = a_log(tmp_path)
    writer, done = a_writer(tier), []
    tier.before = done.append
    writer.append([a_record(step) for step in range(105, 125)])
    writer.append([a_record(125)])
    assert done.count(f"fsync {NAME}") == 2
    assert len([name for name in done if "fsync" in name]) == 2
    assert len([name for name in done if name.startswith("write")]) == 2  # small records go out together
    assert found(read_log(tier, START, RANK, RUN)) == list(range(101, 126))


def test_a_writer_takes_only_the_next_steps_of_its_own_rank_run_and_layout(tmp_path: Path) -> None:
    tier = a_log(tmp_path)
    writer, size = a_writer(tier), tier.size(NAME)
    for frame in (
        a_frame(106), a_frame(104), a_frame(105, rank=0), a_frame(105, run="c" * 32), a_frame(105, layout=1),
        a_frame(105, kind="layout"), a_frame(105, format=2),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="not the record of step 105"):
            writer.append([(frame, a_record(105)[1])])
    with pytest.raises(ValueError, match="do not fill"):
        writer.append([(a_frame(105), [memoryview(b"short")])])
    writer.append([])
    assert tier.size(NAME) == size
    with pytest.raises(ValueError, match="come before"):
        a_frame(105, ranges=((10, 5), (14, 2)))


def test_a_writer_goes_on_where_another_was_killed_and_never_in_another_layout(tmp_path: Path) -> None:
    tier = a_log(tmp_path)
    change(tier, bytes(tier.get(NAME)) + b"EVERSLOG torn")
    writer = a_writer(tier)
    assert writer.last == 104 and tier.size(NAME) == writer.end
    writer.append([a_record(105)])
    assert found(read_log(tier, START, RANK, RUN)) == [101, 102, 103, 104, 105]
    other = lay_out([Wanted(name="grad.v", dtype="F32", shape=(3,), start=(0,), extent=(3,))], INFO, 100)
    with pytest.raises(Mismatch, match="another layout"):
        LogWriter(tier, START, RANK, RUN, other.header)


# -- what a crash leaves


def test_a_tail_torn_at_any_byte_is_cut_and_all_before_it_is_used(tmp_path: Path) -> None:
    tier = a_log(tmp_path, 1)
    a_writer(tier).append([(a_frame(102, ranges=((BASE, 300),)), [memoryview(content(102, 300))])])
    last = scan(tier, START, RANK, RUN).records[-1]
    places = {*range(last.end - 1, last.begin, -7), last.begin + 1}  # all lengths modulo 8, and the shortest
    for place in sorted(places, reverse=True):
        os.truncate(tier.root / NAME, place)
        log = read_log(tier, START, RANK, RUN)
        assert [record.frame.step for record in log.records] == [101], place
        assert log.torn and "torn tail" in log.problem and log.end == last.begin
    assert found(log) == [101]


def test_a_tail_that_a_crash_left_as_zeros_or_old_bytes_is_torn_too(tmp_path: Path) -> None:
    tier = a_log(tmp_path, 3)
    whole = bytes(tier.get(NAME))
    last = scan(tier, START, RANK, RUN).records[-1]
    for begin in range(last.begin, last.end, BLOCK):
        for filler in (b"\0", b"\xff"):
            change(tier, whole[:begin] + filler * (last.end - begin))
            log = read_log(tier, START, RANK, RUN)
            assert found(log) == [101, 102] and log.torn, begin


def test_a_layout_that_a_crash_tore_is_written_anew(tmp_path: Path) -> None:
    tier = a_log(tmp_path, 2, 2)
    whole = bytearray(tier.get(NAME))
    whole[BLOCK : BLOCK + 512] = bytes(512)
    change(tier, whole)
    log = read_log(tier, START, RANK, RUN)
    assert log.records == [] and log.torn
    a_writer(tier).append([a_record(101)])
    assert found(read_log(tier, START, RANK, RUN)) == [101]


def test_a_hole_in_a_group_that_was_never_flushed_is_torn_and_one_in_a_flushed_group_is_damage(tmp_path: Path) -> None:
    for group, torn in ((4, True), (1, False)):
        tier = a_log(tmp_path / str(group), 4, group)
        whole = bytearray(tier.get(NAME))
        second = scan(tier, START, RANK, RUN).records[1]
        whole[second.begin : second.end] = bytes(second.end - second.begin)
        change(tier, whole)
        log = read_log(tier, START, RANK, RUN)
        assert found(log) == [101] and log.torn is torn
        assert ("torn tail" if torn else "damage") in log.problem


def test_killed_before_any_operation_the_log_keeps_all_groups_that_were_acknowledged(tmp_path: Path) -> None:
    for operation in range(100):
        root = tmp_path / str(operation)
        acknowledged = root.with_suffix(".steps")

        def act(tier: Any, acknowledged: Path = acknowledged) -> None:
            writer = a_writer(tier)
            for first in (101, 103, 105):
                writer.append([a_record(first), a_record(first + 1)])
                acknowledged.write_text(str(first + 1))

        killed = testing._killed_before(operation, lambda root=root: DiskTier(root), act)  # type: ignore[misc]
        last = int(acknowledged.read_text()) if acknowledged.exists() else START
        writer = a_writer(DiskTier(root))
        assert writer.last >= last
        if not killed:
            assert writer.last == 106 and operation > 8
            return
        writer.append([a_record(writer.last + 1)])
        log = read_log(DiskTier(root), START, RANK, RUN)
        assert found(log) == list(range(101, writer.last + 1)) and not log.problem
    raise AssertionError("never got through")


# -- damage


def regions(record: Record) -> dict[str, range]:
    """Every region of a frame of which a bit matters."""
    header = record.begin + frames._PROLOGUE_BYTES
    used = len(msgspec.msgpack.encode(record.frame))
    return {
        "prologue": range(record.begin, header),
        "header": range(header, header + used),
        "payload": range(record.offset, record.offset + record.length),
    }


@pytest.mark.parametrize("region", ["prologue", "header", "payload"])
def test_a_flipped_bit_in_the_middle_ends_the_chain_there_and_all_before_is_used(tmp_path: Path, region: str) -> None:
    tier = a_log(tmp_path, 4)
    whole = bytes(tier.get(NAME))
    second = scan(tier, START, RANK, RUN).records[1]
    for place in regions(second)[region][:: 1 if region != "payload" else 97]:
        for bit in (1, 128):
            changed = bytearray(whole)
            changed[place] ^= bit
            change(tier, changed)
            log = read_log(tier, START, RANK, RUN)
            assert found(log) == [101], (place, bit)
            assert log.end == second.begin and not log.torn and f"damage at byte {second.begin}" in log.problem
    with pytest.raises(Damaged, match="damage at byte"):
        a_writer(tier)
    assert tier.get(NAME) == changed, "a writer cut off what it should have left to others"


@given(st.integers(0, 10**9), st.integers(0, 7))
def test_a_flipped_bit_anywhere_never_shows_other_bytes_than_were_written(
    tmp_path_factory: pytest.TempPathFactory, place: int, bit: int
) -> None:
    tier = a_log(tmp_path_factory.mktemp("log"), 3, 2)
    changed = bytearray(tier.get(NAME))
    changed[place % len(changed)] ^= 1 << bit
    change(tier, changed)
    steps = found(read_log(tier, START, RANK, RUN))
    assert steps == list(range(101, 101 + len(steps)))


def test_a_damaged_layout_leaves_no_record(tmp_path: Path) -> None:
    tier = a_log(tmp_path)
    whole = bytearray(tier.get(NAME))
    whole[BLOCK + 50] ^= 1
    change(tier, whole)
    for read in (read_log, scan):
        log = read(tier, START, RANK, RUN)
        assert log.records == [] and log.layout is None and log.end == 0 and not log.torn and log.problem


def test_a_file_under_another_name_or_with_another_layout_than_it_says_has_no_record(tmp_path: Path) -> None:
    tier = a_log(tmp_path)
    tier.rename_folder(log_folder(START), log_folder(START - 1))
    log = read_log(tier, START - 1, RANK, RUN)
    assert log.records == [] and not log.torn and "a layout of step 100" in log.problem
    other = lay_out([], msgspec.structs.replace(INFO, rank=0), 100)
    strange = lay_out([], INFO, 100).header.replace(b'"U8"', b'"U9"')
    for place, (header, digest, reason) in enumerate(
        [
            (other.header, other.digest, "not the one that its frame names"),
            (LAYOUT.header, 5, "not the one that its frame names"),
            (LAYOUT.header + bytes(8), LAYOUT.digest, "unreadable"),
            (strange, xxhash.xxh3_64_intdigest(strange), "unreadable"),
            (b"", 0, "unreadable"),
        ]
    ):
        tier = DiskTier(tmp_path / str(place))
        ranges = ((0, len(header)),) if header else ()
        frame = a_frame(START, kind="layout", layout=digest, ranges=ranges)
        tier.append(NAME, encode_frame(frame, [memoryview(header)]))
        log = read_log(tier, START, RANK, RUN)
        assert log.records == [] and log.layout is None and not log.torn and reason in log.problem
    tier = DiskTier(tmp_path / "record")
    tier.append(NAME, encode_frame(*a_record(START)))
    assert "the first frame is a record" in read_log(tier, START, RANK, RUN).problem


def test_swapped_frames_end_the_chain_where_they_were_swapped(tmp_path: Path) -> None:
    tier = a_log(tmp_path, 4)
    whole = bytes(tier.get(NAME))
    r = scan(tier, START, RANK, RUN).records
    for a, b in ((1, 2), (2, 3)):
        swapped = whole[: r[a].begin] + whole[r[b].begin : r[b].end] + whole[r[a].begin : r[a].end] + whole[r[b].end :]
        change(tier, swapped)
        log = read_log(tier, START, RANK, RUN)
        assert found(log) == [101, 102][:a] and not log.torn and "not where it was written" in log.problem
    change(tier, whole[: r[1].begin] + whole[r[1].end :])  # a frame is missing
    assert found(read_log(tier, START, RANK, RUN)) == [101]
    change(tier, whole + whole[r[3].begin :])  # one is there twice
    log = read_log(tier, START, RANK, RUN)
    assert found(log) == [101, 102, 103, 104] and "a record of step 104 does not follow" in log.problem


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"run": "c" * 32}, "of run cccc"),
        ({"rank": 2}, "of rank 2"),
        ({"world": 5}, "another layout"),
        ({"layout": 7}, "another layout"),
        ({"kind": "layout"}, "a layout of step 105 does not follow"),
        ({"step": 106}, "a record of step 106 does not follow"),
        ({"ranges": ((0, 10), (LAYOUT.total_bytes - 4999, 5000))}, "beyond its image"),
        ({"step": 10**10}, "unreadable header"),
        ({"rank": -1}, "unreadable header"),
        ({"run": "../../etc"}, "unreadable header"),
        ({"ranges": ((-5, 10), (BASE, 5000))}, "unreadable header"),
        ({"ranges": ((BASE, 10), (BASE + 9, 5000))}, "come before"),
        ({"ranges": ((BASE, 10), (BASE + 10, 0), (BASE + 10, 5000))}, "unreadable header"),
        ({"ranges": ((BASE, 10),)}, "5010 bytes for ranges of 10"),
    ],
    ids=str,
)
def test_a_frame_that_does_not_belong_here_ends_the_chain(tmp_path: Path, other: Any, reason: str) -> None:
    tier = a_log(tmp_path)
    header = msgspec.msgpack.decode(msgspec.msgpack.encode(a_frame(105))) | other
    log = with_header(tier, msgspec.msgpack.encode(header))
    assert reason in log.problem
    assert found(log) == [101, 102, 103, 104] and not log.torn


def with_header(tier: DiskTier, header: bytes, lengths: tuple[int, int] | None = None) -> LogRead:
    """The log after a frame with this header, its checksum right, and perhaps lengths that are not its own."""
    header_bytes, payload_bytes = lengths or (len(header), 5010)
    fields = frames._PROLOGUE.pack(
        frames.MAGIC, header_bytes, payload_bytes, tier.size(NAME), xxhash.xxh3_64_intdigest(content(105))
    )
    head = fields + struct.pack("<Q", xxhash.xxh3_64_intdigest(fields + header)) + header
    data = head.ljust(BLOCK, b"\0") + content(105).ljust(2 * BLOCK, b"\0")
    tier.append(NAME, [memoryview(data)])
    return read_log(tier, START, RANK, RUN)


@pytest.mark.parametrize(
    "lengths", [(2**64 - 1, 5010), (2**63, 5010), (20 << 20, 5010), (300, 2**64 - 1), (300, 2**40), (0, 0)], ids=str
)
def test_absurd_lengths_are_refused_and_nothing_is_allocated_for_them(tmp_path: Path, lengths: tuple[int, int]) -> None:
    tier = a_log(tmp_path)
    good = msgspec.msgpack.encode(a_frame(105))
    if lengths == (0, 0):
        with pytest.raises(NewerFormat, match="no format"):
            with_header(tier, b"", lengths)
        return
    lengths = (len(good), lengths[1]) if lengths[0] == 300 else lengths
    end = tier.size(NAME)
    log = with_header(tier, good, lengths)
    assert found(log) == [101, 102, 103, 104] and log.problem
    if lengths[0] > len(good):
        with pytest.raises(frames.Bad, match="claims a header"):
            frames.read_frame(tier, NAME, end, 2**64)  # nor in a file that has so many


def test_a_payload_longer_than_the_file_is_torn_however_long_it_claims_to_be(tmp_path: Path) -> None:
    tier = a_log(tmp_path)
    wide = a_frame(105, ranges=((0, 2**52),))
    log = with_header(tier, msgspec.msgpack.encode(wide), (len(msgspec.msgpack.encode(wide)), 2**52))
    assert found(log) == [101, 102, 103, 104] and log.torn


def test_a_newer_format_is_named_and_nothing_is_guessed(tmp_path: Path) -> None:
    good = msgspec.msgpack.decode(msgspec.msgpack.encode(a_frame(105)))
    newer = frames.GAPS_FORMAT + 1
    for place, header in enumerate((good | {"format": newer}, {k: v for k, v in good.items() if k != "format"})):
        tier = a_log(tmp_path / str(place))
        with pytest.raises(NewerFormat, match="upgrade"):
            with_header(tier, msgspec.msgpack.encode(header))
        with pytest.raises(NewerFormat):
            cut_after(tier, 102, [RANK], RUN)
        assert tier.size(NAME) > 4 * 3 * BLOCK
    tier = a_log(tmp_path / "more")
    assert "none of ours" in with_header(tier, msgspec.msgpack.encode(good | {"more": 1})).problem


# -- gaps


INDICES = np.arange(100, 1300, 3, dtype="<i4")
GAPS = to_gaps(INDICES.data.cast("B"), 4) or b""
GAPPED: dict[str, Any] = {
    "format": 2, "ranges": ((BASE, 10), (BASE + 100, INDICES.nbytes)), "gaps": ((BASE + 100, 4, len(GAPS)),)
}  # fmt: skip


def test_a_frame_with_gaps_is_appended_read_and_cut_like_any_other(tmp_path: Path) -> None:
    tier = a_log(tmp_path)
    a_writer(tier).append(
        [(a_frame(step, **GAPPED), [memoryview(b"ten bytes "), memoryview(GAPS)]) for step in (105, 106)]
    )
    log = read_log(tier, START, RANK, RUN)
    assert not log.problem and [record.frame.format for record in log.records] == [1, 1, 1, 1, 2, 2]
    assert log.payload(log.records[-1]) == b"ten bytes " + GAPS
    a_writer(tier).append([a_record(107)])
    assert read_log(tier, START, RANK, RUN).last == 107
    cut_after(tier, 105, [RANK], RUN)
    assert read_log(tier, START, RANK, RUN).last == 105


def test_a_file_that_begins_with_gaps_has_a_layout_as_always(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path)
    a_writer(tier).append([(a_frame(101, **GAPPED), [memoryview(b"ten bytes "), memoryview(GAPS)])])
    layout = frames.read_frame(tier, NAME, 0, tier.size(NAME)).frame
    assert (layout.kind, layout.format, layout.gaps) == ("layout", 1, ())
    assert read_log(tier, START, RANK, RUN).last == 101


def test_a_frame_without_gaps_is_spelled_as_it_was_before_there_were_any() -> None:
    """Logs of the Everstep that knew none are read, and it reads those of this one that have none."""
    spelled = {
        "format": 1, "run": RUN, "generation": "b" * 32, "step": 105, "rank": RANK, "world": 4, "cut_time": 1.5,
        "kind": "record", "layout": LAYOUT.digest, "ranges": [[BASE, 10], [BASE + 100, 5000]],
    }  # fmt: skip
    assert msgspec.msgpack.encode(a_frame(105)) == msgspec.msgpack.encode(spelled)
    assert frames._decode(msgspec.msgpack.encode(spelled), DiskTier(Path("/nowhere")), NAME) == a_frame(105)


def test_an_everstep_that_knows_no_gaps_refuses_them_as_newer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it looks at is the number alone, as it always did."""
    tier = a_log(tmp_path)
    a_writer(tier).append([(a_frame(105, **GAPPED), [memoryview(b"ten bytes "), memoryview(GAPS)])])
    monkeypatch.setattr(frames, "GAPS_FORMAT", FORMAT)
    with pytest.raises(NewerFormat, match="format 2, and this Everstep reads up to 1; upgrade it"):
        read_log(tier, START, RANK, RUN)


@pytest.mark.parametrize(
    "other",
    [
        {"format": 1}, {"gaps": ()}, {"gaps": ((BASE, 4, 5),)}, {"gaps": ((BASE + 100, 8, 5), (BASE + 100, 8, 5))},
        {"gaps": ((BASE + 100, 4, INDICES.nbytes),)}, {"gaps": ((BASE + 100, 2, 5),)}, {"gaps": ((BASE + 104, 4, 5),)},
        {"gaps": ((BASE + 100, 4, 0),)}, {"gaps": ((BASE + 100, 4, -5),)},
    ],
    ids=str,
)  # fmt: skip
def test_a_header_whose_gaps_cannot_be_is_refused(tmp_path: Path, other: dict[str, Any]) -> None:
    """A sum over it may have been made anew."""
    tier = a_log(tmp_path)
    good = msgspec.msgpack.decode(msgspec.msgpack.encode(a_frame(105, **GAPPED)))
    log = with_header(tier, msgspec.msgpack.encode(good | other), (len(msgspec.msgpack.encode(good | other)), 5010))
    assert found(log) == [101, 102, 103, 104] and ("header" in log.problem), log.problem


def test_a_medium_that_cannot_be_read_ends_the_chain_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = a_log(tmp_path)
    records = scan(tier, START, RANK, RUN).records
    real = DiskTier.read

    def read(self: DiskTier, name: str, offset: int, into: memoryview) -> int:
        if offset == bad:
            raise TierFailed(errno.EIO, "disk failed")
        return real(self, name, offset, into)

    monkeypatch.setattr(DiskTier, "read", read)
    for bad in (records[2].begin, records[2].offset):
        log = read_log(tier, START, RANK, RUN)
        assert found(log) == [101, 102] and "disk failed" in log.problem and not log.torn
    bad, size = records[2].begin, tier.size(NAME)
    with pytest.raises(TierFailed):
        cut_after(tier, 103, [RANK], RUN)  # a disk that is away for a moment costs no record
    assert tier.size(NAME) == size


def test_what_cannot_be_read_behind_a_torn_frame_is_not_left_by_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = a_log(tmp_path)
    last = scan(tier, START, RANK, RUN).records[-1]
    os.truncate(tier.root / NAME, last.end - BLOCK)
    real = DiskTier.read

    def read(self: DiskTier, name: str, offset: int, into: memoryview) -> int:
        if offset > last.begin:
            raise TierFailed(errno.EIO, "disk failed")
        return real(self, name, offset, into)

    monkeypatch.setattr(DiskTier, "read", read)
    log = scan(tier, START, RANK, RUN)
    assert log.last == 103 and not log.torn


# -- a full disk


def test_records_before_a_full_disk_stay_readable_and_the_log_goes_on_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = a_log(tmp_path)
    writer, real, left = a_writer(tier), os.pwrite, [2 * BLOCK]

    def pwrite(descriptor: int, data: memoryview, offset: int) -> int:
        """A disk that has room for two blocks more, and then takes no truncation either."""
        if not left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = real(descriptor, data[: left[0]], offset)
        left[0] -= count
        return count

    def no_truncation(*arguments: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    for undo in (True, False):
        left[0] = 2 * BLOCK
        monkeypatch.setattr("everstep.store.disk.os.pwrite", pwrite)
        if not undo:
            monkeypatch.setattr("everstep.store.disk.os.ftruncate", no_truncation)
        with pytest.raises(NotEnoughSpace):
            writer.append([a_record(105), a_record(106)])
        monkeypatch.undo()
        assert (tier.size(NAME) == writer.end) is undo
        assert found(read_log(tier, START, RANK, RUN)) == [101, 102, 103, 104]
    writer.append([a_record(105), a_record(106)])
    log = read_log(tier, START, RANK, RUN)
    assert found(log) == list(range(101, 107)) and not log.problem


def test_a_writer_whose_file_was_taken_away_does_not_begin_it_in_the_middle(tmp_path: Path) -> None:
    tier = a_log(tmp_path)
    writer = a_writer(tier)
    tier.delete(NAME)
    with pytest.raises(Damaged, match="0 bytes instead of"):
        writer.append([a_record(105)])
    assert tier.names(log_folder(START)) == []


# -- going on from an older step


def two_segments(root: Path) -> DiskTier:
    tier = a_log(root, 4)  # 101 to 104
    a_writer(tier, 104).append([a_record(step) for step in (105, 106, 107)])
    return tier


@pytest.mark.parametrize(
    ("step", "older", "newer"),
    [
        (107, [101, 102, 103, 104], [105, 106, 107]),
        (106, [101, 102, 103, 104], [105, 106]),
        (104, [101, 102, 103, 104], None),
        (102, [101, 102], None),
        (100, None, None),
        (None, None, None),
    ],
)
def test_all_records_beyond_a_step_go_and_no_other(
    tmp_path: Path, step: int | None, older: list[int] | None, newer: list[int] | None
) -> None:
    tier = two_segments(tmp_path)
    tier.append(log_name(104, 0), [memoryview(b"of another rank")])
    touched = cut_after(tier, step, [RANK], RUN)
    for start, steps in ((START, older), (104, newer)):
        assert (log_name(start, RANK) in tier.names(log_folder(start))) is (steps is not None)
        if steps is not None:
            log = read_log(tier, start, RANK, RUN)
            assert found(log) == steps and not log.problem
    assert touched == [
        log_name(s, RANK) for s, left in ((104, newer), (100, older)) if left is None or len(left) in (2,)
    ]
    assert segments(tier) == ([START, 104] if older else [104])
    assert tier.names(log_folder(104))[0] == log_name(104, 0)
    assert cut_after(tier, step, [RANK], RUN) == []


def test_going_on_cuts_off_what_a_crash_or_damage_left(tmp_path: Path) -> None:
    tier = a_log(tmp_path / "torn")
    change(tier, bytes(tier.get(NAME))[:-BLOCK])
    assert cut_after(tier, 104, [RANK], RUN) == [NAME]
    log = read_log(tier, START, RANK, RUN)
    assert found(log) == [101, 102, 103] and not log.problem
    tier = a_log(tmp_path / "damaged")
    whole = bytearray(tier.get(NAME))
    whole[scan(tier, START, RANK, RUN).records[1].begin + 20] ^= 1
    change(tier, whole)
    assert cut_after(tier, 104, [RANK], RUN) == [NAME]
    assert found(read_log(tier, START, RANK, RUN)) == [101] and not read_log(tier, START, RANK, RUN).problem


def test_a_cut_killed_before_any_operation_leaves_a_chain_without_a_gap_and_is_finished_by_the_next(
    tmp_path: Path,
) -> None:
    for operation in range(50):
        root = tmp_path / str(operation)
        two_segments(root)
        cut: Callable[[Any], object] = lambda tier: cut_after(tier, 102, [RANK], RUN)  # noqa: E731
        killed = testing._killed_before(operation, lambda root=root: DiskTier(root), cut)  # type: ignore[misc]
        tier = DiskTier(root)
        if segments(tier) == [START, 104] and tier.names(log_folder(104)):
            assert found(read_log(tier, START, RANK, RUN)) == [101, 102, 103, 104], "the older segment went first"
        cut_after(tier, 102, [RANK], RUN)
        assert found(read_log(tier, START, RANK, RUN)) == [101, 102]
        assert tier.names(log_folder(104)) == []
        if not killed:
            assert operation > 3
            return
    raise AssertionError("never got through")
