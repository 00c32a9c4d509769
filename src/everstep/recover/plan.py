"""Which step to restore, and from where: a pure function of what is left.

The newest step wins that is whole: a base, which is every old rank's part, of one generation, on nodes that can be
reached, and every rank's record of each step after it. Of several ways to a step the one with the fewest records
is taken, and memory before disk. A step whose readers failed is offered last. Whatever is passed over is explained.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import get_args

import msgspec

from everstep.types import (
    Attempt,
    Holding,
    ParityHolding,
    ParityRecord,
    Plan,
    Records,
    Rejection,
    Source,
    Survey,
)

_TRIES = 2  # a reader may be killed by chance once; a step that ends two readers in a row is suspect
_COST = {source: cost for cost, source in enumerate(get_args(Source))}  # the nearest first


def merge(surveys: Collection[Survey]) -> Survey:
    """One survey out of many; what several have seen counts once."""
    return Survey(
        holdings=tuple(dict.fromkeys(h for survey in surveys for h in survey.holdings)),
        records=tuple(dict.fromkeys(r for survey in surveys for r in survey.records)),
        values=tuple(dict.fromkeys(v for survey in surveys for v in survey.values)),
        parities=tuple(dict.fromkeys(p for survey in surveys for p in survey.parities)),
        rejections=tuple(dict.fromkeys(r for survey in surveys for r in survey.rejections)),
        attempts=tuple(dict.fromkeys(a for survey in surveys for a in survey.attempts)),
        rewind=min((survey.rewind for survey in surveys if survey.rewind is not None), default=None),
    )


def make_plan(survey: Survey, nodes: Collection[str]) -> Plan:
    """`nodes`: those that can be reached; what only another one has cannot be had."""
    if survey.rewind is not None:
        return _gone_back(survey, survey.rewind, nodes)
    groups = _by_base(survey)
    suspects = {attempt.step: attempt for attempt in survey.attempts if _is_suspect(attempt)}
    log = _Log(survey, nodes)
    bases: dict[tuple[int, str, int], tuple[Holding, ...]] = {}
    incomplete: list[Rejection] = []
    for key, held in groups.items():
        parts, reason = _base(survey, key, held, nodes)
        if reason is None:
            bases[key] = parts
        else:
            incomplete.append(Rejection(step=key[0], source="any", reason=reason))
    ways = {(log.reach(key[0]), key) for key in bases} | {(key[0], key) for key in bases}
    steps = {step for step, _ in ways} | {key[0] for key in groups}
    rejections = [
        Rejection(step=step, source="any", reason=_suspicion(suspects[step])) for step in steps & suspects.keys()
    ]
    rejections += survey.rejections
    best = max(  # of what is as good the same one in every process: ranks plan each for itself
        ways, default=None,
        key=lambda way: (way[0] not in suspects, way[0], way[1][0], len(groups[way[1]]), way[1]),
    )  # fmt: skip
    newest = best[0] if best is not None and best[0] not in suspects else -1
    rejections += [r for r in incomplete if r.step > newest]
    if best is None:
        rejections += log.without_base()
        return Plan(step=None, world=0, parts=(), rejections=_in_order(rejections))
    step, key = best
    rejections += log.beyond(max(step, log.reach(key[0])))
    return Plan(
        step=step, world=key[2], parts=bases[key], rejections=_in_order(rejections), records=log.runs(key[0], step),
        values=log.values(step) if step > key[0] else (),
        parities=_parities(survey, key, nodes) if any(p.source == "parity" for p in bases[key]) else (),
    )  # fmt: skip


def _gone_back(survey: Survey, asked: int, nodes: Collection[str]) -> Plan:
    plan = make_plan(msgspec.structs.replace(up_to(survey, asked), rewind=None), nodes)
    newest = max((*(one.step for one in survey.holdings), *(one.last for one in survey.records)), default=asked)
    if newest == asked:
        return plan
    reason = f"the run goes back to step {asked}, as `everstep rewind` was told"
    first = Rejection(step=newest, source="any", reason=reason)
    return msgspec.structs.replace(plan, rejections=(first, *plan.rejections))


def reaches(survey: Survey, nodes: Collection[str]) -> list[tuple[tuple[Holding, ...], list[int]]]:
    """Every base that is whole, oldest first, and the steps that can be had from there: its own, and by records."""
    log = _Log(survey, nodes)
    bases = [_base(survey, key, held, nodes)[0] for key, held in sorted(_by_base(survey).items())]
    return [(parts, log.steps(parts[0].step)) for parts in bases if parts]


def _by_base(survey: Survey) -> dict[tuple[int, str, int], list[Holding]]:
    groups: dict[tuple[int, str, int], list[Holding]] = defaultdict(list)
    for holding in survey.holdings:
        groups[holding.step, holding.generation, holding.world].append(holding)
    return groups


def _in_order(rejections: list[Rejection]) -> tuple[Rejection, ...]:
    return tuple(sorted(rejections, key=lambda rejection: -rejection.step))


class _Log:
    """The records of all ranks, step by step."""

    def __init__(self, survey: Survey, nodes: Collection[str]) -> None:
        self._nodes = nodes
        self._values: dict[int, dict[str, list[Holding]]] = defaultdict(lambda: defaultdict(list))
        for holding in survey.values:
            self._values[holding.step][holding.generation].append(holding)
        records = survey.records
        self._of: dict[int, dict[int, Records]] = defaultdict(dict)  # step -> rank -> the cheapest
        for one in sorted(records, key=lambda r: _COST[r.source], reverse=True):
            if one.everywhere or one.node in nodes:
                for step in range(one.first, one.last + 1):
                    self._of[step][one.rank] = one

    def _missing(self, step: int) -> str | None:
        """Why a step cannot be repeated, or None if it can."""
        found = self._of.get(step)
        if not found:
            return f"nobody has records of step {step}"
        worlds = {one.world for one in found.values()}
        if len(worlds) > 1:
            return f"the records of step {step} are of {' and '.join(map(str, sorted(worlds)))} ranks"
        absent = [rank for rank in range(worlds.pop()) if rank not in found]
        return f"there is no record of rank {', '.join(map(str, absent))} of step {step}" if absent else None

    def reach(self, base: int) -> int:
        """How far records lead from a base: to the newest step that also has its values, if it needs them."""
        return self.steps(base)[-1]

    def steps(self, base: int) -> list[int]:
        """A base's step, and those that records lead to from it."""
        step, good = base, [base]
        while self._missing(step + 1) is None:
            step += 1
            if not any(one.has_values for one in self._of[step].values()) or self.values(step):
                good.append(step)
        return good

    def values(self, step: int) -> tuple[Holding, ...]:
        """Every rank's values of a step; empty if one is not to be had."""
        for held in self._values.get(step, {}).values():
            parts, reason = _parts(held, held[0].world, self._nodes)
            if reason is None:
                return parts
        return ()

    def beyond(self, step: int) -> list[Rejection]:
        """Why newer records are of no use."""
        newer = [one for one in self._of if one > step]
        if not newer:
            return []
        reason = self._missing(step + 1)
        if reason is None and any(one.has_values for one in self._of[step + 1].values()):
            reason = self._unstoppable(step)
        else:
            reason = f"{reason or 'no base'} to go on from"
        return [Rejection(step=max(newer), source="any", reason=reason)]

    def _unstoppable(self, step: int) -> str:
        """Why no later step can be the end of a replay, though records lead there."""
        last = step
        while self._missing(last + 1) is None:
            last += 1
        newest = max((one for one in self._values if step < one <= last), default=None)
        if newest is None:
            return f"its records need values beside them, and nobody has those of a step from {step + 1} to {last}"
        held = max(self._values[newest].values(), key=len)
        _, reason = _parts(held, held[0].world, self._nodes)
        return f"of the values that its records need beside them, those of step {newest}, there is {reason}"

    def without_base(self) -> list[Rejection]:
        """Why no record is of use. That all bases were lost looks like a crash before the first was durable."""
        return [
            Rejection(step=step, source="any", reason="its records have no base to go on from", certain=False)
            for step in (max(self._of, default=None),)
            if step is not None
        ]

    def runs(self, base: int, step: int) -> tuple[Records, ...]:
        """Where each rank's records of the steps after a base come from."""
        found: list[Records] = []
        newest: dict[int, tuple[int, Records]] = {}  # rank -> place in `found`, and what it was cut from
        for at in range(base + 1, step + 1):
            for rank, one in sorted(self._of[at].items()):
                place, known = newest.get(rank, (-1, None))
                if known is one:
                    found[place] = msgspec.structs.replace(found[place], last=at)
                else:
                    newest[rank] = (len(found), one)
                    found.append(msgspec.structs.replace(one, first=at, last=at))
        return tuple(found)


