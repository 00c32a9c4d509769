"""All ranks home at the same step, or none.

Every rank surveys, all see the same union, and the same pure plan follows for all. Then each fetches and checks what
it needs; if any part fails on any rank, all strike it out and plan again. No tensor of the model is touched before all
ranks hold a whole, verified checkpoint. Safe to be killed at any point and run again.
"""

from __future__ import annotations

import msgspec

from everstep.errors import Damaged, EverstepError
from everstep.events import Degraded, Rejected, Sink
from everstep.image import FORMAT
from everstep.recover.assemble import Checkpoint, Image, view
from everstep.recover.plan import make_plan, merge, without
from everstep.recover.survey import ATTEMPTS, Sources
from everstep.store.manifest import encode
from everstep.topology import Topology, exchange
from everstep.types import Attempt, Holding, Plan, Rejection, Survey


class _Report(msgspec.Struct):
    """What one rank found when it fetched."""

    bad: list[tuple[Holding, str]]


def find(sources: Sources, topology: Topology, emit: Sink) -> tuple[Checkpoint, Plan] | None:
    """The newest checkpoint that all ranks can have, verified and in memory; None if the run has no past."""
    mine = msgspec.msgpack.encode((sources.node, sources.survey()))
    answers = [msgspec.msgpack.decode(a, type=tuple[str, Survey]) for a in exchange(mine, topology)]
    nodes = {node for node, _ in answers}
    survey = merge([answer for _, answer in answers])
    had_past = any(r.certain for r in survey.rejections) or any(h.source == "disk" for h in survey.holdings)
    told: set[Rejection] = set()
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
        checkpoint, report = _fetch(sources, plan, topology.rank)
        reports = exchange(msgspec.msgpack.encode(report), topology)
        bad = [pair for answer in reports for pair in msgspec.msgpack.decode(answer, type=_Report).bad]
        if not bad and checkpoint is not None:
            return checkpoint, plan
        had_past = True
        for holding, reason in bad:
            survey = without(survey, holding, reason)


def _fetch(sources: Sources, plan: Plan, rank: int) -> tuple[Checkpoint | None, _Report]:
    images: dict[int, Image] = {}
    bad: list[tuple[Holding, str]] = []
    for holding in plan.parts:
        try:
            images[holding.rank] = sources.fetch(holding)
        except (EverstepError, OSError) as error:
            bad.append((holding, str(error)))
    if bad:
        return None, _Report(bad)
    assert plan.step is not None
    try:
        return view(images, plan.step, rank), _Report([])
    except Damaged as error:
        return None, _Report([(holding, str(error)) for holding in plan.parts])


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
        sources.tier.put(ATTEMPTS, memoryview(encode(record)))
    except (EverstepError, OSError) as failure:  # a full disk must not keep anybody from coming back
        emit(Degraded(what=f"whether loading step {step} goes well is not written down", reason=str(failure)))


def clear_attempt(sources: Sources, emit: Sink) -> None:
    try:
        sources.tier.delete(ATTEMPTS)
    except (EverstepError, OSError) as failure:
        emit(Degraded(what="a finished attempt is still written down", reason=str(failure)))
