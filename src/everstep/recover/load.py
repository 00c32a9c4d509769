"""All ranks home at the same step, or none.

Every rank surveys, all see the same union, and the same pure plan follows for all. Then each fetches and checks what
it needs; if any part fails on any rank, all strike it out and plan again. No tensor of the model is touched before all
ranks hold a whole, verified checkpoint. Safe to be killed at any point and run again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import torch
import xxhash

from everstep.capture.layout import Listing, Subjects
from everstep.capture.pinned import cuda_devices, pinned_until_let_go
from everstep.capture.reserve import Reserve
from everstep.capture.stepped import places
from everstep.errors import Damaged, EverstepError
from everstep.events import Degraded, Fetched, Rejected, Sink
from everstep.image import FORMAT
from everstep.recover.assemble import Checkpoint, Image, view, whole_views
from everstep.recover.carry import Carrier
from everstep.recover.chain import BadRecord, Chain, fetch_chain
from everstep.recover.make_good import rebuild_parts
from everstep.recover.needs import Needs
from everstep.recover.plan import leaving_out, make_plan, merge, up_to, without
from everstep.recover.survey import ATTEMPTS, Sources
from everstep.store.blocks import room_for
from everstep.store.manifest import put_record
from everstep.topology import Topology, exchange
from everstep.types import Attempt, Holding, ParityHolding, Place, Plan, Records, Rejection, Room, Survey


class Report(msgspec.Struct):
    """What one rank found when it fetched."""

    bad: list[tuple[Holding, str]]
    bad_records: list[tuple[Records, str]] = []
    bad_parities: list[tuple[ParityHolding, str]] = []


@dataclass(frozen=True, slots=True)
class Found:
    """A past to go on from: a base, and the chain of records that follows it, if any."""

    base: Checkpoint
    chain: Chain | None
    plan: Plan
    views: Callable[[int], Checkpoint] | None = (
        None  # all of the base, if the chain cannot be repeated in place: ranks had other parts
    )

    @property
    def latest(self) -> Checkpoint:
        """Everything but what optimizers update, as of the newest step."""
        return self.chain.last if self.chain is not None else self.base


Past = TypeVar("Past")
Fetch = Callable[[Carrier, Plan, int], tuple[Past | None, Report]]  # what a rank needs of a plan, and what of it is bad


def find(
    sources: Sources, topology: Topology, emit: Sink, limit: int | None = None, *, subjects: Subjects | None = None,
    listing: Listing | None = None, reserve: Reserve | None = None,
) -> Found | None:  # fmt: skip
    """The newest checkpoint that all ranks can have, verified and in memory; None if the run has no past.

    `limit`: no step after this one, because the way there was found to be wrong. `subjects`: only what they need;
    `listing`: of them. `reserve`: of memory for the captures that follow.
    """
    needs = Needs(subjects, topology.rank, topology.world, listing)
    stepped = exchange(_digest(places(subjects) if subjects is not None else None), topology)
    devices = cuda_devices(subjects) if subjects is not None else ()
    with pinned_until_let_go(devices, room_for) as room:

        def fetch(carrier: Carrier, plan: Plan, rank: int) -> tuple[Found | None, Report]:
            if reserve is not None:
                _begin(reserve, plan, sources, topology, devices)
            return _fetch(needs, stepped, carrier, plan, rank, room)

        return search(sources, topology, emit, fetch, limit=limit)


def _begin(
    reserve: Reserve, plan: Plan, sources: Sources, topology: Topology, devices: Collection[torch.device]
) -> None:
    """What this rank captures will be as large as its part of what is read; it needs none if memory is gone on with."""
    me = (topology.rank, topology.world)
    own = next((part for part in plan.parts if (part.rank, part.world) == me), None)
    if own is not None and not any((arena.rank, arena.world) == me for arena in sources.arenas):
        read = [one.bytes for one in (*plan.parts, *plan.values)]  # at most: some may be read where they lie
        read += [one.record.bytes for one in plan.parities]
        read += [one.bytes * (one.last - one.first + 1) for one in plan.records]
        reserve.begin(own.bytes, sum(read), devices)


def search(
    sources: Sources, topology: Topology, emit: Sink, fetch: Fetch[Past], *, limit: int | None = None,
    passed_over: Collection[int] = (),
) -> Past | None:  # fmt: skip
    """The same for whoever needs other things of a checkpoint: `fetch` gets them, on every rank."""
    mine = msgspec.msgpack.encode((sources.node, sources.survey()))
    answers = [msgspec.msgpack.decode(a, type=tuple[str, Survey]) for a in exchange(mine, topology)]
    nodes = {node for node, _ in answers}
    survey = leaving_out(up_to(merge([answer for _, answer in answers]), limit), passed_over)
    had_past = any(r.certain for r in survey.rejections) or any(h.source != "memory" for h in survey.holdings)
    had_past |= bool(survey.parities)
    told: set[Rejection] = set()
    carrier = Carrier(sources, topology)
    while True:
        plan = make_plan(survey, nodes)
        if topology.rank == 0:
            for rejection in (r for r in plan.rejections if r not in told):
                emit(Rejected(step=rejection.step, source=rejection.source, reason=rejection.reason))
        told.update(plan.rejections)
        if plan.step is None:
            if had_past:
                raise _nothing_left(plan)
            return None
        if topology.rank == 0:
            note_attempt(sources, plan.step, emit)
        found, report = fetch(carrier, plan, topology.rank)
        answered = exchange(msgspec.msgpack.encode(report), topology)
        reports = [msgspec.msgpack.decode(answer, type=Report) for answer in answered]
        bad: list[tuple[Holding | Records | ParityHolding, str]] = []
        for one in reports:
            bad += [*one.bad, *one.bad_records, *one.bad_parities]
        if not bad and found is not None:
            for source, (size, seconds) in carrier.took.items():
                emit(Fetched(rank=topology.rank, source=source, bytes=size, seconds=seconds))
            return found
        had_past = True
        for what, reason in bad:
            survey = without(survey, what, reason)


def _digest(stepped: dict[str, Place] | None) -> bytes:
    return xxhash.xxh3_128_digest(msgspec.json.encode(stepped, order="deterministic"))


def _repeats_in_place(chain: Chain, stepped: list[bytes]) -> bool:
    """Whether every rank now steps what the old rank of its number did, or all ranks have and had everything."""
    old = [_digest(places) for places in chain.stepped.values()]
    if len(old) == len(stepped):
        return old == stepped
    return {*old, *stepped} == {_digest(None)} and not (chain.had_own and len(old) > 1)


def _fetch(
    needs: Needs, stepped: list[bytes], carrier: Carrier, plan: Plan, rank: int, room: Room
) -> tuple[Found | None, Report]:
    """`stepped`: what the optimizers of each rank step now, as digests."""
    chain, bad_chain = None, Report([])
    try:
        chain = fetch_chain(carrier, plan, rank)
    except BadRecord as error:
        if isinstance(error.what, Holding):
            bad_chain = Report([(error.what, error.reason)])
        else:
            bad_chain = Report([], [(error.what, error.reason)])
    if not carrier.is_agreed(bad_chain == Report([])):
        return None, bad_chain
    in_place = chain is None or _repeats_in_place(chain, stepped)
    images: dict[int, Image] = {}
    bad: list[tuple[Holding, str]] = []
    for holding in plan.parts:
        if holding.source == "parity":
            continue
        try:
            images[holding.rank] = carrier.image(holding, needs if in_place and not plan.parities else None, room)
        except (EverstepError, OSError) as error:
            bad.append((holding, str(error)))
    bad_parities: list[tuple[ParityHolding, str]] = []
    is_whole = carrier.is_agreed(not bad)
    if plan.parities and is_whole:
        bad_parities = rebuild_parts(carrier, plan, images)
    base: Checkpoint | None = None
    if is_whole and not bad_parities:
        assert plan.base is not None
        try:
            base = view(images, plan.base, needs)
        except Damaged as error:
            bad = [(holding, str(error)) for holding in plan.parts]
    if not carrier.is_agreed(not bad and not bad_parities) or base is None:
        return None, Report(bad, [], bad_parities)
    return Found(base, chain, plan, None if in_place else whole_views(images, base.step)), Report([])


def _nothing_left(plan: Plan) -> Damaged:
    reasons = "\n  ".join(f"step {r.step} ({r.source}): {r.reason}" for r in plan.rejections)
    return Damaged(
        "this run has checkpoints, but none can be restored. Nothing was changed; repair one of them, or start over in "
        f"another directory.\n  {reasons}"
    )


# -- readers that did not come back


def note_attempt(sources: Sources, step: int, emit: Sink, error: str = "") -> None:
    """Write down that this step is being loaded, before anything can go wrong with it."""
    earlier = next((a for a in sources.attempts() if a.step == step), None)
    count = (earlier.count if earlier else 0) + (0 if error else 1)
    record = Attempt(format=FORMAT, step=step, count=max(1, count), error=error)
    try:
        sources.tier.delete(ATTEMPTS)
        put_record(sources.tier, ATTEMPTS, record)
    except (EverstepError, OSError) as failure:  # a full disk must not keep anybody from coming back
        emit(Degraded(what=f"whether loading step {step} goes well is not written down", reason=str(failure)))


def clear_attempt(sources: Sources, emit: Sink) -> None:
    try:
        sources.tier.delete(ATTEMPTS)
    except (EverstepError, OSError) as failure:
        emit(Degraded(what="a finished attempt is still written down", reason=str(failure)))
