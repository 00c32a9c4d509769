"""The log of a run: what the optimizers consumed, step after step, at the end of a file per rank.

A segment is a folder of such files, named after the step after which it begins. A file holds a layout, and then the
records of the following steps, without a gap. What a reader finds good, from the first frame on, is the chain; the
first frame that is not good ends it, whether a crash tore it or a medium damaged it.

It does not know what a gradient is, nor which base a chain belongs to.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Collection, Sequence

import msgspec
import xxhash

from everstep.errors import Damaged, Mismatch, NewerFormat, TierFailed
from everstep.image import FORMAT, ImageLayout, parse
from everstep.store.frame import (
    Bad,
    Record,
    check_payload,
    check_payloads,
    encode_frame,
    followed,
    format_of,
    read_frame,
)
from everstep.store.tier import Tier
from everstep.types import Frame, ImageInfo, learnt

_FOLDER = re.compile(r"log-(\d{10})")
_FILE = re.compile(r"log-\d{10}/rank-(\d{5})\.log")


@learnt
class _Place(msgspec.Struct):
    data_offsets: tuple[int, int]


def log_folder(start: int) -> str:
    return f"log-{start:010d}"


def log_name(start: int, rank: int) -> str:
    return f"{log_folder(start)}/rank-{rank:05d}.log"


def rank_of(name: str) -> int | None:
    """Whose log a file is, if it is one."""
    match = _FILE.fullmatch(name)
    return int(match[1]) if match else None


def ranks_of(tier: Tier) -> set[int]:
    """Whose logs are there."""
    named = (rank_of(name) for start in segments(tier) for name in tier.names(log_folder(start)))
    return {rank for rank in named if rank is not None}


def segments(tier: Tier) -> list[int]:
    """The steps after which the segments begin, ascending."""
    return [int(m[1]) for name in tier.folders() if (m := _FOLDER.fullmatch(name))]


def starts(tier: Tier, rank: int) -> list[int]:
    """The steps after which a rank's segments begin, ascending."""
    return [start for start in segments(tier) if log_name(start, rank) in tier.names(log_folder(start))]


# -- reading


class LogRead:
    """What is good of one rank's file: `records` without a gap from `start` + 1 on, and why there are no more."""

    def __init__(self, tier: Tier, start: int, rank: int) -> None:
        self.name, self.start, self.rank = log_name(start, rank), start, rank
        self.layout: ImageLayout | None = None  # what the bytes of every record are
        self.info: ImageInfo | None = None  # whose they are
        self.records: list[Record] = []
        self.end = 0  # bytes of the good part
        self.problem = ""  # why it ended; empty if the file ends there
        self.torn = False  # whether the problem is one that a crash leaves
        self._tier = tier
        self._view: memoryview | None = None

    @property
    def last(self) -> int:
        """The step of the last good record, or the start if there is none."""
        return self.start + len(self.records)

    def payload(self, record: Record) -> memoryview:
        """The bytes of a record's ranges, one after the other; read only, in the page cache and not in our memory."""
        if self._view is None:
            self._view = self._tier.view(self.name)
        return self._view[record.offset : record.offset + record.length]

    def _fail(self, bad: Bad, size: int) -> None:
        self.torn = bad.torn and not followed(self._tier, self.name, self.end, size)
        what = "a torn tail" if self.torn else "damage"
        self.problem = f"{what} at byte {self.end} of {self.name}, after step {self.last}: {bad}"


def read_log(tier: Tier, start: int, rank: int, run: str) -> LogRead:
    """One rank's file, every byte checked. FileNotFoundError if it is not there, NewerFormat if it is not for us."""
    log = scan(tier, start, rank, run)
    good, bad = check_payloads(tier, log.name, log.records)
    if bad is not None:
        log.end = log.records[good].begin
        del log.records[good:]
        log._fail(bad, tier.size(log.name))
    return log