def _is_suspect(attempt: Attempt) -> bool:
    return bool(attempt.error) or attempt.count >= _TRIES


def _suspicion(attempt: Attempt) -> str:
    if attempt.error:
        return f"its last reader failed: {attempt.error}"
    return f"{attempt.count} readers in a row died while loading it"


def _parts(held: list[Holding], world: int, nodes: Collection[str]) -> tuple[tuple[Holding, ...], str | None]:
    chosen, missing = [], []
    for rank in range(world):
        nearest = _nearest(held, rank, nodes)
        if nearest is not None:
            chosen.append(nearest)
        else:
            missing.append(rank)
    if missing:
        have = sorted({h.rank for h in held})
        return (), f"no readable part of rank {', '.join(map(str, missing))} (of {world}; there are parts of {have})"
    return tuple(chosen), None


def _nearest(held: list[Holding], rank: int, nodes: Collection[str]) -> Holding | None:
    readable = [h for h in held if h.rank == rank and (h.everywhere or h.node in nodes)]
    return min(readable, key=lambda h: _COST[h.source], default=None)


def _of(parity: ParityHolding) -> tuple[int, str, int]:
    return (parity.record.step, parity.record.generation, parity.record.world)


def _parities(survey: Survey, key: tuple[int, str, int], nodes: Collection[str]) -> tuple[ParityHolding, ...]:
    return tuple(p for p in survey.parities if _of(p) == key and p.node in nodes)


