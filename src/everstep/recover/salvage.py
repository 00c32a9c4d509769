"""After a job is gone for good: the newest base that all nodes together still have, written to a tier as a whole.

Parts come from memory, disks and partners, of this node and of those whose keepers answer; what a lost node had is
rebuilt from parity. It needs neither the program nor the job.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from everstep import image
from everstep.errors import Damaged, EverstepError, NothingToRestore
from everstep.image import CHUNK_BYTES, FORMAT
from everstep.keeper import flush
from everstep.keeper.exchange import ANSWERS, AnyAnswer, RemoteTier
from everstep.keeper.note import FleetNote
from everstep.keeper.peers import Peer
from everstep.recover.make_good import Image, rebuild_parts
from everstep.recover.plan import make_plan, without
from everstep.recover.shelf import Shelf
from everstep.recover.survey import Sources
from everstep.store.manifest import committed_steps, data_name, encode, part_name
from everstep.store.tier import Tier
from everstep.types import Holding, ParityHolding, Part, Plan, Survey, Survives

Watch = Callable[[int, int], None]  # is told how many bytes of how many are done


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

    def _shelf(self, node: str, source: str) -> Shelf:
        if source == "disk":
            tier = RemoteTier(self._peers[node], "disk", Survives.REBOOT)
            return Shelf(tier, self._sources.run, source="disk", node=node)
        tier = RemoteTier(self._peers[node], "guests", Survives.PROCESS)
        return Shelf(tier, self._sources.run, source="partner", node=node, commits=False)

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
    """Write the newest base that can be made whole to a tier; returns its step. NothingToRestore if there is none.

    Memory of other nodes is not read: their keepers bring it to their disks when trainers are gone.
    """
    kept = tuple(h for h in survey.holdings if h.source != "memory" or h.node == sources.node)
    survey = msgspec.structs.replace(survey, holdings=kept, records=(), values=(), attempts=())
    reader = _Reader(sources, note)
    try:
        while True:
            plan = make_plan(survey, {h.node for h in survey.holdings} | {p.node for p in survey.parities})
            if plan.step is None:
                reasons = "".join(f"\n  step {r.step} ({r.source}): {r.reason}" for r in plan.rejections)
                raise NothingToRestore(f"no base can be made whole from what is left{reasons}")
            bad = [] if plan.step in committed_steps(tier) else _write(reader, plan, tier, watch)
            if not bad:
                return plan.step
            for what, reason in bad:
                survey = without(survey, what, reason)
    finally:
        reader.close()


def _write(reader: _Reader, plan: Plan, tier: Tier, watch: Watch | None) -> list[tuple[Holding | ParityHolding, str]]:
    """One step, whole, or what of it turned out to be bad."""
    images: dict[int, Image] = {}
    bad: list[tuple[Holding | ParityHolding, str]] = []
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


def _put(tier: Tier, holding: Holding, found: Image) -> None:
    layout, info, data = found
    for leftover in (part_name(holding.step, holding.rank), data_name(holding.step, holding.rank)):
        tier.delete(leftover)
    chunks = tier.put(data_name(holding.step, holding.rank), data)
    part = Part(
        format=FORMAT, run=info.run, generation=holding.generation, step=holding.step, rank=holding.rank,
        world=holding.world, bytes=len(data), chunk_bytes=CHUNK_BYTES, chunks=chunks, pieces=layout.pieces,
        cut_time=holding.cut_time or time.time(), torch="", replica=info.replica,
    )  # fmt: skip
    tier.put(part_name(holding.step, holding.rank), memoryview(encode(part)))
