"""Whether what is kept is sound: every byte against its checksum, and if asked every step against its digest.

Reading needs no torch; repeating steps does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from everstep import image
from everstep.errors import Diverged, EverstepError
from everstep.recover.plan import make_plan, reaches, up_to, without
from everstep.recover.reach import nodes_of, only, restorable
from everstep.recover.shelf import Shelf
from everstep.recover.survey import Sources
from everstep.store.log import log_folder, log_name, rank_of, read_log, scan, segments
from everstep.store.tier import Tier
from everstep.topology import process_alive
from everstep.types import Holding, Plan, Records, Source, Survey


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The outcome of one check: of a part of a base, of a file of the log, of a ring, or of repeated steps."""

    step: int
    source: Source
    rank: int
    bytes: int
    problem: str  # empty if all is well
    checked: bool = True
    file: str = ""  # of the log
    note: str = ""
    node: str = ""  # another one than this
    asked: bool = True  # False: nobody there answers, and `note` says why


Check = tuple[int, Callable[[], Finding]]  # its bytes, and what reads them
VALUES_NOTE = "values beside the records"


def not_asked(node: str, reason: str) -> Finding:
    """Of another node it is only known that it does not answer."""
    return Finding(
        step=0, source="disk", rank=-1, bytes=0, problem="", checked=False, note=reason, node=node, asked=False
    )


def check_part(sources: Sources, holding: Holding) -> Finding:
    problem = ""
    try:
        layout, _, _ = sources.fetch(holding, copy=holding.source == "memory")
        if holding.source != "memory" and sources.shelves[holding.source].pieces(holding) != layout.pieces:
            problem = "its manifest lists other tensors than its image has"
    except (EverstepError, OSError) as error:
        problem = str(error)
    return Finding(
        step=holding.step, source=holding.source, rank=holding.rank, bytes=holding.bytes, problem=problem,
        checked=holding.checked,
    )  # fmt: skip


def check_values(sources: Sources, holding: Holding) -> Finding:
    """What stood beside the gradients of a step, where records have it apart."""
    problem = ""
    try:
        sources.values(holding, copy=holding.source == "memory")
    except (EverstepError, OSError) as error:
        problem = str(error)
    return Finding(
        step=holding.step, source=holding.source, rank=holding.rank, bytes=holding.bytes, problem=problem,
        checked=holding.checked, note=VALUES_NOTE,
    )  # fmt: skip


def check_rejections(sources: Sources, survey: Survey) -> list[Finding]:
    """What the survey could not use, but for the log, of which `check_log` says more."""
    known = set()
    for shelf in sources.shelves.values():
        try:
            known |= {scan(shelf.tier, start, rank, sources.run).problem for start, rank in log_files(shelf.tier)}
        except (EverstepError, OSError) as error:
            known.add(str(error))
    return [
        Finding(step=r.step, source="disk" if r.source == "any" else r.source, rank=-1, bytes=0, problem=r.reason)
        for r in survey.rejections
        if r.reason not in known
    ]


def log_files(tier: Tier) -> list[tuple[int, int]]:
    """The step after which each file of the log begins, and its rank."""
    found = [(start, rank_of(name)) for start in segments(tier) for name in tier.names(log_folder(start))]
    return [(start, rank) for start, rank in found if rank is not None]


def check_log(shelf: Shelf, start: int, rank: int, limit: int | None = None) -> Finding:
    """One file, every byte of it. A tail that a crash tore is no damage: nobody was told that it was kept.

    `limit`: what comes after this step does not matter.
    """
    try:
        log = read_log(shelf.tier, start, rank, shelf.run)
        size = shelf.tier.size(log.name)
    except (EverstepError, OSError) as error:
        return Finding(
            step=start + 1, source=shelf.source, rank=rank, bytes=0, problem=str(error), file=log_name(start, rank)
        )
    matters = bool(log.problem) and (limit is None or log.last < limit)
    problem = log.problem if matters and not log.torn else ""
    note = f"{_records(len(log.records))} after step {start}"
    if matters and log.torn:
        note += f"; {log.problem}"
    return Finding(
        step=log.last + bool(problem), source=shelf.source, rank=rank, bytes=size, problem=problem, file=log.name,
        note=note,
    )  # fmt: skip


def _records(count: int) -> str:
    return "1 record" if count == 1 else f"{count} records"


def check_rings(sources: Sources) -> Iterator[Finding]:
    """Records in memory carry no checksums; their headers are looked at."""
    for ring in (ring for ring in sources.rings if ring.kind == "log"):
        seals = ring.seals()
        for slot, seal in seals.items():
            data = ring.image(slot)
            header = bytes(data[: image.header_bytes(data)])
            try:
                image.parse_cached(header, len(data), ring.place)
            except EverstepError as error:
                yield Finding(
                    step=seal.step,
                    source="memory",
                    rank=ring.rank,
                    bytes=seal.length,
                    problem=str(error),
                    checked=False,
                )
        if seals:
            newest = max(seal.step for seal in seals.values())
            yield Finding(
                step=newest, source="memory", rank=ring.rank, bytes=ring.slot_bytes * len(seals), problem="",
                checked=False, note=f"{_records(len(seals))} in the ring",
            )  # fmt: skip


