"""What a node has in memory, as it tells others: the bases, records and values that its ranks have sealed."""

from __future__ import annotations

from collections.abc import Iterable

from everstep import image
from everstep.capture.arena import Arena
from everstep.errors import Damaged
from everstep.keeper.exchange import Seals
from everstep.keeper.session import Session
from everstep.types import Holding, Records


def seals_of(node: str, sessions: Iterable[Session]) -> Seals:
    arenas = [arena for session in sessions for arena in session.arenas()]
    return Seals(
        bases=tuple(one for arena in arenas if arena.kind == "base" for one in _holdings(node, arena)),
        records=tuple(one for arena in arenas if arena.kind == "log" for one in _records(node, arena)),
        values=tuple(one for arena in arenas if arena.kind == "values" for one in _holdings(node, arena)),
    )


def _holdings(node: str, arena: Arena) -> list[Holding]:
    return [
        Holding(
            source="memory", node=node, step=seal.step, rank=arena.rank, world=arena.world,
            generation=seal.generation, bytes=seal.length, cut_time=seal.cut_time,
            checked=arena.checks(slot) is not None,
        )
        for slot, seal in sorted(arena.seals().items(), key=lambda item: item[1].step)
    ]  # fmt: skip


def _records(node: str, ring: Arena) -> list[Records]:
    data = ring.image(0)
    try:
        info = image.parse_cached(bytes(data[: image.header_bytes(data)]), ring.slot_bytes, ring.place)[1]
    except Damaged:
        return []  # nobody can read any of them
    return [
        Records(
            source="memory", node=node, rank=ring.rank, world=ring.world, first=seal.step, last=seal.step,
            bytes=seal.length, cut_time=seal.cut_time, has_values=info.has_values,
        )
        for seal in sorted(ring.seals().values(), key=lambda seal: seal.step)
    ]  # fmt: skip
