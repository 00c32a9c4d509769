"""What is left: every part of every step that this node can still read, in memory and on disk, and what it cannot."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import msgspec
import xxhash

from everstep import image
from everstep.capture.arena import Arena, arena_root, find_arenas
from everstep.errors import Damaged, EverstepError
from everstep.image import CHUNK_BYTES, ImageLayout
from everstep.keeper.client import inherited
from everstep.store.disk import DiskTier
from everstep.store.log import LogRead, log_folder, log_name, rank_of, read_log, scan, segments
from everstep.store.manifest import (
    check_chunks,
    committed_steps,
    read_commit,
    read_data,
    read_part,
    read_record,
    read_values_part,
    values_folder,
    values_steps,
)
from everstep.topology import node_name
from everstep.types import Attempt, Holding, ImageInfo, Piece, Records, Rejection, Survey

if TYPE_CHECKING:
    from torch import Tensor

ATTEMPTS = "attempt.json"


@dataclass(frozen=True, slots=True)
class RecordImage:
    """What one rank consumed in one step. `data` holds some ranges of the image, one after the other."""

    layout: ImageLayout
    info: ImageInfo
    data: memoryview
    ranges: tuple[tuple[int, int], ...]

    def bytes_at(self, offset: int, length: int) -> memoryview:
        at = 0
        for begin, size in self.ranges:
            if begin <= offset and offset + length <= begin + size:
                return self.data[at + offset - begin : at + offset - begin + length]
            at += size
        raise Damaged(f"the record of rank {self.info.rank} lacks the bytes at {offset}")

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


class Sources:
    """Everything this node can read of one run."""

    def __init__(self, directory: Path, run: str, *, memory_path: str | None = None) -> None:
        self.tier, self.run, self.node = DiskTier(directory), run, node_name()
        self._broken: list[str] = []
        found = list(find_arenas(arena_root(memory_path), run, self._broken))
        if memory_path is not None:
            found += find_arenas(arena_root(None), run, self._broken)
        found += inherited(run)
        self.arenas = [arena for arena in found if arena.kind in ("base", "replica")]
        for arena in self.arenas:
            if arena.kind == "replica":
                arena.lock(shared=True)  # until it is closed: nobody advances what is read here
        self.rings = [arena for arena in found if arena.kind in ("log", "values")]
        self._logs: dict[tuple[int, int], LogRead] = {}  # start, rank -> what is good of it

    def survey(self) -> Survey:
        holdings = [holding for arena in self.arenas for holding in self._in_memory(arena)]
        rejections = [Rejection(step=0, source="memory", reason=reason) for reason in self._broken]
        rejections += [rejection for arena in (*self.arenas, *self.rings) for rejection in _torn(arena)]
        for step in committed_steps(self.tier):
            holdings += self._on_disk(step, rejections)
        records = [one for ring in self.rings if ring.kind == "log" for one in self._in_ring(ring)]
        records += self._logged(rejections)
        values = [one for ring in self.rings if ring.kind == "values" for one in self._in_memory(ring)]
        values += self._saved_values(rejections)
        return Survey(
            holdings=tuple(holdings), records=tuple(records), values=tuple(values), rejections=tuple(rejections),
            attempts=self.attempts(),
        )  # fmt: skip

    def _in_memory(self, arena: Arena) -> list[Holding]:
        replica = ""
        if arena.kind == "replica" and arena.seals():
            header = bytes(arena.image(0)[: image.header_bytes(arena.image(0))])
            try:
                replica = image.parse_cached(header, arena.slot_bytes, arena.place)[1].replica
            except Damaged:
                pass  # whoever fetches it will say so
        return [
            Holding(
                source="memory", node=self.node, step=seal.step, rank=arena.rank, world=arena.world,
                generation=seal.generation, bytes=seal.length, cut_time=seal.cut_time,
                checked=arena.checks(slot) is not None, replica=replica,
            )
            for slot, seal in arena.seals().items()
        ]  # fmt: skip

    def _on_disk(self, step: int, rejections: list[Rejection]) -> list[Holding]:
        found = []
        try:
            commit = read_commit(self.tier, step, self.run)
        except (EverstepError, OSError) as error:
            rejections.append(Rejection(step=step, source="disk", reason=str(error)))
            return []
        for ref in commit.parts:
            try:
                part = read_part(self.tier, commit, ref.rank)
            except (EverstepError, OSError) as error:
                rejections.append(Rejection(step=step, source="disk", reason=str(error)))
                continue
            found.append(
                Holding(
                    source="disk", node=self.node, step=step, rank=part.rank, world=part.world,
                    generation=part.generation, bytes=part.bytes, cut_time=part.cut_time, replica=part.replica,
                )
            )  # fmt: skip
        return found

    def _saved_values(self, rejections: list[Rejection]) -> Iterator[Holding]:
        for step in values_steps(self.tier):
            for name in self.tier.names(values_folder(step)):
                if not name.endswith(".json"):
                    continue
                try:
                    part = read_values_part(self.tier, step, int(name[-10:-5]), self.run)
                except (EverstepError, OSError, ValueError) as error:
                    rejections.append(Rejection(step=step, source="disk", reason=str(error), certain=False))
                    continue
                yield Holding(
                    source="disk", node=self.node, step=step, rank=part.rank, world=part.world,
                    generation=part.generation, bytes=part.bytes, cut_time=part.cut_time,
                )  # fmt: skip

    def values(self, holding: Holding, *, copy: bool = False) -> RecordImage:
        """What a step left that is too large for every record, every byte of it checked."""
        if holding.source == "memory":
            data = self._from_memory(holding, copy, [ring for ring in self.rings if ring.kind == "values"])
        else:
            part = read_values_part(self.tier, holding.step, holding.rank, self.run)
            data = read_data(self.tier, part, values_folder)
        layout, info = image.parse(data, len(data), file=f"values of rank {holding.rank}")
        if (info.run, info.rank, info.world) != (self.run, holding.rank, holding.world):
            raise Damaged("the values belong to another run or rank", step=holding.step, rank=holding.rank)
        return RecordImage(layout, info, data, ((0, len(data)),))

    def _in_ring(self, ring: Arena) -> Iterator[Records]:
        header = bytes(ring.image(0)[: image.header_bytes(ring.image(0))])
        try:
            has_values = image.parse_cached(header, ring.slot_bytes, ring.place)[1].has_values
        except Damaged:
            return  # each record says so itself
        seals = sorted(ring.seals().values(), key=lambda seal: seal.step)
        run: Records | None = None
        for seal in seals:
            if run is not None and seal.step == run.last + 1:
                run = msgspec.structs.replace(run, last=seal.step, cut_time=seal.cut_time)
                continue
            if run is not None:
                yield run
            run = Records(
                source="memory", node=self.node, rank=ring.rank, world=ring.world, first=seal.step, last=seal.step,
                bytes=seal.length, cut_time=seal.cut_time, has_values=has_values,
            )  # fmt: skip
        if run is not None:
            yield run

    def _logged(self, rejections: list[Rejection]) -> Iterator[Records]:
        for start in segments(self.tier):
            for name in self.tier.names(log_folder(start)):
                rank = rank_of(name)
                if rank is None:
                    continue
                try:
                    log = scan(self.tier, start, rank, self.run)
                except (EverstepError, OSError) as error:
                    rejections.append(Rejection(step=start + 1, source="disk", reason=str(error)))
                    continue
                if log.problem:
                    rejections.append(
                        Rejection(step=log.last + 1, source="disk", reason=log.problem, certain=not log.torn)
                    )
                if log.records:
                    newest = log.records[-1].frame
                    yield Records(
                        source="disk", node=self.node, rank=newest.rank, world=newest.world, first=start + 1,
                        last=log.last, bytes=newest.payload_bytes, cut_time=newest.cut_time,
                        has_values=log.info is not None and log.info.has_values,
                    )  # fmt: skip

    def attempts(self) -> tuple[Attempt, ...]:
        try:
            return (read_record(self.tier, ATTEMPTS, Attempt),)
        except (OSError, EverstepError):
            return ()  # it only says what to offer last, and is written again by whoever loads

    def fetch(self, holding: Holding, *, copy: bool = False) -> tuple[image.ImageLayout, ImageInfo, memoryview]:
        """One part's image, every byte of it checked. `copy`: the owner may be alive and may overwrite it."""
        if holding.source == "memory":
            data, file = self._from_memory(holding, copy, self.arenas), f"arena of rank {holding.rank}"
        else:
            commit = read_commit(self.tier, holding.step, self.run)
            data, file = read_data(self.tier, read_part(self.tier, commit, holding.rank)), f"rank {holding.rank}"
        layout, info = image.parse(data, len(data), file=file)
        if (info.run, info.rank, info.world) != (self.run, holding.rank, holding.world):
            raise Damaged("the image belongs to another run or rank", step=holding.step, rank=holding.rank, file=file)
        return layout, info, data

    def record(self, records: Records, step: int, *, copy: bool = False) -> RecordImage:
        """What one rank consumed in a step, every byte of it checked, if it comes from a disk."""
        if records.source == "memory":
            return self._from_ring(records, step, copy)
        for start in reversed(segments(self.tier)):
            if start < step and log_name(start, records.rank) in self.tier.names(log_folder(start)):
                log = self._logs.get((start, records.rank)) or read_log(self.tier, start, records.rank, self.run)
                self._logs[start, records.rank] = log
                if step <= log.last and log.layout is not None and log.info is not None:
                    found = log.records[step - start - 1]
                    return RecordImage(log.layout, log.info, log.payload(found), found.frame.ranges)
                if log.problem:
                    raise Damaged(log.problem, tier=self.tier.name, step=step, rank=records.rank)
        raise Damaged("its record is no longer there", tier=self.tier.name, step=step, rank=records.rank)

    def _from_ring(self, records: Records, step: int, copy: bool) -> RecordImage:
        for ring in self.rings:
            slot = ring.slot_of(step) if ring.rank == records.rank and ring.kind == "log" else None
            if slot is None:
                continue
            seal = ring.seals()[slot]
            data = memoryview(bytearray(ring.image(slot))) if copy else ring.image(slot)
            header = bytes(data[: image.header_bytes(data)])
            if xxhash.xxh3_64_intdigest(header) == seal.layout_digest and ring.seals().get(slot) == seal:
                layout, info = image.parse_cached(header, len(data), ring.place)
                return RecordImage(layout, info, data, ((0, len(data)),))
            raise Damaged("the header is not the one that was sealed", tier="memory", step=step, rank=records.rank)
        raise Damaged("its record is no longer there", tier="memory", step=step, rank=records.rank)

    def _from_memory(self, holding: Holding, copy: bool, arenas: list[Arena]) -> memoryview:
        def bad(reason: str, chunk: int | None = None) -> Damaged:
            return Damaged(reason, tier="memory", step=holding.step, rank=holding.rank, chunk=chunk)

        for arena in arenas:
            slot = arena.slot_of(holding.step) if arena.rank == holding.rank else None
            if slot is None or arena.seals()[slot].generation != holding.generation:
                continue
            seal, checks = arena.seals()[slot], arena.checks(slot)
            data = memoryview(bytearray(arena.image(slot))) if copy else arena.image(slot)
            if xxhash.xxh3_64_intdigest(data[: image.header_bytes(data)]) != seal.layout_digest:
                raise bad("the header is not the one that was sealed")
            if checks is not None:
                check_chunks(data, checks, CHUNK_BYTES, bad)
            if arena.seals().get(slot) != seal:
                raise bad("it was overwritten while it was read")
            return data
        raise bad("it is no longer there")

    def left_to(self, rank: int, world: int, *, is_followed: bool) -> tuple[list[Arena], list[Arena]]:
        """The bases and rings that an earlier life of a rank left on this node, or ranks that are no more.

        They are the caller's now, and the others are closed. `is_followed`: its replica has a process of its own.
        """

        def is_mine(arena: Arena) -> bool:
            return arena.rank >= world or (arena.rank == rank and not (is_followed and arena.kind == "replica"))

        for arena in (*self.arenas, *self.rings):
            if not is_mine(arena):
                arena.close()
        return list(filter(is_mine, self.arenas)), list(filter(is_mine, self.rings))

    def close(self) -> None:
        for arena in (*self.arenas, *self.rings):
            arena.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _torn(arena: Arena) -> list[Rejection]:
    reason = f"arena of rank {arena.rank}: the seal of slot {{}} does not match its checksum"
    step = arena.live().step
    return [Rejection(step=step, source="memory", reason=reason.format(slot), certain=False) for slot in arena.torn()]