def _base(
    survey: Survey, key: tuple[int, str, int], held: list[Holding], nodes: Collection[str]
) -> tuple[tuple[Holding, ...], str | None]:
    """The parts of a base, or why it is not whole; parts that nobody has are rebuilt from the parity of their group."""
    step, generation, world = key
    parts, reason = _parts(held, world, nodes)
    if reason is None:
        return parts, None
    found = {rank: one for rank in range(world) if (one := _nearest(held, rank, nodes)) is not None}
    groups: dict[tuple[object, ...], list[ParityHolding]] = defaultdict(list)
    for parity in _parities(survey, key, nodes):
        groups[parity.group].append(parity)
    for parities in groups.values():
        record = parities[0].record
        lost = lost_members(record, {p.record.member for p in parities}, found)
        if len(lost) > record.losses:
            names = ", ".join(record.members[one].node for one in sorted(lost))
            reason += f"; of a parity group that makes up for {record.losses}, {names} are lost"
            continue
        for part in (part for one in lost for part in record.members[one].parts if part.rank not in found):
            found[part.rank] = Holding(
                source="parity", node="", step=step, rank=part.rank, world=world, generation=generation,
                bytes=part.bytes, cut_time=part.cut_time,
            )  # fmt: skip
    if len(found) < world:
        return (), reason
    return tuple(found[rank] for rank in range(world)), None


def lost_members(record: ParityRecord, with_parity: Collection[int], found: Collection[int]) -> set[int]:
    """The members of a group that cannot help: a part of theirs is not to be had, or their parity is not."""
    return {
        one
        for one, member in enumerate(record.members)
        if one not in with_parity or any(part.rank not in found for part in member.parts)
    }


def without(survey: Survey, bad: Holding | Records | ParityHolding, reason: str) -> Survey:
    """The survey after a part, values, parity, or the first of some records turned out to be damaged."""
    if isinstance(bad, ParityHolding):
        rejection = Rejection(step=bad.record.step, source="parity", reason=reason)
        parities = tuple(p for p in survey.parities if p != bad)
        return msgspec.structs.replace(survey, parities=parities, rejections=(*survey.rejections, rejection))
    if isinstance(bad, Records):
        rejection = Rejection(step=bad.first, source=bad.source, reason=reason)
        records = tuple(cut for one in survey.records for cut in _cut_out(one, bad))
        return msgspec.structs.replace(survey, records=records, rejections=(*survey.rejections, rejection))
    rejections = (*survey.rejections, Rejection(step=bad.step, source=bad.source, reason=reason))
    if bad in survey.values:  # which a base of the same step has nothing to do with
        values = tuple(v for v in survey.values if _place(v) != _place(bad))
        return msgspec.structs.replace(survey, values=values, rejections=rejections)
    holdings = tuple(h for h in survey.holdings if _place(h) != _place(bad))
    return msgspec.structs.replace(survey, holdings=holdings, rejections=rejections)


def up_to(survey: Survey, limit: int | None) -> Survey:
    """The survey without anything of a step after `limit`."""
    if limit is None:
        return survey
    records = (msgspec.structs.replace(one, last=min(one.last, limit)) for one in survey.records if one.first <= limit)
    return msgspec.structs.replace(
        survey, holdings=tuple(h for h in survey.holdings if h.step <= limit), records=tuple(records)
    )


def leaving_out(survey: Survey, steps: Collection[int]) -> Survey:
    """The survey without these bases; what there is to be said of them is not said either."""
    if not steps:
        return survey
    return msgspec.structs.replace(
        survey,
        holdings=tuple(h for h in survey.holdings if h.step not in steps),
        parities=tuple(p for p in survey.parities if p.record.step not in steps),
        rejections=tuple(r for r in survey.rejections if r.step not in steps),
    )


def _place(holding: Holding) -> tuple[object, ...]:
    return (holding.source, holding.node, holding.step, holding.rank, holding.generation)


def _cut_out(one: Records, bad: Records) -> list[Records]:
    """What is left of some records when the first of `bad` is no good; those after it may still follow another."""
    same = (one.source, one.node, one.rank, one.world) == (bad.source, bad.node, bad.rank, bad.world)
    if not same or not one.first <= bad.first <= one.last:
        return [one]
    before = msgspec.structs.replace(one, last=bad.first - 1)
    after = msgspec.structs.replace(one, first=bad.first + 1)
    return [left for left in (before, after) if left.first <= left.last]