def scan(tier: Tier, start: int, rank: int, run: str) -> LogRead:
    """The same without looking at the bytes of the records: only their headers and the layout are checked."""
    log = LogRead(tier, start, rank)
    size = tier.size(log.name)
    try:
        _walk(log, tier, run, size)
    except Bad as bad:
        log._fail(bad, size)
    except TierFailed as error:
        log.problem = f"byte {log.end} of {log.name} or what follows, after step {log.last}, cannot be read: {error}"
    return log


def _walk(log: LogRead, tier: Tier, run: str, size: int) -> None:
    while log.end < size:
        record = read_frame(tier, log.name, log.end, size)
        frame = record.frame
        if (frame.run, frame.rank) != (run, log.rank):
            raise Bad(f"a frame of rank {frame.rank} of run {frame.run}")
        if log.layout is None or log.info is None:
            log.layout, log.info = _layout(log, tier, record)
        else:
            _check_next(frame, log.last + 1, log.layout, log.info)
            log.records.append(record)
        log.end = record.end


def _layout(log: LogRead, tier: Tier, record: Record) -> tuple[ImageLayout, ImageInfo]:
    """The layout in the first frame of a file."""
    frame = record.frame
    if frame.kind != "layout" or frame.step != log.start:
        raise Bad(f"the first frame is a {frame.kind} of step {frame.step}")
    check_payload(tier, log.name, record)
    header = memoryview(bytearray(record.length))
    tier.read(log.name, record.offset, header)
    try:
        layout, info = parse(header, _image_bytes(header), file=log.name)
    except NewerFormat:
        raise
    except Damaged as error:
        raise Bad(f"the layout is unreadable: {error.reason}") from None
    whose = (info.run, info.rank, info.world, layout.digest, len(layout.header))
    if whose != (frame.run, frame.rank, frame.world, frame.layout, record.length):
        raise Bad("the layout is not the one that its frame names")
    return layout, info


