"""One tier, read: which parts, records and values of a run it still has, and each of them with every byte checked."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from everstep.errors import Damaged, EverstepError
from everstep.image import ImageLayout
from everstep.store.blocks import room_for
from everstep.store.log import LogRead, log_folder, log_name, rank_of, read_log, scan, segments
from everstep.store.manifest import (
    Ranges,
    check_chunks,
    committed_steps,
    parity_folder,
    parity_names,
    parity_steps,
    read_commit,
    read_data,
    read_part,
    read_record,
    read_single_part,
    read_some,
    step_folder,
    step_folders,
    values_folder,
    values_steps,
)
from everstep.store.tier import Tier
from everstep.types import (
    Commit,
    Gaps,
    Holding,
    ImageInfo,
    ParityHolding,
    ParityRecord,
    Part,
    Piece,
    Records,
    Rejection,
    Room,
    Source,
)

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class RecordImage:
    """What one rank consumed in one step. `data` holds some ranges of the image, one after the other.

    Some of them may be there as gaps; what these stand for is made when it is first asked for, and kept.
    """

    layout: ImageLayout
    info: ImageInfo
    data: memoryview
    ranges: tuple[tuple[int, int], ...]
    gaps: Gaps = ()
    _made: dict[int, memoryview] = field(default_factory=dict, repr=False, compare=False)  # by offset

    def bytes_at(self, offset: int, length: int) -> memoryview:
        at, gaps = 0, {begin: (item, stored) for begin, item, stored in self.gaps}
        for begin, size in self.ranges:
            item, stored = gaps.get(begin, (0, size))
            if begin <= offset and offset + length <= begin + size:
                held = self.data[at : at + stored]
                return (self._integers(held, begin, item, size) if item else held)[offset - begin :][:length]
            at += stored
        raise Damaged(f"the record of rank {self.info.rank} lacks the bytes at {offset}")

    def _integers(self, held: memoryview, begin: int, item: int, size: int) -> memoryview:
        if begin not in self._made:
            from everstep.store.gaps import from_gaps

            self._made[begin] = from_gaps(held, item, size)
        return self._made[begin]

    def make_whole(self) -> RecordImage:
        """Make all that gaps stand for, so that what is bad is found before any of it is used."""
        for begin, item, _ in self.gaps:
            self.bytes_at(begin, item)
        return self

    def tensor(self, piece: Piece) -> Tensor:
        from everstep.recover.assemble import tensor_in

        return tensor_in(self.bytes_at(len(self.layout.header) + piece.offset, piece.length), piece)

    def named(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names begin so, without that beginning."""
        return {
            piece.name.removeprefix(prefix): self.tensor(piece)
            for piece in self.layout.pieces
            if piece.name.startswith(prefix)
        }

    def extras(self) -> bytes:
        begin = self.layout.extras_offset
        (length,) = struct.unpack("<Q", self.bytes_at(begin, 8))
        return bytes(self.bytes_at(begin + 8, length))


