"""What is left: every part of every step that this node can still read, in memory and on disk, and what it cannot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Self

import msgspec
import xxhash

from everstep import image
from everstep.capture.arena import Arena, Wreck, find_arenas
from everstep.capture.collector import uncollected
from everstep.capture.host import arena_root
from everstep.errors import Damaged, EverstepError
from everstep.image import CHUNK_BYTES
from everstep.keeper.client import inherited
from everstep.keeper.scavenge import original
from everstep.recover.shelf import RecordImage, Shelf
from everstep.store import rewinds
from everstep.store.blocks import room_for
from everstep.store.manifest import Ranges, check_chunks, chunks_in, read_record
from everstep.store.places import Places, guest_tier
from everstep.topology import Topology, node_name
from everstep.types import Attempt, Holding, ImageInfo, ParityHolding, Records, Rejection, Room, Source, Survey

if TYPE_CHECKING:
    from everstep.recover.needs import Some

ATTEMPTS = "attempt.json"


class Sources:
    """Everything this node can read of one run."""

    def __init__(self, places: Places, run: str, *, is_common: bool = False) -> None:
        """`is_common`: every node reads this one's disk for itself."""
        self.run, self.node, memory_path = run, node_name(), places.memory
        self.directory = places.directory
        self.tier = places.disk_tier()
        self.shelves: dict[Source, Shelf] = {
            "disk": Shelf(self.tier, run, source="disk", node=self.node, everywhere=is_common)
        }
        guests = guest_tier(run, memory_path)
        self.shelves["partner"] = Shelf(guests, run, source="partner", node=self.node, commits=False)
        for source, tier in places.deeper_tiers().items():
            self.shelves[source] = Shelf(tier, run, source=source, node=self.node, everywhere=True)
        self.fetched_bytes = 0  # of the part that was fetched last
        self._wrecks: list[Wreck] = []
        roots = [arena_root(path) for path in dict.fromkeys((memory_path, None))]
        self._original = next(filter(None, (original(root / run, Path(self.directory)) for root in roots)), None)
        found: list[Arena] = []
        for root in roots if self._original is None else ():
            found += find_arenas(root, run, self._wrecks)
        found += inherited(run) if self._original is None else ()
        self.arenas = [arena for arena in found if arena.kind in ("base", "replica")]
        for arena in self.arenas:
            if arena.kind == "replica":
                arena.lock(shared=True)  # until it is closed: nobody advances what is read here
        self.rings = [arena for arena in found if arena.kind in ("log", "values")]

    def survey(self) -> Survey:
        holdings = [holding for arena in self.arenas for holding in self._in_memory(arena)]
        rejections = [Rejection(step=0, source="memory", reason=one.reason) for one in self._wrecks if one.was_whole]
        rejections += [rejection for arena in (*self.arenas, *self.rings) for rejection in _torn(arena)]
        if self._original is not None:
            reason = f"it is that of {self._original}: this is a copy, or that one is"
            rejections.append(Rejection(step=0, source="memory", reason=reason, certain=False))
        records = [one for ring in self.rings if ring.kind == "log" for one in self._in_ring(ring)]
        values = [one for ring in self.rings if ring.kind == "values" for one in self._in_memory(ring)]
        parities: list[ParityHolding] = []
        for source, shelf in self.shelves.items():
            try:
                holdings += shelf.holdings(rejections)
                records += shelf.records(rejections)
                values += shelf.values(rejections)
                parities += shelf.parities(rejections) if source == "partner" else ()
            except (EverstepError, OSError) as error:  # the others may have all that is needed
                rejections.append(Rejection(step=0, source=source, reason=f"it cannot be listed: {error}"))
        return Survey(
            holdings=tuple(holdings), records=tuple(records), values=tuple(values),
            parities=tuple(parities), rejections=tuple(rejections), attempts=self.attempts(),
            rewind=rewinds.read(self.tier),
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

    def values(self, holding: Holding, *, copy: bool = False) -> RecordImage:
        """What a step left that is too large for every record, every byte of it checked."""
        if holding.source == "memory":
            data = self._from_memory(holding, copy, [ring for ring in self.rings if ring.kind == "values"])
        else:
            data = self.shelves[holding.source].values_image(holding)
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

    def attempts(self) -> tuple[Attempt, ...]:
        try:
            return (read_record(self.tier, ATTEMPTS, Attempt),)
        except (OSError, EverstepError):
            return ()  # it only says what to offer last, and is written again by whoever loads

    def fetch(
        self, holding: Holding, *, copy: bool = False, needs: Some | None = None, room: Room = room_for
    ) -> tuple[image.ImageLayout, ImageInfo, memoryview]:
        """One part's image, every byte of it checked. `copy`: the owner may be alive and may overwrite it.

        `needs`: only these bytes of it are read and checked. `room`: for an image that is read as a whole.
        """
        file = f"{'arena of ' if holding.source == 'memory' else ''}rank {holding.rank}"

        def ranges(data: memoryview) -> list[tuple[int, int]]:
            assert needs is not None
            return needs.ranges(*image.parse(data, len(data), file=file))

        self.fetched_bytes = holding.bytes
        some = ranges if needs is not None and needs.is_partial else None
        if holding.source == "memory":
            data = self._from_memory(holding, copy, self.arenas, some)
        elif some is not None:
            data, self.fetched_bytes = self.shelves[holding.source].image_of(holding, some)
        else:
            data = self.shelves[holding.source].image(holding, room)
        with uncollected():
            layout, info = image.parse(data, len(data), file=file)
        if (info.run, info.rank, info.world) != (self.run, holding.rank, holding.world):
            raise Damaged("the image belongs to another run or rank", step=holding.step, rank=holding.rank, file=file)
        return layout, info, data

    def parity(self, holding: ParityHolding) -> memoryview:
        """One member's parity, every byte of it checked."""
        return self.shelves["partner"].parity(holding)

    def record(self, records: Records, step: int, *, copy: bool = False) -> RecordImage:
        """What one rank consumed in a step, every byte of it checked, if it comes from a tier."""
        if records.source == "memory":
            return self._from_ring(records, step, copy)
        return self.shelves[records.source].record(records, step)

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

    def _from_memory(
        self, holding: Holding, copy: bool, arenas: list[Arena], ranges: Ranges | None = None
    ) -> memoryview:
        def bad(reason: str, chunk: int | None = None) -> Damaged:
            return Damaged(reason, tier="memory", step=holding.step, rank=holding.rank, chunk=chunk)

        for arena in arenas:
            slot = arena.slot_of(holding.step, holding.generation) if arena.rank == holding.rank else None
            if slot is None:
                continue
            seal, checks = arena.seals()[slot], arena.checks(slot)
            data = memoryview(bytearray(arena.image(slot))) if copy else arena.image(slot)
            if xxhash.xxh3_64_intdigest(data[: image.header_bytes(data)]) != seal.layout_digest:
                raise bad("the header is not the one that was sealed")
            only = chunks_in(ranges(data)) if ranges is not None else None
            if only is not None:
                self.fetched_bytes = min(len(data), len(only) * CHUNK_BYTES)
            if checks is not None:
                check_chunks(data, checks, CHUNK_BYTES, bad, only)
            if arena.seals().get(slot) != seal:
                raise bad("it was overwritten while it was read")
            return data
        raise bad("it is no longer there")

    def left_to(self, place: Topology, *, is_followed: bool) -> tuple[list[Arena], list[Arena]]:
        """The bases and rings that an earlier life of a rank left on this node, or ranks that are no longer here.

        They are the caller's now, and the others are closed; what cannot be read of them is removed, after everybody
        has resumed. `is_followed`: its replica has a process of its own.
        """

        def is_left(rank: int, *, is_replica: bool) -> bool:
            is_own = rank == place.rank and not (is_followed and is_replica)
            return is_own or rank not in place.local_ranks

        def is_mine(arena: Arena) -> bool:
            return is_left(arena.rank, is_replica=arena.kind == "replica")

        for wreck in self._wrecks:
            if is_left(wreck.rank, is_replica="-replica-" in wreck.folder.name):
                wreck.remove()
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
