"""After a job is gone for good: the newest step that all nodes together still have, written to a tier as a whole.

That is a base, the records that lead on from it, and the values that they need beside them. All of it comes from
memory, disks and partners, of this node and of those whose keepers answer; what a lost node had of a base is rebuilt
from parity. It needs neither the program nor the job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby

import msgspec

from everstep import image
from everstep.errors import Damaged, EverstepError, NothingToRestore
from everstep.keeper import flush
from everstep.keeper.book import Book, grouped
from everstep.keeper.exchange import ANSWERS, AnyAnswer
from everstep.keeper.note import FleetNote
from everstep.keeper.peers import Peer
from everstep.recover.make_good import Image, rebuild_parts
from everstep.recover.others import remote_shelf
from everstep.recover.plan import make_plan, without
from everstep.recover.reach import nodes_of
from everstep.recover.shelf import RecordImage, Shelf
from everstep.recover.survey import Sources
from everstep.store.frame import format_of
from everstep.store.log import read_log, starts
from everstep.store.manifest import (
    Folder,
    committed_steps,
    read_data,
    read_single_part,
    step_folder,
    values_folder,
)
from everstep.store.tier import Tier
from everstep.types import Frame, Holding, ParityHolding, Plan, Records, Survey

Watch = Callable[[int, int], None]  # is told how many bytes of how many are done
_Bad = tuple[Holding | ParityHolding | Records, str]


class _Reader:
    """Parts and parity, wherever they are."""

    def __init__(self, sources: Sources, note: FleetNote | None) -> None:
        self._sources = sources
        self._peers: dict[str, Peer[AnyAnswer]] = {}
        if note is not None:
            for member in (one for one in note.members if one.node != sources.node):
                self._peers[member.node] = Peer(
                    member.node, member.address, note.secret, ANSWERS, encrypt=note.encrypt
                )  # fmt: skip
        self._shelves: dict[tuple[str, str], Shelf] = {}

    def image(self, holding: Holding) -> Image:
        if holding.everywhere or holding.node == self._sources.node:
            return self._sources.fetch(holding, copy=True)
        data = self._shelf(holding.node, holding.source).image(holding)
        layout, info = image.parse(data, len(data), file=f"rank {holding.rank} of {holding.node}")
        return layout, info, data

    def parity(self, holding: ParityHolding) -> memoryview:
        if holding.node == self._sources.node:
            return self._sources.parity(holding)
        return self._shelf(holding.node, "partner").parity(holding)

    def record(self, records: Records, step: int) -> RecordImage:
        if records.everywhere or records.node == self._sources.node:
            return self._sources.record(records, step, copy=True)
        return self._shelf(records.node, records.source).record(records, step)

    def values(self, holding: Holding) -> Image:
        if holding.everywhere or holding.node == self._sources.node:
            found = self._sources.values(holding, copy=True)
            return found.layout, found.info, found.data
        data = self._shelf(holding.node, holding.source).values_image(holding)
        layout, info = image.parse(data, len(data), file=f"values of rank {holding.rank} of {holding.node}")
        return layout, info, data

    def _shelf(self, node: str, source: str) -> Shelf:
        if (node, source) not in self._shelves:
            self._shelves[node, source] = remote_shelf(self._peers[node], self._sources.run, source)
        return self._shelves[node, source]

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()


def salvage(
    sources: Sources,
    survey: Survey,
    note: FleetNote | None,
    tier: Tier,
    watch: Callable[[int, int], None] | None = None,
) -> int:
    """Write the newest step that can be made whole to a tier; returns it. NothingToRestore if there is none.

    Memory of other nodes is not read: their keepers bring it to their disks when trainers are gone.
    """

    def is_read(held: Holding | Records) -> bool:
        return held.source != "memory" or held.node == sources.node

    survey = msgspec.structs.replace(
        survey, holdings=tuple(filter(is_read, survey.holdings)), values=tuple(filter(is_read, survey.values)),
        records=tuple(filter(is_read, survey.records)), attempts=(),
    )  # fmt: skip
    reader = _Reader(sources, note)
    try:
        while True:
            plan = make_plan(survey, nodes_of(survey))
            if plan.step is None:
                reasons = "".join(f"\n  step {r.step} ({r.source}): {r.reason}" for r in plan.rejections)
                raise NothingToRestore(f"no base can be made whole from what is left{reasons}")
            bad = [] if _has_base(tier, plan, sources.run) else _write(reader, plan, tier, watch)
            bad = (
                bad or _write_records(reader, plan, tier, sources.run) or _write_values(reader, plan, tier, sources.run)
            )
            if not bad:
                return plan.step
            for what, reason in bad:
                survey = without(survey, what, reason)
    finally:
        reader.close()


def _has_base(tier: Tier, plan: Plan, run: str) -> bool:
    """Whether a tier has the base of a plan, by reading all of it."""
    if plan.base not in committed_steps(tier):
        return False
    try:
        for holding in plan.parts:
            read_data(tier, read_single_part(tier, holding.step, holding.rank, run, step_folder))
    except (FileNotFoundError, Damaged):
        return False
    return True


def _write_records(reader: _Reader, plan: Plan, tier: Tier, run: str) -> list[_Bad]:
    """Those that a tier lacks of a plan's, or the first of them that turned out to be bad."""
    assert plan.base is not None
    bad: list[_Bad] = []

    def fetched(rank: int, after: int) -> Iterator[tuple[RecordImage, Frame]]:
        for one in (one for one in plan.records if one.rank == rank):
            for step in range(max(one.first, after + 1), one.last + 1):
                try:
                    found = reader.record(one, step)
                except (EverstepError, OSError) as error:
                    bad.append((msgspec.structs.replace(one, first=step, last=step), str(error)))
                    return
                yield found, Frame(
                    format=format_of(found.gaps), run=run, generation=plan.parts[0].generation, step=step, rank=rank,
                    world=one.world, cut_time=one.cut_time, kind="record", layout=found.layout.digest,
                    ranges=found.ranges, gaps=found.gaps,
                )  # fmt: skip

    for rank in sorted({one.rank for one in plan.records}):
        book = Book(tier, rank, run)
        missing = fetched(rank, _leads_to(tier, rank, run, plan.base))
        for _, alike in groupby(missing, lambda one: one[0].layout.digest):
            for group in grouped(alike, lambda one: len(one[0].data)):
                layout = group[0][0].layout
                book.write(layout.header, layout.digest, [(frame, [found.data]) for found, frame in group])
    return bad