class Shelf:
    """What a tier has of one run. `commits`: whether a part counts only if a commit names it."""

    def __init__(
        self, tier: Tier, run: str, *, source: Source, node: str, everywhere: bool = False, commits: bool = True
    ) -> None:
        self.tier, self.source, self.run = tier, source, run
        self._everywhere, self._commits = everywhere, commits
        self._node = "" if everywhere else node  # what all nodes see counts once
        self._logs: dict[tuple[int, int], LogRead] = {}  # start, rank -> what is good of it

    # -- what there is

    def holdings(self, rejections: list[Rejection]) -> Iterator[Holding]:
        if not self._commits:
            for step in step_folders(self.tier):
                yield from self._in_folder(step, step_folder(step), rejections)
            return
        for step in committed_steps(self.tier):
            try:
                commit = read_commit(self.tier, step, self.run)
            except (EverstepError, OSError) as error:
                rejections.append(self._rejection(step, str(error)))
                continue
            for ref in commit.parts:
                try:
                    yield self._holding(read_part(self.tier, commit, ref.rank))
                except (EverstepError, OSError) as error:
                    rejections.append(self._rejection(step, str(error)))

    def values(self, rejections: list[Rejection]) -> Iterator[Holding]:
        for step in values_steps(self.tier):
            yield from self._in_folder(step, values_folder(step), rejections)

    def records(self, rejections: list[Rejection]) -> Iterator[Records]:
        for start in segments(self.tier):
            for name in self.tier.names(log_folder(start)):
                rank = rank_of(name)
                if rank is None:
                    continue
                try:
                    log = scan(self.tier, start, rank, self.run)
                except (EverstepError, OSError) as error:
                    rejections.append(self._rejection(start + 1, str(error)))
                    continue
                if log.problem:
                    rejections.append(self._rejection(log.last + 1, log.problem, certain=not log.torn))
                if log.records:
                    newest = log.records[-1].frame
                    yield Records(
                        source=self.source, node=self._node, rank=newest.rank, world=newest.world, first=start + 1,
                        last=log.last, bytes=newest.payload_bytes, cut_time=newest.cut_time,
                        has_values=log.info is not None and log.info.has_values, everywhere=self._everywhere,
                    )  # fmt: skip

    def parities(self, rejections: list[Rejection]) -> Iterator[ParityHolding]:
        for step in parity_steps(self.tier):
            for name in self.tier.names(parity_folder(step)):
                if not name.endswith(".json"):
                    continue
                try:
                    record = read_record(self.tier, name, ParityRecord, step=step)
                    if (record.run, record.step, parity_names(step, record.member)[1]) != (self.run, step, name):
                        raise Damaged("parity of another run or step", tier=self.tier.name, file=name, step=step)
                    yield ParityHolding(node=self._node, record=record)
                except (EverstepError, OSError) as error:
                    rejections.append(self._rejection(step, str(error), certain=False))

    def _in_folder(self, step: int, folder: str, rejections: list[Rejection]) -> Iterator[Holding]:
        """Parts that need no commit."""
        for name in self.tier.names(folder):
            if not name.endswith(".json"):
                continue
            try:
                yield self._holding(self._part(step, int(name[-10:-5]), folder))
            except (EverstepError, OSError, ValueError) as error:
                rejections.append(self._rejection(step, str(error), certain=False))

    def _part(self, step: int, rank: int, folder: str) -> Part:
        return read_single_part(self.tier, step, rank, self.run, lambda _: folder)

    def _holding(self, part: Part) -> Holding:
        return Holding(
            source=self.source, node=self._node, step=part.step, rank=part.rank, world=part.world,
            generation=part.generation, bytes=part.bytes, cut_time=part.cut_time, replica=part.replica,
            everywhere=self._everywhere,
        )  # fmt: skip

    def _rejection(self, step: int, reason: str, *, certain: bool = True) -> Rejection:
        return Rejection(step=step, source=self.source, reason=reason, certain=certain)

    # -- and its bytes

    def image(self, holding: Holding, room: Room = room_for) -> memoryview:
        return read_data(self.tier, self._manifest(holding), room=room)

    def image_of(self, holding: Holding, ranges: Ranges) -> tuple[memoryview, int]:
        """As much of it as is needed, and how many bytes were read for it."""
        return read_some(self.tier, self._manifest(holding), ranges)

    def pieces(self, holding: Holding) -> tuple[Piece, ...]:
        """What its manifest says that it holds."""
        return self._manifest(holding).pieces

    def _manifest(self, holding: Holding) -> Part:
        if self._commits:
            commit: Commit = read_commit(self.tier, holding.step, self.run)
            return read_part(self.tier, commit, holding.rank)
        return self._part(holding.step, holding.rank, step_folder(holding.step))

    def values_image(self, holding: Holding) -> memoryview:
        return read_data(self.tier, self._part(holding.step, holding.rank, values_folder(holding.step)), values_folder)

    def parity(self, holding: ParityHolding) -> memoryview:
        record = holding.record
        name, _ = parity_names(record.step, record.member)

        def bad(reason: str, chunk: int | None = None) -> Damaged:
            return Damaged(reason, tier=self.tier.name, step=record.step, file=name, chunk=chunk)

        try:
            data = self.tier.get(name)
        except FileNotFoundError:
            raise bad("the parity is missing") from None
        if len(data) != record.bytes:
            raise bad(f"{len(data)} bytes instead of {record.bytes}")
        check_chunks(data, record.chunks, record.chunk_bytes, bad)
        return data

    def record(self, records: Records, step: int) -> RecordImage:
        for start in reversed(segments(self.tier)):
            if start < step and log_name(start, records.rank) in self.tier.names(log_folder(start)):
                log = self._logs.get((start, records.rank)) or read_log(self.tier, start, records.rank, self.run)
                self._logs[start, records.rank] = log
                if step <= log.last and log.layout is not None and log.info is not None:
                    found = log.records[step - start - 1]
                    frame, data = found.frame, log.payload(found)
                    return RecordImage(log.layout, log.info, data, frame.ranges, frame.gaps)
                if log.problem:
                    raise Damaged(log.problem, tier=self.tier.name, step=step, rank=records.rank)
        raise Damaged("its record is no longer there", tier=self.tier.name, step=step, rank=records.rank)
