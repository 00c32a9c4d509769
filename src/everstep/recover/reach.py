"""Which steps could be restored, from where, and what each kind of loss would leave: pure functions of a survey.

A step is kept as a base of its own, or as a base and the records that lead from it to the step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import get_args

import msgspec

from everstep.recover.plan import reaches, without
from everstep.types import Attempt, Exposure, Holding, Plan, Records, Source, Survey

_HERE: tuple[tuple[str, tuple[Source, ...]], ...] = (  # what is gone from this node
    ("the process dies", ()),
    ("the machine reboots", ("memory", "partner")),
    ("this disk is lost", get_args(Source)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """One restorable step."""

    step: int
    world: int
    bytes: int  # of all ranks: of the base, or of this step's records
    cut_time: float | None  # None: only its record knows
    sources: tuple[Source, ...]  # that have it so, each of which is enough; none if it takes both
    base: int  # itself, or the step from which records lead to it
    replica: str = ""  # the device whose steps a host repeated to make its base: not bit for bit


def kept_steps(survey: Survey) -> list[Kept]:
    """Every step that a base and whole records lead to, oldest first."""
    ways = {step: parts for parts, steps in reaches(survey, nodes_of(survey)) for step in steps}
    alone = {source: _bases_and_steps(only(survey, source)) for source in get_args(Source)}
    sizes: dict[int, dict[int, int]] = {}
    times: dict[int, float] = {}
    for one in survey.records:
        times[one.last] = max(one.cut_time, times.get(one.last, 0.0))
        for step in range(one.first, one.last + 1):
            sizes.setdefault(step, {})[one.rank] = one.bytes
    kept = []
    for step, parts in sorted(ways.items()):
        base = parts[0].step
        own = step == base
        kept.append(
            Kept(
                step=step, base=base, world=parts[0].world,
                bytes=sum(h.bytes for h in parts) if own else sum(sizes[step].values()),
                cut_time=max(h.cut_time for h in parts) if own else times.get(step),
                sources=tuple(one for one, (bases, led_to) in alone.items() if step in (bases if own else led_to)),
                replica=next((h.replica for h in parts if h.replica), ""),
            )
        )  # fmt: skip
    return kept


def restorable(survey: Survey) -> set[int]:
    return _bases_and_steps(survey)[1]


def _bases_and_steps(survey: Survey) -> tuple[set[int], set[int]]:
    """The whole bases, and all steps that these and records lead to."""
    found = reaches(survey, nodes_of(survey))
    return {parts[0].step for parts, _ in found}, {step for _, steps in found for step in steps}


def nodes_of(survey: Survey) -> set[str]:
    """Those that have anything."""
    held: list[Holding | Records] = [*survey.holdings, *survey.records]
    return {one.node for one in held} | {one.node for one in survey.parities}


def only(survey: Survey, *sources: str) -> Survey:
    """What these sources hold."""
    return Survey(
        holdings=tuple(h for h in survey.holdings if h.source in sources),
        records=tuple(r for r in survey.records if r.source in sources),
        values=tuple(v for v in survey.values if v.source in sources),
        parities=survey.parities if "parity" in sources else (),
        rejections=tuple(r for r in survey.rejections if r.source in sources),
    )


def take_away(survey: Survey, lost: Collection[str]) -> Survey:
    """The survey after the loss of sources or nodes, by their names."""
    gone: list[Holding | Records] = [*survey.holdings, *survey.records]
    gone = [one for one in gone if one.source in lost or (one.node in lost and not one.everywhere)]
    for holding in (one for one in gone if isinstance(one, Holding)):
        survey = without(survey, holding, f"{holding.source} is taken to be lost")
    return msgspec.structs.replace(
        survey,
        records=tuple(r for r in survey.records if r not in gone),
        values=tuple(v for v in survey.values if v.source not in lost and (v.everywhere or v.node not in lost)),
        parities=tuple(p for p in survey.parities if "parity" not in lost and p.node not in lost),
    )


def newest_in(survey: Survey, source: Source) -> int | None:
    """The newest restorable step of which a source has a whole base, or records."""
    mine = only(survey, source)
    held = {parts[0].step for parts, _ in reaches(mine, {h.node for h in mine.holdings})}
    held |= {step for one in mine.records for step in range(one.first, one.last + 1)}
    return max(held & restorable(survey), default=None)


def exposure(survey: Survey, node: str, step: int, cut_time: float, now: float | None) -> list[Exposure]:
    """What would be gone right now, for each kind of event on a node.

    `now` is None when nobody trains: then work has stopped.
    """
    kept = kept_steps(survey)
    present = max([k.step for k in kept] + [step], default=0)
    until = now if now is not None else max([_time(k, kept) for k in kept[-1:]] + [cut_time])
    table = []
    for event, gone in _HERE:
        newest = next(reversed(kept_steps(_without_here(survey, node, gone))), None)
        if newest is None:
            table.append(Exposure(event=event, restored_from="nothing", steps=present, seconds=None))
            continue
        source = next(iter(newest.sources), "several places")
        table.append(
            Exposure(
                event=event,
                restored_from=f"{source}, step {newest.step}",
                steps=present - newest.step,
                seconds=max(0.0, until - _time(newest, kept)),
            )
        )
    return table


def _without_here(survey: Survey, node: str, gone: Collection[Source]) -> Survey:
    """What is left when a node loses some of its places. What all nodes see is on none of them."""

    def stays(held: Holding | Records) -> bool:
        return held.everywhere or held.node != node or held.source not in gone

    return Survey(
        holdings=tuple(filter(stays, survey.holdings)), records=tuple(filter(stays, survey.records)),
        values=tuple(filter(stays, survey.values)),
        parities=tuple(p for p in survey.parities if p.node != node or "partner" not in gone),
    )  # fmt: skip


def _time(one: Kept, kept: Sequence[Kept]) -> float:
    """When a step was done, or at least its base."""
    return one.cut_time or next((k.cut_time or 0.0 for k in kept if k.step == one.base), 0.0)


def passed_over(plan: Plan, attempts: Collection[Attempt] = ()) -> dict[int, str]:
    """The steps after a plan's that were there for certain, oldest first, and why they are not taken.

    They are damaged, or somebody began to load them. What is rejected for no one source is incomplete else: as a step
    is that not all ranks had sealed, with which no work is lost.
    """
    newest, tried = -1 if plan.step is None else plan.step, {attempt.step for attempt in attempts}
    lost = [r for r in reversed(plan.rejections) if r.certain and (r.source != "any" or r.step in tried)]
    return {r.step: r.reason for r in lost if r.step > newest}


def in_a_line(step: int, reason: str, directory: str) -> str:
    """For people, of one of them."""
    return f"step {step} was passed over: {reason}; everstep verify {directory}"


def records_of(plan: Plan) -> tuple[int, int]:
    """How many steps a plan repeats, and the bytes that it reads for that."""
    steps = 0 if plan.step is None or plan.base is None else plan.step - plan.base
    return steps, sum(one.bytes * (one.last - one.first + 1) for one in plan.records)


def spans(steps: Iterable[int]) -> list[tuple[int, int]]:
    """Ascending numbers as unbroken runs: first and last of each."""
    runs = groupby(enumerate(steps), key=lambda pair: pair[1] - pair[0])
    return [(found[0][1], found[-1][1]) for _, run in runs for found in [list(run)]]


def in_words(steps: Iterable[int]) -> str:
    """For people: 2, 4 to 9."""
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in spans(steps))
