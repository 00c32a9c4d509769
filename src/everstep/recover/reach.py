"""Which steps could be restored, from where, and what each kind of loss would leave: pure functions of a survey.

A step is kept as a base of its own, or as a base and the records that lead from it to the step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import msgspec

from everstep.recover.plan import reaches, without
from everstep.types import Exposure, Holding, Plan, Records, Source, Survey

_EVENTS: tuple[tuple[str, tuple[Source, ...]], ...] = (
    ("the process dies", ("memory", "disk")),
    ("the machine reboots", ("disk",)),
    ("this disk is lost", ()),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """One restorable step."""

    step: int
    world: int
    bytes: int  # of all ranks: of the base, or of this step's records
    cut_time: float | None  # None: only its record knows
    sources: tuple[Source, ...]  # each of which is enough; none if it takes both
    base: int  # itself, or the step from which records lead to it
    replica: str = ""  # the device whose steps a host repeated to make its base: not bit for bit


def kept_steps(survey: Survey) -> list[Kept]:
    """Every step that a base and whole records lead to, oldest first."""
    nodes = {holding.node for holding in survey.holdings}
    ways = {step: parts for parts, steps in reaches(survey, nodes) for step in steps}
    enough = {source: restorable(only(survey, source)) for source in ("memory", "disk")}
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
                sources=tuple(source for source in ("memory", "disk") if step in enough[source]),
                replica=next((h.replica for h in parts if h.replica), ""),
            )
        )  # fmt: skip
    return kept


def restorable(survey: Survey) -> set[int]:
    nodes = {holding.node for holding in survey.holdings}
    return {step for parts, steps in reaches(survey, nodes) for step in steps}


def only(survey: Survey, *sources: str) -> Survey:
    """What these sources hold."""
    return Survey(
        holdings=tuple(h for h in survey.holdings if h.source in sources),
        records=tuple(r for r in survey.records if r.source in sources),
        values=tuple(v for v in survey.values if v.source in sources),
        rejections=tuple(r for r in survey.rejections if r.source in sources),
    )


def take_away(survey: Survey, lost: Collection[str]) -> Survey:
    """The survey after the loss of sources or nodes, by their names."""
    gone: list[Holding | Records] = [*survey.holdings, *survey.records]
    gone = [one for one in gone if one.source in lost or one.node in lost]
    for holding in (one for one in gone if isinstance(one, Holding)):
        survey = without(survey, holding, f"{holding.source} is taken to be lost")
    return msgspec.structs.replace(
        survey,
        records=tuple(r for r in survey.records if r not in gone),
        values=tuple(v for v in survey.values if v.source not in lost and v.node not in lost),
    )


def newest_in(survey: Survey, source: Source) -> int | None:
    """The newest restorable step of which a source has a whole base, or records."""
    mine = only(survey, source)
    held = {parts[0].step for parts, _ in reaches(mine, {h.node for h in mine.holdings})}
    held |= {step for one in mine.records for step in range(one.first, one.last + 1)}
    return max(held & restorable(survey), default=None)


def exposure(survey: Survey, step: int, cut_time: float, now: float | None) -> list[Exposure]:
    """What would be gone right now, for each kind of event. `now` is None when nobody trains: then work has stopped."""
    kept = kept_steps(survey)
    present = max([k.step for k in kept] + [step], default=0)
    until = now if now is not None else max([_time(k, kept) for k in kept[-1:]] + [cut_time])
    table = []
    for event, survivors in _EVENTS:
        newest = next(reversed(kept_steps(only(survey, *survivors))), None)
        if newest is None:
            table.append(Exposure(event=event, restored_from="nothing", steps=present, seconds=None))
            continue
        source = next(iter(newest.sources), "memory and disk")
        table.append(
            Exposure(
                event=event,
                restored_from=f"{source}, step {newest.step}",
                steps=present - newest.step,
                seconds=max(0.0, until - _time(newest, kept)),
            )
        )
    return table


def _time(one: Kept, kept: Sequence[Kept]) -> float:
    """When a step was done, or at least its base."""
    return one.cut_time or next((k.cut_time or 0.0 for k in kept if k.step == one.base), 0.0)


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