def _write_values(reader: _Reader, plan: Plan, tier: Tier, run: str) -> list[_Bad]:
    """Those that a tier lacks of a plan's, or the first of them that turned out to be bad."""
    for holding in plan.values:
        try:
            part = read_single_part(tier, holding.step, holding.rank, run, values_folder)
            if part.generation == holding.generation and read_data(tier, part, values_folder):
                continue
        except (FileNotFoundError, Damaged):
            pass
        try:
            found = reader.values(holding)
        except (EverstepError, OSError) as error:
            return [(holding, str(error))]
        _put(tier, holding, found, values_folder)
    return []


def _leads_to(tier: Tier, rank: int, run: str, base: int) -> int:
    """The newest step of a rank that a tier's own records lead to from a base."""
    for start in starts(tier, rank):
        if start <= base:
            base = max(base, read_log(tier, start, rank, run).last)
    return base


def _write(reader: _Reader, plan: Plan, tier: Tier, watch: Watch | None) -> list[_Bad]:
    """A base, whole, or what of it turned out to be bad."""
    images: dict[int, Image] = {}
    bad: list[_Bad] = []
    for holding in (one for one in plan.parts if one.source != "parity"):
        try:
            images[holding.rank] = reader.image(holding)
        except (EverstepError, OSError) as error:
            bad.append((holding, str(error)))
    if bad:
        return bad
    bad += rebuild_parts(reader, plan, images)
    if bad:
        return bad
    done, total = 0, sum(part.bytes for part in plan.parts)
    for holding in plan.parts:
        _put(tier, holding, images[holding.rank])
        done += holding.bytes
        if watch is not None:
            watch(done, total)
    first = plan.parts[0]
    if not flush.commit(tier, first.step, range(plan.world), plan.world, first.generation):
        raise Damaged("what was written cannot be read back", tier=tier.name, step=first.step)
    return []


def _put(tier: Tier, holding: Holding, found: Image, folder: Folder = step_folder) -> None:
    flush.put_image(
        tier, found, step=holding.step, generation=holding.generation, cut_time=holding.cut_time, folder=folder
    )  # fmt: skip
