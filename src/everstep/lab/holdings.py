"""What is left of a simulated run's checkpoints, as a survey of real nouns, for the real plan.

Seats that hold the same have the same fate, so a survey names those that have lost something, those that protect them,
and one for all others: its plan is that of all seats (tests/lab compares them), and a cluster of thousands
costs no more than one of ten. A node's ranks are one here, because a node is lost as a whole.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf
from typing import get_args

from everstep.config import Keep
from everstep.lab.rhythm import Log, Rhythm
from everstep.lab.scenario import Kind, Protect, Scenario, Strategy, seat_name
from everstep.protect.groups import NodePlace, parity_groups, partners
from everstep.recover.plan import make_plan
from everstep.recover.times import Measured, Rate, times
from everstep.store.retain import to_retire
from everstep.tune.machine import RING_SLOTS
from everstep.types import Holding, ParityHolding, ParityMember, ParityPart, ParityRecord, Plan, Records, Source, Survey

_IN_MEMORY: tuple[Source, ...] = ("memory", "partner", "parity")
_FOR_ALL: tuple[Source, ...] = ("shared", "objects")
_RECORDS: tuple[Source, ...] = ("memory", "partner", "disk")  # where records can be lost


@dataclass(frozen=True, slots=True, kw_only=True)
class Protection:
    """Who protects whom among those who train together."""

    members: frozenset[int]
    holders: Mapping[int, tuple[int, ...]]  # of the copies of each
    wards: Mapping[int, tuple[int, ...]]  # whose copies each has
    groups: Sequence[tuple[int, ...]]  # of parity
    group: Mapping[int, tuple[int, ...]]  # that each is in


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """Those who train together, from one beginning to the next."""

    number: int
    begin: int  # the step that it went on from
    seats: tuple[int, ...]
    protection: Protection

    def related(self, seats: Iterable[int]) -> set[int]:
        """These, and whoever is in one boat with them."""
        of, found = self.protection, set[int]()
        for seat in seats:
            found.update((seat,), of.holders.get(seat, ()), of.wards.get(seat, ()), of.group.get(seat, ()))
        return found


def begin_life(scenario: Scenario, strategy: Strategy, seats: Sequence[int], *, number: int, step: int) -> Life:
    """The protection of those who are there, as every keeper computes it."""
    protection = _protection(strategy.protection, strategy.group, scenario.cluster.nodes_per_rack, tuple(seats))
    return Life(number=number, begin=step, seats=tuple(seats), protection=protection)


@lru_cache(maxsize=16)
def _protection(protect: Protect, group: int, per_rack: int, seats: tuple[int, ...]) -> Protection:
    places = [NodePlace(node=seat_name(seat), domain=f"rack{seat // per_rack}") for seat in seats]
    number = {seat_name(seat): seat for seat in seats}
    holders: dict[int, tuple[int, ...]] = {}
    wards: dict[int, tuple[int, ...]] = {}
    groups: list[tuple[int, ...]] = []
    if protect == "partner":
        of = partners(places, copies=1).of
        holders = {number[node]: tuple(number[holder] for holder in held) for node, held in of.items()}
        for seat, held in holders.items():
            wards |= {holder: (*wards.get(holder, ()), seat) for holder in held}
    if protect == "parity":
        division = parity_groups(places, size=group, losses=1)
        groups = [tuple(number[node] for node in one) for one in division.groups]
    return Protection(
        members=frozenset(seats), holders=holders, wards=wards, groups=groups,
        group={seat: one for one in groups for seat in one},
    )  # fmt: skip


@dataclass(slots=True, kw_only=True)
class _Kept:
    step: int
    ready_s: float
    life: Life
    lost: set[int] = field(default_factory=set)  # seats that have lost what they held since


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How a run comes home."""

    step: int
    load_s: float
    replay_s: float
    replayed: int
    source: str  # the farthest that something comes from


