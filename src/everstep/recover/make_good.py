"""What a lost node had, from the parity of its group: computed from the parts and the parity that others still have."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

from everstep import image
from everstep.errors import Damaged, EverstepError
from everstep.image import CHUNK_BYTES, ImageLayout
from everstep.protect.parity import Read, rebuild
from everstep.protect.stripes import Geometry, Place
from everstep.recover.plan import lost_members
from everstep.store.manifest import check_chunks
from everstep.types import ImageInfo, ParityHolding, ParityRecord, Plan

Image = tuple[ImageLayout, ImageInfo, memoryview]


class ParityReader(Protocol):
    """Whoever has parity: this node, or all of them."""

    def parity(self, holding: ParityHolding) -> memoryview: ...


def rebuild_parts(carrier: ParityReader, plan: Plan, images: dict[int, Image]) -> list[tuple[ParityHolding, str]]:
    """Add to the images those that only parity has. Returns the parity that turned out to be bad, and why."""
    bad: list[tuple[ParityHolding, str]] = []
    groups: dict[tuple[object, ...], dict[int, memoryview]] = defaultdict(dict)
    holdings: dict[tuple[object, ...], list[ParityHolding]] = defaultdict(list)
    for holding in plan.parities:
        holdings[holding.group].append(holding)
        try:
            groups[holding.group][holding.record.member] = carrier.parity(holding)
        except (EverstepError, OSError) as error:
            bad.append((holding, str(error)))
    if bad:
        return bad
    for group, parities in groups.items():
        record = holdings[group][0].record
        try:
            _rebuild_group(record, parities, images)
        except EverstepError as error:
            bad += [(holding, f"what it gives is not what was lost: {error}") for holding in holdings[group]]
    return bad


def _rebuild_group(record: ParityRecord, parities: dict[int, memoryview], images: dict[int, Image]) -> None:
    lost = lost_members(record, parities.keys(), images.keys())
    geometry = Geometry(
        members=tuple(one.node for one in record.members), lengths=tuple(one.bytes for one in record.members),
        losses=record.losses,
    )  # fmt: skip

    def read(wanted: Sequence[Read]) -> None:
        for one in wanted:
            if one.place is Place.PARITY:
                one.into[:] = parities[one.member][one.offset : one.offset + len(one.into)]
            else:
                _copy_data(record, one, images)

    rebuilt: dict[int, Image] = {}
    for member in lost:
        if all(part.rank in images for part in record.members[member].parts):
            continue  # only its parity is not to be had
        data = memoryview(bytearray(record.members[member].bytes))

        def write(offset: int, piece: memoryview, data: memoryview = data) -> None:
            data[offset : offset + len(piece)] = piece

        rebuild(geometry, lost, member, Place.DATA, read, write)
        rebuilt |= _checked(record, member, data)
    images |= rebuilt


def _copy_data(record: ParityRecord, wanted: Read, images: dict[int, Image]) -> None:
    """Fill a chunk from the images of a member's ranks, which lie one after the other."""
    into, offset = wanted.into, wanted.offset
    for part in record.members[wanted.member].parts:
        if into and offset < part.bytes:
            piece = into[: min(len(into), part.bytes - offset)]
            piece[:] = images[part.rank][2][offset : offset + len(piece)]
            into, offset = into[len(piece) :], 0
        else:
            offset = max(0, offset - part.bytes)


def _checked(record: ParityRecord, member: int, data: memoryview) -> dict[int, Image]:
    """The images of a member's ranks, every byte compared with what its node noted when the parity was made."""
    found: dict[int, Image] = {}
    for part in record.members[member].parts:
        mine, data = data[: part.bytes], data[part.bytes :]

        def bad(reason: str, chunk: int | None = None, rank: int = part.rank) -> Damaged:
            return Damaged(reason, tier="parity", step=record.step, rank=rank, chunk=chunk)

        check_chunks(mine, part.chunks, CHUNK_BYTES, bad)
        layout, info = image.parse(mine, len(mine), file=f"rank {part.rank}, rebuilt")
        if (info.run, info.rank, info.world) != (record.run, part.rank, record.world):
            raise bad("the image belongs to another run or rank")
        found[part.rank] = (layout, info, mine)
    return found
