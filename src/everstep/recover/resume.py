"""Back into the objects: a base is copied, the steps after it are repeated, and what stands beside them is put back.

If repeating leads to another state than training did (a digest says so), all ranks begin again with the last step that
was proven.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

from everstep import topology
from everstep.capture.collector import uncollected
from everstep.capture.layout import Listing
from everstep.capture.position import Feed
from everstep.capture.reserve import Reserve
from everstep.errors import Diverged, Mismatch
from everstep.events import Degraded, Rejected, Replayed, Sink, say
from everstep.recover.assemble import Checkpoint
from everstep.recover.load import Found, clear_attempt, find, note_attempt
from everstep.recover.reach import in_a_line, passed_over
from everstep.recover.rebuild import advanced
from everstep.recover.replay import as_many_threads, replay
from everstep.recover.restore import check
from everstep.recover.state import State
from everstep.recover.survey import Sources
from everstep.timeline import Kind, Mark, unmarked
from everstep.topology import Topology


@dataclass(frozen=True, slots=True)
class Resumed:
    latest: Checkpoint
    base: int  # the step from which records led to it
    source: str  # for people

    def tell(self, directory: Path, *, is_over: bool) -> None:
        over = ", where it had come to its end: nothing is left to do" if is_over else ""
        say(f"{directory} goes on from step {self.latest.step} ({self.source}){over}")


def resume(
    sources: Sources, state: State, feed: Feed | None, place: Topology, *, strict: bool, emit: Sink,
    mark: Mark = unmarked, reserve: Reserve | None = None,
) -> Resumed | None:  # fmt: skip
    """Stand where the newest restorable step ended, on every rank; None if there is no past.

    `reserve`: of memory for the captures that follow, filled while something slow is read.
    """
    arrived = began = time.monotonic()
    limit: int | None = None
    lost: dict[int, str] = {}
    attempts = sources.attempts()  # before this one is among them
    while True:
        with uncollected():
            listing = state.subjects.listing()  # to know what is needed, and then where to put it
        found = find(sources, place, emit, limit, subjects=state.subjects, listing=listing, reserve=reserve)
        if found is None:
            return None
        lost |= passed_over(found.plan, attempts)
        step, loaded = found.latest.step, time.monotonic()
        mark(Kind.LOAD, step, began, loaded)
        limit = _try(sources, found, state, listing, feed, place, strict=strict, emit=emit)
        began = time.monotonic()
        if found.chain is not None:
            mark(Kind.REPLAY, step, loaded, began)
        if limit is None:
            break
    for newer, reason in sorted(lost.items()) if place.rank == 0 else ():
        say(in_a_line(newer, reason, sources.directory))  # which people would else find out from a step's number
    state.reductions.restore(found.latest.extras.get("reductions"), place, emit)
    if found.base.info.replica:
        what = f"step {found.base.step} comes from a replica: the run goes on, but not bit for bit"
        reason = f"it was advanced by host arithmetic, which rounds otherwise than that of {found.base.info.replica}"
        emit(Degraded(what=what, reason=reason))
    topology.exchange(b"", place)  # nobody forgets the attempt before all are through
    if place.is_leader:
        clear_attempt(sources, emit)
    mark(Kind.RECOVERY, found.latest.step, arrived, time.monotonic())
    kinds = {part.source for part in found.plan.parts} | {one.source for one in found.plan.records}
    return Resumed(found.latest, found.base.step, " and ".join(sorted(kinds, reverse=True)))


def _try(
    sources: Sources, found: Found, state: State, listing: Listing, feed: Feed | None, place: Topology, *, strict: bool,
    emit: Sink,
) -> int | None:  # fmt: skip
    """None if all went well; else the last step that the records are good for."""
    try:
        if found.views is None:
            differing = state.restore(found.base, strict=strict, listing=listing)
        else:  # tensors come when the steps are repeated
            differing = check(found.base, state.subjects, listing, strict=strict)
        if found.chain is not None and differing:
            return _passed_over(found, differing, place, emit)
        if found.chain is not None:
            limit = _replay(found, state, place, strict=strict, emit=emit)
            if limit is not None:
                return limit
        state.restore_rest(found.latest, is_record=found.chain is not None, strict=strict)
        placed = _place(found, feed, strict=strict)
    except Mismatch:
        if place.rank == 0:
            clear_attempt(sources, emit)  # the program is to blame, not the checkpoint
        raise
    except Exception as error:
        if place.rank == 0:
            note_attempt(sources, found.latest.step, emit, error=f"{type(error).__name__}: {error}")
        raise
    differing += _agreed(placed, sources, place, emit)
    if differing:
        emit(Degraded(what="loaded with strict=False", reason="; ".join(differing)))
    unused = state.unused_settings(found.latest)
    if unused:
        emit(Degraded(what="the optimizer goes on with the settings that it had", reason="; ".join(unused)))
    return None


def _place(found: Found, feed: Feed | None, *, strict: bool) -> list[str] | Mismatch:
    """Let the data stand where they stood: how they differ, or why this rank refuses."""
    if feed is None or found.latest.extras["position"] is None:
        return []
    stood = [one for one in found.latest.positions if one is not None]
    try:
        return feed.restore(found.latest.extras["position"], stood, strict=strict)
    except Mismatch as error:
        return error


def _agreed(placed: list[str] | Mismatch, sources: Sources, place: Topology, emit: Sink) -> list[str]:
    """What one rank refuses all do: others would wait for it, and know no reason."""
    refusal = placed if isinstance(placed, Mismatch) else None
    told = [answer.decode() for answer in topology.exchange(str(refusal or "").encode(), place)]
    rank = next((rank for rank, words in enumerate(told) if words), None)
    if rank is not None and place.rank == 0:
        clear_attempt(sources, emit)  # the program is to blame, not the checkpoint
    if isinstance(placed, Mismatch):
        raise placed
    if rank is not None:
        raise Mismatch(f"on rank {rank}: {told[rank]}")
    return placed


def _passed_over(found: Found, differing: list[str], place: Topology, emit: Sink) -> int:
    """What another program consumed cannot be repeated by this one: its base alone is taken."""
    reason = f"the program has changed, so the steps after {found.base.step} cannot be repeated: {differing[0]}"
    what = f"step {found.latest.step} is passed over for step {found.base.step}"
    emit(Degraded(what=what, reason=reason))
    return found.base.step


def _replay(found: Found, state: State, place: Topology, *, strict: bool, emit: Sink) -> int | None:
    """Repeat the chain in place, or beside the state if ranks had other parts; None, or the last step that is good."""
    assert found.chain is not None
    wanted, good, reason = found.latest.step, found.latest.step, "it diverged on another rank"
    began, rebuilt = time.monotonic(), None
    is_exact = not found.base.info.replica  # else training had other bits than digests tell
    try:
        if found.views is None:
            consumed = found.chain.consumed
            consumed = consumed if is_exact else [replace(one, digest=None) for one in consumed]
            with as_many_threads(found.latest.extras):
                replay(state.subjects, consumed, place)
        else:
            rebuilt = advanced(
                found.views, found.chain, place.rank if found.latest.own else 0, program=state.subjects,
                compares=found.base.world != place.world, proves=is_exact,
            )  # fmt: skip
    except Diverged as error:
        good, reason = max(error.proven or 0, found.base.step), str(error)
    good = min(int(answer) for answer in topology.exchange(str(good).encode(), place))
    if good < wanted:
        emit(Rejected(step=wanted, source="any", reason=reason))
        if place.rank == 0:
            say(f"step {wanted} is passed over for step {good}: {reason}")
        return good
    if rebuilt is not None:
        state.restore(rebuilt.checkpoint, strict=strict)
    steps = wanted - found.base.step
    emit(Replayed(rank=place.rank, base=found.base.step, steps=steps, seconds=time.monotonic() - began))
    return None