class Holdings:
    def __init__(self, scenario: Scenario, strategy: Strategy) -> None:
        self._scenario, self._keep = scenario, Keep(last=strategy.keep)
        self._kept: dict[Source, list[_Kept]] = {}
        self._life: Life | None = None
        self._first = 0  # records begin behind this step
        self._lost_records: dict[Source, set[int]] = {source: set() for source in _RECORDS}
        self._since: dict[Source, dict[int, int]] = {}  # who has records since which step, if not since the first

    def begin(self, life: Life, now: float, ready: Mapping[Source, float]) -> None:
        """A life begins with a base in memory, and where memory is protected; `ready`: when it is whole there."""
        if self._life is None or self._life.seats != life.seats:  # records of other ranks are of no use to these
            self._first, self._since = life.begin, {source: {} for source in _RECORDS}
        for source, seats in self._lost_records.items():
            self._since[source].update(dict.fromkeys(seats, life.begin))
            seats.clear()
        self._life = life
        for source, kept in self._kept.items():
            kept[:] = [one for one in kept if one.step <= life.begin]
            self._retire(source, now)
        for source, ready_s in ready.items():
            if source in _IN_MEMORY:
                self._kept.setdefault(source, []).append(_Kept(step=life.begin, ready_s=ready_s, life=life))

    def add(self, source: Source, steps: Sequence[int], now: float) -> None:
        """Checkpoints that are whole by now, the oldest first."""
        assert self._life is not None
        self._kept.setdefault(source, []).extend(_Kept(step=step, ready_s=now, life=self._life) for step in steps)
        self._retire(source, now)

    def _retire(self, source: Source, now: float) -> None:
        """What the policy lets go goes. What a node has lost a part of counts as damaged."""
        whole = [one for one in self._kept[source] if one.ready_s <= now]
        sound = {one.step for one in whole if not one.lost}
        damaged = {one.step for one in whole} - sound
        gone = set(to_retire(sound | damaged, self._keep, damaged=damaged))
        self._kept[source] = [one for one in self._kept[source] if one.step not in gone]

    def lose(self, kind: Kind, seats: Collection[int]) -> None:
        """A process takes nothing along; a node takes its memory and its disk, a cluster without power all memory."""
        if kind == "process":
            return
        gone: tuple[Source, ...] = _IN_MEMORY if kind == "cluster" else (*_IN_MEMORY, "disk")
        for source in gone:
            for one in self._kept.get(source, ()):
                one.lost.update(seats)
            if source in _RECORDS:
                self._lost_records[source].update(seats)

    def way_home(self, step: int, now: float, rhythm: Rhythm) -> Way:
        """Which step the plan takes, and how long that is."""
        survey, shown = self.survey(step, now, rhythm)
        plan = make_plan(survey, _nodes(survey))
        if plan.step is None:
            return Way(step=0, load_s=0.0, replay_s=0.0, replayed=0, source="nothing")
        found = times(plan, self._rates(plan, rhythm, shown))
        replay_s = found.replay or 0.0
        farthest = max((part.source for part in plan.parts), key=get_args(Source).index)
        return Way(
            step=plan.step, load_s=(found.total or 0.0) - replay_s, replay_s=replay_s,
            replayed=plan.step - (plan.base or 0), source=farthest,
        )  # fmt: skip

    def _rates(self, plan: Plan, rhythm: Rhythm, shown: int) -> Measured:
        """As a run would have measured them. Of what all read together, those who are shown get their share."""
        machine, nodes = self._scenario.machine, len(self._life.seats if self._life else ())
        sources: tuple[Source, ...] = ("memory", "partner", "parity", "disk")
        rates = {one: machine.rate(one, 1) for one in sources}
        rates |= {one: machine.rate(one, nodes) * shown / max(nodes, 1) for one in _FOR_ALL}
        replay_s = machine.replay * rhythm.step_s
        return Measured(
            rates={one: Rate(bytes_per_s=rate, measured="read") for one, rate in rates.items()},
            replay_s_per_step=replay_s,
        )

    # -- the survey

    def survey(self, step: int, now: float, rhythm: Rhythm) -> tuple[Survey, int]:
        """What is left while the newest step is `step`; and how many seats stand there for all."""
        return self.survey_of(self._representatives(), step, now, rhythm)

    def survey_of(self, seats: Collection[int], step: int, now: float, rhythm: Rhythm) -> tuple[Survey, int]:
        holdings: list[Holding] = []
        parities: list[ParityHolding] = []
        records: list[Records] = []
        for source, kept in self._kept.items():
            for one in kept:
                if one.ready_s <= now:
                    holdings += self._parts(source, one, seats)
                    parities += self._parities(one, seats) if source == "parity" else ()
        if self._life is not None and rhythm.log is not None:
            records += self._records(self._life, rhythm.log, seats, step)
        if self._life is not None and rhythm.has_replica:
            newest = _Kept(step=step, ready_s=now, life=self._life, lost=self._lost_records["memory"])
            holdings += self._parts("memory", newest, seats)
        shown = len(seats) if self._life is None else len(self._life.protection.members.intersection(seats))
        return Survey(holdings=tuple(holdings), parities=tuple(parities), records=tuple(records)), shown

    def _representatives(self) -> list[int]:
        lives = {one.life.number: one.life for kept in self._kept.values() for one in kept}
        if self._life is not None:
            lives[self._life.number] = self._life
        losses = {frozenset(one.lost) for kept in self._kept.values() for one in kept}
        losses |= {frozenset(seats) for seats in self._lost_records.values()}
        losses |= {self._have_fewer(source) for source in self._since}
        chosen: set[int] = set()
        for life in lives.values():
            for lost in losses:
                mine = lost & life.protection.members
                if len(mine) < len(life.seats):  # what all have lost makes nobody different
                    chosen |= life.related(mine)
        for life in lives.values():
            other = next((seat for seat in life.seats if seat not in chosen), None)
            chosen |= set() if other is None else {other}
        return sorted(chosen)

    def _have_fewer(self, source: Source) -> frozenset[int]:
        """Who has records there only since a step that a base which is kept is older than."""
        oldest = min((one.step for one in self._kept.get(source, ())), default=inf)
        return frozenset(seat for seat, since in self._since[source].items() if since > oldest)

    def _ranks(self, life: Life, seats: Collection[int]) -> dict[int, int]:
        there = life.protection.members
        return {seat: rank for rank, seat in enumerate(seat for seat in seats if seat in there)}

    def _bytes(self, life: Life) -> int:
        return max(1, self._scenario.training.state // len(life.seats))

    def _parts(self, source: Source, one: _Kept, seats: Collection[int]) -> list[Holding]:
        ranks, size = self._ranks(one.life, seats), self._bytes(one.life)

        def part(seat: int, where: Source, node: int, everywhere: bool = False) -> Holding:
            return Holding(
                source=where, node="" if everywhere else seat_name(node), step=one.step, rank=ranks[seat],
                world=len(ranks), generation=str(one.life.number), bytes=size, cut_time=0.0, everywhere=everywhere,
            )  # fmt: skip

        if source in _FOR_ALL:
            return [part(seat, source, seat, everywhere=True) for seat in ranks]
        # Where a base is protected, nodes hold their own parts of it in memory as long as the others do.
        own: Source = "memory" if source in ("partner", "parity") else source
        found = [part(seat, own, seat) for seat in ranks if seat not in one.lost]
        if source == "partner":
            held = ((seat, holder) for seat in ranks for holder in one.life.protection.holders.get(seat, ()))
            found += [part(seat, "partner", holder) for seat, holder in held if holder not in one.lost]
        return found

    def _parities(self, one: _Kept, seats: Collection[int]) -> list[ParityHolding]:
        ranks, size = self._ranks(one.life, seats), self._bytes(one.life)
        found = []
        for group in one.life.protection.groups:
            if any(seat not in ranks for seat in group):
                continue  # of those who are not shown
            members = tuple(
                ParityMember(
                    node=seat_name(seat), parts=(ParityPart(rank=ranks[seat], bytes=size, cut_time=0.0, chunks=()),)
                )
                for seat in group
            )
            for member, seat in enumerate(group):
                if seat not in one.lost:
                    record = ParityRecord(
                        format=1, run="0" * 32, generation=str(one.life.number), step=one.step, world=len(ranks),
                        losses=1, member=member, members=members, bytes=size, chunk_bytes=size, chunks=(),
                    )  # fmt: skip
                    found.append(ParityHolding(node=seat_name(seat), record=record))
        return found

    def _records(self, life: Life, log: Log, seats: Collection[int], step: int) -> list[Records]:
        """A chain goes on through lives of the same ranks; who lost its records has them since the life after that."""
        ranks, found = self._ranks(life, seats), list[Records]()
        size = max(1, log.bytes // len(life.seats))
        # Each place keeps what follows the oldest base that it keeps.
        oldest = {source: min(one.step for one in kept) for source, kept in self._kept.items() if kept}

        def add(seat: int, source: Source, node: int, last: int, ring: int = step) -> None:
            if oldest.get(source) is None or node in self._lost_records.get(source, ()):
                return
            first = 1 + max(self._first, oldest[source], self._since.get(source, {}).get(node, 0), step - ring)
            if first <= last:
                everywhere = source in _FOR_ALL
                found.append(
                    Records(source=source, node="" if everywhere else seat_name(node), rank=ranks[seat],
                            world=len(ranks), first=first, last=last, bytes=size, cut_time=0.0, everywhere=everywhere)
                )  # fmt: skip

        for seat in ranks:
            add(seat, "memory", seat, step, RING_SLOTS)
            add(seat, "disk", seat, step // log.flush * log.flush)
            for holder in life.protection.holders.get(seat, ()):
                add(seat, "partner", holder, step - log.partner_lag)
            add(seat, "shared", seat, step // log.shared_group * log.shared_group)
        return found


def _nodes(survey: Survey) -> set[str]:
    held: list[Holding | Records | ParityHolding] = [*survey.holdings, *survey.records, *survey.parities]
    return {one.node for one in held}
