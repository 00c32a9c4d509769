"""How long a plan would take: its bytes at the rates that this run has measured, and nothing where it has not.

What a restart has read counts before what keepers have written, because a restart reads. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from everstep.events import Brought, Event, Fetched, Persisted, Replayed
from everstep.types import Holding, Noun, ParityRecord, Plan, Records, Source

_LAST = 8  # measurements that count: a tier may have been slower once


class Rate(Noun, frozen=True, kw_only=True):
    bytes_per_s: float
    measured: Literal["read", "written"]


class Measured(Noun, frozen=True, kw_only=True):
    """What a run knows of its tiers, and of its optimizers."""

    rates: dict[Source, Rate] = msgspec.field(default_factory=dict)
    replay_s_per_step: float | None = None


class Times(Noun, frozen=True, kw_only=True):
    """In seconds, in the order of a plan; None: nobody has measured that."""

    parts: tuple[float | None, ...]
    records: tuple[float | None, ...]
    replay: float | None  # repeating the steps, once their records are read
    total: float | None  # nodes read side by side; what all of them read, each reads
    rates: dict[Source, Rate]
    unmeasured: tuple[str, ...]


def measure(events: Iterable[Event]) -> Measured:
    """Out of what a run has said of itself, in the order of time."""
    moved: dict[tuple[str, Source], list[tuple[int, float]]] = defaultdict(list)
    replayed: list[tuple[int, float]] = []
    for event in events:
        match event:
            case Persisted(bytes=size, seconds=took):
                moved["written", "disk"].append((size, took))
            case Brought(tier=tier, bytes=size, seconds=took):
                moved["written", tier].append((size, took))
            case Fetched(source=source, bytes=size, seconds=took):
                moved["read", source].append((size, took))
            case Replayed(steps=steps, seconds=took):
                replayed.append((steps, took))
    rates: dict[Source, Rate] = {}
    for how in ("written", "read"):
        for (said, source), found in moved.items():
            per_s = _per_s(found)
            if said == how and per_s:
                rates[source] = Rate(bytes_per_s=per_s, measured="read" if how == "read" else "written")
    steps_per_s = _per_s(replayed)
    return Measured(rates=rates, replay_s_per_step=1 / steps_per_s if steps_per_s else None)


def _per_s(found: list[tuple[int, float]]) -> float | None:
    amount, took = (sum(column) for column in zip(*found[-_LAST:], strict=True)) if found else (0, 0.0)
    return amount / took if took > 0 else None


def times(plan: Plan, measured: Measured) -> Times:
    rates = measured.rates
    parts = tuple(_seconds(part.source, _read_for(part, plan), rates) for part in plan.parts)
    records = tuple(_seconds(one.source, one.bytes * (one.last - one.first + 1), rates) for one in plan.records)
    steps = (plan.step or 0) - (plan.base or 0)
    replay = 0.0 if steps == 0 else None if measured.replay_s_per_step is None else measured.replay_s_per_step * steps
    held: list[Holding | Records] = [*plan.parts, *plan.records]
    sources = {one.source for one in held}
    unmeasured = [source for source in sorted(sources) if source not in rates]
    return Times(
        parts=parts, records=records, replay=replay, total=_total(held, [*parts, *records], replay),
        rates={source: rates[source] for source in sorted(sources) if source in rates},
        unmeasured=(*unmeasured, *(["repeating steps"] if replay is None else [])),
    )  # fmt: skip


def _read_for(part: Holding, plan: Plan) -> int:
    """Bytes that are read for a part: to rebuild one from parity, as many blocks as there are of data."""
    if part.source != "parity":
        return part.bytes
    group = next((p.record for p in plan.parities if part.rank in _ranks(p.record)), None)
    return part.bytes if group is None else part.bytes * (len(group.members) - group.losses)


def _ranks(record: ParityRecord) -> set[int]:
    return {part.rank for member in record.members for part in member.parts}


def _seconds(source: Source, size: int, rates: Mapping[Source, Rate]) -> float | None:
    rate = rates.get(source)
    return None if rate is None else size / rate.bytes_per_s


def _total(held: list[Holding | Records], took: list[float | None], replay: float | None) -> float | None:
    if not held or replay is None or None in took:
        return None
    by_all, by_node = 0.0, defaultdict[str, float](float)
    for one, seconds in zip(held, took, strict=True):
        if one.everywhere:
            by_all += seconds or 0.0
        else:
            by_node[one.node] += seconds or 0.0
    return by_all + max(by_node.values(), default=0.0) + replay
