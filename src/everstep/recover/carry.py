"""What one node can read, on all of them: its owner reads and checks it, and the others are sent the bytes.

All ranks must ask for the same things in the same order. Of what every node reads for itself nothing is sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from everstep import image
from everstep.errors import Damaged, EverstepError
from everstep.recover.assemble import Image
from everstep.recover.needs import Needs
from everstep.recover.shelf import RecordImage
from everstep.recover.survey import Sources
from everstep.store.blocks import room_for
from everstep.topology import Topology, broadcast, exchange
from everstep.types import Gaps, Holding, ParityHolding, Records, Room, Source


class _Word(msgspec.Struct):
    """What comes before the bytes: how many there are of each buffer, or why there are none."""

    lengths: list[int] = []
    note: bytes = b""
    problem: str = ""


class Carrier:
    """Reads for this rank, and for those that cannot."""

    def __init__(self, sources: Sources, place: Topology) -> None:
        self._sources, self._place = sources, place
        self.took: dict[Source, tuple[int, float]] = {}  # bytes of images, and seconds

    def image(self, holding: Holding, needs: Needs | None = None, room: Room = room_for) -> Image:
        """All of an image, or of one that this rank reads by itself what it needs."""
        began = time.monotonic()
        found = self._image(holding, needs, room)
        size, seconds = self.took.get(holding.source, (0, 0.0))
        read = holding.bytes if self._is_carried(holding) else self._sources.fetched_bytes
        self.took[holding.source] = (size + read, seconds + time.monotonic() - began)
        return found

    def _image(self, holding: Holding, needs: Needs | None, room: Room) -> Image:
        if not self._is_carried(holding):
            return self._sources.fetch(holding, needs=needs, room=room)
        _, (data,) = self._carry(holding, lambda: (b"", [self._sources.fetch(holding, room=room)[2]]))
        layout, info = image.parse(data, len(data), file=f"rank {holding.rank} of {holding.node}")
        return layout, info, data

    def image_for(self, rank: int, holding: Holding) -> Image | None:
        """The same for one rank alone: it reads what its node has, and only what must travel concerns the others."""
        if self._is_carried(holding) and self._place.nodes[rank] != holding.node:
            found = self.image(holding)
            return found if rank == self._place.rank else None
        return self._sources.fetch(holding) if rank == self._place.rank else None

    def values(self, holding: Holding, *, copy: bool = False) -> RecordImage:
        if not self._is_carried(holding):
            return self._sources.values(holding, copy=copy)
        _, (data,) = self._carry(holding, lambda: (b"", [self._sources.values(holding).data]))
        layout, info = image.parse(data, len(data), file=f"values of rank {holding.rank} of {holding.node}")
        return RecordImage(layout, info, data, ((0, len(data)),))

    def record(self, records: Records, step: int, *, copy: bool = False) -> RecordImage:
        if not self._is_carried(records):
            return self._sources.record(records, step, copy=copy)

        def read() -> tuple[bytes, list[memoryview]]:
            found = self._sources.record(records, step)
            note = msgspec.msgpack.encode((found.layout.total_bytes, found.ranges, found.gaps))
            return note, [memoryview(found.layout.header), found.data]

        note, (header, data) = self._carry(records, read)
        total, ranges, gaps = msgspec.msgpack.decode(note, type=tuple[int, tuple[tuple[int, int], ...], Gaps])
        layout, info = image.parse_cached(bytes(header), total, f"rank {records.rank} of {records.node}")
        return RecordImage(layout, info, data, ranges, gaps)

    def parity(self, holding: ParityHolding) -> memoryview:
        if not self._place.has_many_nodes:
            return self._sources.parity(holding)
        return self._carry(holding, lambda: (b"", [self._sources.parity(holding)]))[1][0]

    def is_agreed(self, good: bool) -> bool:
        """Whether all ranks say so, where they go on to fetch for each other; else what this one says."""
        if not self._place.has_many_nodes:
            return good
        return b"0" not in exchange(b"1" if good else b"0", self._place)

    def _is_carried(self, held: Holding | Records) -> bool:
        return self._place.has_many_nodes and not held.everywhere

    def _carry(
        self, held: Holding | Records | ParityHolding, read: Callable[[], tuple[bytes, Sequence[memoryview]]]
    ) -> tuple[bytes, list[memoryview]]:
        """Read by the first rank of the node that has it. Damaged, on all ranks, if it cannot be read there."""
        owner = self._place.nodes.index(held.node)
        word, buffers = _Word(), list[memoryview]()
        if self._place.rank == owner:
            try:
                note, found = read()
                buffers = [one.cast("B") for one in found]
                word = _Word(lengths=[len(one) for one in buffers], note=note)
            except (EverstepError, OSError) as error:
                word = _Word(problem=str(error) or type(error).__name__)
        heard = msgspec.msgpack.decode(exchange(msgspec.msgpack.encode(word), self._place)[owner], type=_Word)
        if heard.problem:
            raise Damaged(f"{heard.problem}, on node {held.node}")
        if self._place.rank != owner:
            buffers = [memoryview(bytearray(length)) for length in heard.lengths]
        for buffer in buffers:
            broadcast(buffer, owner, self._place)
        return heard.note, buffers