def _image_bytes(header: memoryview) -> int:
    """How long the images are that have this header."""
    try:
        (size,) = struct.unpack_from("<Q", header)
        table = msgspec.json.decode(bytes(header[8:]), type=dict[str, msgspec.Raw])
        ends = [
            msgspec.json.decode(raw, type=_Place).data_offsets[1] for key, raw in table.items() if key != "__metadata__"
        ]
    except (struct.error, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Damaged(f"not a header of an image, {error}") from None
    return int(8 + size + max(ends, default=0))


def _check_next(frame: Frame, step: int, layout: ImageLayout, info: ImageInfo) -> None:
    """Bad unless this is the record of the next step."""
    if (frame.kind, frame.step) != ("record", step):
        raise Bad(f"a {frame.kind} of step {frame.step} does not follow")
    if (frame.layout, frame.world) != (layout.digest, info.world):
        raise Bad(f"step {step} has another layout than its file")
    if frame.ranges and sum(frame.ranges[-1]) > layout.total_bytes:
        raise Bad(f"step {step} has bytes beyond its image of {layout.total_bytes}")


# -- writing


class LogWriter:
    """Appends to one rank's file of a segment; every `append` is one group commit.

    A file that is there already is gone on with: a torn tail is cut off. Damaged if it has other faults, Mismatch if it
    has another layout: such a file is left as it is, and the log goes on in another segment.
    """

    def __init__(self, tier: Tier, start: int, rank: int, run: str, header: bytes) -> None:
        self._tier, self._run, self._header, self._rank = tier, run, header, rank
        self.layout = int(xxhash.xxh3_64_intdigest(header))
        self.name, self.start = log_name(start, rank), start
        self.last, self.end = start, 0  # the newest step in the file, and the bytes up to there
        try:
            found = read_log(tier, start, rank, run)
        except FileNotFoundError:
            return
        if found.problem and not found.torn:
            raise Damaged(found.problem, tier=tier.name, file=self.name, rank=rank)
        if found.layout is not None and found.layout.header != header:
            raise Mismatch(f"{self.name} holds records of another layout")
        self.last, self.end = found.last, found.end
        tier.cut(self.name, self.end)

    def append(self, records: Sequence[tuple[Frame, Sequence[memoryview]]]) -> None:
        """Make records of the next steps durable, with one flush for all. After an error they may be tried again."""
        for step, (frame, _) in enumerate(records, self.last + 1):
            mine = (format_of(frame.gaps), self._run, self._rank, "record", step, self.layout)
            if (frame.format, frame.run, frame.rank, frame.kind, frame.step, frame.layout) != mine:
                raise ValueError(f"not the record of step {step} in {self.name}: {frame}")
        if not records:
            return
        self._cut_leftovers()
        parts = [] if self.end else self._layout_frame(records[0][0])
        for frame, payload in records:
            parts += encode_frame(frame, payload, synced=self.end)
        self._tier.append(self.name, parts)
        self.last, self.end = records[-1][0].step, self.end + sum(map(len, parts))

    def _layout_frame(self, first: Frame) -> list[memoryview]:
        ranges = ((0, len(self._header)),)
        frame = msgspec.structs.replace(
            first, format=FORMAT, kind="layout", step=self.start, ranges=ranges, gaps=()
        )  # fmt: skip
        return encode_frame(frame, [memoryview(self._header)])

    def _cut_leftovers(self) -> None:
        """Take away what a failed append could not take back itself."""
        try:
            size = self._tier.size(self.name)
        except FileNotFoundError:
            size = 0
        if size < self.end:
            raise Damaged(f"{size} bytes instead of {self.end}", tier=self._tier.name, file=self.name, rank=self._rank)
        if size > self.end:
            self._tier.cut(self.name, self.end)


def cut_after(tier: Tier, step: int | None, ranks: Collection[int], run: str, generation: str = "") -> list[str]:
    """Remove all records beyond a step (None: all records) from these ranks' files, and what ends their chains.

    Those of `generation` stay: the life that goes on from this step wrote them, and may only have lost its keeper.
    Returns the names of the files that became shorter or went. The newest segments go first, so that whatever a crash
    leaves is a shorter chain, and never one with a gap.
    """
    kept = {}
    for start in reversed(segments(tier)):
        there = set(tier.names(log_folder(start)))
        for rank in sorted(ranks):
            if log_name(start, rank) in there:
                kept[start, rank] = _good_until(tier, start, rank, run, -1 if step is None else step, generation)
    touched = []
    for (start, rank), length in kept.items():
        name = log_name(start, rank)
        if length == tier.size(name):
            continue
        if length:
            _shorten(tier, name, length)
        else:
            tier.delete(name)
            if not tier.names(log_folder(start)):
                tier.delete_folder(log_folder(start))
        touched.append(name)
    return touched


def strangers(tier: Tier, step: int | None, run: str, generation: str) -> set[int]:
    """The ranks that have records of other lives beyond a step (None: of any step)."""
    after, found = -1 if step is None else step, set()
    for rank in ranks_of(tier):
        begins = starts(tier, rank)
        for start, following in zip(begins, [*begins[1:], None], strict=True):
            if following is not None and following <= after:
                continue
            frames = [one.frame for one in scan(tier, start, rank, run).records]
            found |= {rank for one in frames if one.step > after and one.generation != generation}
    return found


def _shorten(tier: Tier, name: str, length: int) -> None:
    """What cannot be cut is made anew: a crash in between loses a part of the log that something newer follows."""
    if tier.traits.appends:
        tier.cut(name, length)
        return
    kept = tier.get(name)[:length]
    tier.delete(name)
    tier.append(name, [kept])


def _good_until(tier: Tier, start: int, rank: int, run: str, step: int, generation: str) -> int:
    """Bytes of a file up to a step, or up to where its chain ends; 0 if no record is among them."""
    log = LogRead(tier, start, rank)
    try:
        _walk(log, tier, run, tier.size(log.name))
    except Bad:
        pass  # nobody can read beyond, so nothing there may come back either
    kept = [one for one in log.records if one.frame.step <= step or one.frame.generation == generation]
    return kept[-1].end if kept and len(kept) == kept[-1].frame.step - start else 0