def is_training(sources: Sources) -> bool:
    arenas = (*sources.arenas, *sources.rings)
    return any(process_alive(arena.pid) for arena in arenas if arena.kind != "replica")


def sound_plan(sources: Sources, survey: Survey) -> Plan:
    """The plan whose every byte is good, but for memory that is being trained in, and what is on other nodes."""
    nodes = nodes_of(survey)
    is_changing = is_training(sources)

    def is_steady(held: Holding | Records) -> bool:
        is_here = held.everywhere or held.node == sources.node
        return is_here and held.source != "parity" and not (is_changing and held.source == "memory")

    while True:
        plan = make_plan(survey, nodes)
        looked_at = [(h, check_part(sources, h)) for h in plan.parts if is_steady(h)]
        bad: list[tuple[Holding | Records, str]] = [(h, finding.problem) for h, finding in looked_at if finding.problem]
        values = [(v, check_values(sources, v)) for v in plan.values if is_steady(v)]
        bad += [(v, finding.problem) for v, finding in values if finding.problem]
        bad += _bad_records(sources, [r for r in plan.records if is_steady(r)])
        if not bad:
            return plan
        for what, problem in bad:
            survey = without(survey, what, problem)


def _bad_records(sources: Sources, found: list[Records]) -> list[tuple[Records, str]]:
    """The first of some records that is no good."""
    for one in found:
        for step in range(one.first, one.last + 1):
            try:
                sources.record(one, step)
            except (EverstepError, OSError) as error:
                return [(msgspec.structs.replace(one, first=step, last=step), str(error))]
    return []


# -- by repeating


def chains(sources: Sources, survey: Survey, step: int | None) -> list[Plan]:
    """What to repeat so that every record is, or those that lead to a step: as the disk has it, then what is newer."""
    disk = only(survey, "disk")
    newest = max(restorable(disk), default=-1)
    newer = [plan for plan in _chains(sources, survey, step) if plan.step is not None and plan.step > newest]
    return _chains(sources, disk, step) + newer


def _chains(sources: Sources, survey: Survey, step: int | None) -> list[Plan]:
    """From each base to the next one, from the last as far as records lead."""
    whole = reaches(survey, {sources.node})
    bases = sorted({parts[0].step for parts, _ in whole})
    found = []
    for parts, steps in whole:
        base = parts[0].step
        end = min([steps[-1], *(b for b in bases if b > base)][:2]) if step is None else step
        if base < end <= steps[-1] and (step is None or not any(base < b < end for b in bases)):
            limited = up_to(survey, end)
            held = tuple(h for h in limited.holdings if h.step == base)
            found.append(
                make_plan(Survey(holdings=held, records=limited.records, values=limited.values), {sources.node})
            )
    return [plan for plan in found if plan.records]


def check_chain(sources: Sources, survey: Survey, plan: Plan) -> Finding:
    """Repeat the steps of a plan, and compare with the digests of training, and with the base of the last step."""
    from everstep.recover.assemble import whole_views
    from everstep.recover.chain import BadRecord, fetch_chain
    from everstep.recover.rebuild import NeedsProgram, differs_from, rebuild

    assert plan.step is not None and plan.base is not None
    read_from = {part.source for part in plan.parts} | {one.source for one in plan.records}
    source: Source = "memory" if "memory" in read_from else "disk"
    size = sum(one.bytes * (one.last - one.first + 1) for one in plan.records)

    def finding(problem: str = "", note: str = "") -> Finding:
        return Finding(step=int(plan.step or 0), source=source, rank=-1, bytes=size, problem=problem, note=note)

    def fetched(parts: tuple[Holding, ...], step: int) -> Callable[[int], Any]:
        return whole_views({h.rank: sources.fetch(h, copy=True) for h in parts}, step)

    repeated = f"steps {plan.base + 1} to {plan.step} repeated from base {plan.base}"
    try:
        chain = fetch_chain(sources, plan, 0, copy=True)
        assert chain is not None
        rebuilt = rebuild(fetched(plan.parts, plan.base), chain, 0)
        following = [parts for parts, _ in reaches(survey, {sources.node}) if parts[0].step == plan.step]
        other = differs_from(rebuilt, fetched(following[-1], plan.step)(0)) if following else None
    except NeedsProgram as error:
        return finding(note=f"not repeated: {error}")
    except Diverged as error:
        return finding(f"{repeated}: {error}")
    except (BadRecord, EverstepError, OSError) as error:
        return finding(f"{repeated}: {error}")
    if other is not None:
        return finding(f"{repeated}: {other} is not what base {plan.step} has")
    proven = f"base {plan.step}" if following else f"a digest of step {rebuilt.proven}"
    known = "no digest among them" if not following and rebuilt.proven is None else f"proven by {proven}"
    return finding(note=f"{repeated}, {known}")
