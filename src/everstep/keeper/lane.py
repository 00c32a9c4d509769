"""One place beyond this node's own memory, and the thread that brings bases there when they are appointed.

All nodes bring the same step (see `rounds`). A lane holds the slots of every local rank while it works. Where what it
brings is worth something only beside this node's own part, as partners' copies and parity are, it holds them until all
have brought a newer step. Training never waits for it: who needs a slot finds one free.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from everstep.capture.arena import Arena, Seal
from everstep.errors import Damaged
from everstep.events import Brought, Sink
from everstep.keeper.protocol import Hello
from everstep.keeper.roster import Roster, unwritten
from everstep.keeper.rounds import NONE, Lane, Order
from everstep.keeper.session import SOON_S, Session, lease_all, longer
from everstep.keeper.transit import CalledOff
from everstep.timeline import Kind, Mark
from everstep.types import Source

_REST_S = 1.0
_TRIES = 3  # of one step; then the others are told not to wait for it
_ASK_AGAIN_S = 0.25  # after a trainer had no slot to lend
_ROOM = 4  # slots: one is written, the newest two stay, and one is held for as long as it takes


@dataclass(frozen=True, slots=True)
class HeldBase:
    """A base that stays as it is: the slot of every local rank."""

    step: int
    sessions: list[Session]
    slots: list[int]

    @property
    def hello(self) -> Hello:
        return self.sessions[0].hello

    def images(self) -> list[tuple[Arena, int, Seal]]:
        """Of every rank. Damaged if its state has changed its shape, and its arena with it, since the slot was held."""
        found = []
        for session, slot in zip(self.sessions, self.slots, strict=True):
            arena = session.arena
            seal = arena.seals().get(slot) if arena is not None else None
            if arena is None or seal is None or seal.step != self.step:
                raise Damaged("it is no longer held", tier="memory", step=self.step, rank=session.hello.rank)
            found.append((arena, slot, seal))
        return found


class Work(Protocol):
    """What a lane does. `stays`: the slots are held until all have brought a newer base."""

    name: str
    tier: Source  # as readers know what it brings
    stays: bool

    def do(self, base: HeldBase) -> int:
        """Bring a base there, and say how many bytes were moved for it; may be tried again after it raised.

        CalledOff: nobody wants it any more.
        """

    def reach(self, base: int) -> int:
        """The newest step that records there lead to from a base that all have brought."""

    def over(self, base: int, before: int) -> None:
        """All nodes have brought `base`, and `before` is the one that they had brought before it."""


class LaneWorker:
    def __init__(self, work: Work, roster: Roster, emit: Sink, order: Callable[[], Order], mark: Mark) -> None:
        """`order`: what is to be done now."""
        self._work, self._roster, self._emit, self._order, self._mark = work, roster, emit, order, mark
        self._lock = threading.Lock()
        self._held: HeldBase | None = None  # what is being brought,
        self._kept: HeldBase | None = None  # and what all have brought, where that stays
        self._has_begun = not work.stays
        self._done, self._missed, self._seconds = NONE, NONE, 0.0
        self.complete = NONE  # the newest step that all nodes have brought, as far as this one has seen to it
        self._failures, self._retry_at = 0, 0.0
        self._cancels = 0

    @property
    def name(self) -> str:
        return self._work.name

    def status(self) -> Lane:
        reach = self._work.reach(self.complete)
        return Lane(done=self._done, missed=self._missed, reach=reach, seconds=self._seconds, cancels=self._cancels)

    def cancel(self) -> None:
        """What all are bringing is not wanted any more: with the next report all hear of it."""
        self._cancels += 1

    def held(self, step: int) -> HeldBase | None:
        """The base of a step, if it is held for others to read."""
        with self._lock:
            return self._held if self._held is not None and self._held.step == step else None

    def work(self, ending: threading.Event) -> None:
        rest = SOON_S
        while not ending.wait(rest):
            before = self._done, self.complete
            self._turn(self._order())
            rest = SOON_S if (self._done, self.complete) != before else longer(rest)
        self._let_go()
        self._give_back(self._kept)

    def _turn(self, order: Order) -> None:
        if not self._has_begun:
            self._begin()
        if order.complete > self.complete:
            self._end_round(order.complete)
        if order.step > self._done and time.monotonic() >= self._retry_at:
            self._try(order.step)  # also one that was missed, if all still wait for it

    def _begin(self) -> None:
        """What the run went on from is all that it has, until all have brought something newer."""
        sessions = self._roster.ready()
        past = sessions[0].hello.resumed_from if sessions else None
        if not sessions or time.monotonic() < self._retry_at:
            return
        is_there = past is not None and all(s.arena is not None and s.arena.slot_of(past) is not None for s in sessions)
        if past is not None and is_there:
            self._keep(past)
        self._has_begun = self._kept is not None or not is_there or not _has_room(sessions)

    def _try(self, wanted: int) -> None:
        base = self._hold(wanted)
        if base is None:
            return
        began = time.monotonic()
        try:
            size = self._work.do(base)
        except CalledOff:
            self._let_go()
            return
        except Exception as error:  # whatever it is: it is tried again, and nobody is left in the dark
            self._let_go()
            self._failures += 1
            if self._failures >= _TRIES:
                self._missed, self._failures = wanted, 0
            self._retry_at = time.monotonic() + min(30.0, 0.25 * 2**self._failures)
            self._complain(base.step, error)
            return
        ended = time.monotonic()
        self._failures, self._done, self._seconds = 0, base.step, ended - began
        if size:
            self._mark(Kind.PROTECT if self.name == "protect" else Kind.FLUSH, base.step, began, ended)
            self._emit(Brought(step=base.step, tier=self._work.tier, bytes=size, seconds=self._seconds))
        if not self._work.stays:
            self._let_go()

    def _hold(self, wanted: int) -> HeldBase | None:
        """The first base at or after a step, as soon as all local ranks have it."""
        with self._lock:
            if self._held is not None and self._held.step >= wanted:
                return self._held
        step = self._roster.first_base(wanted)
        base = self._lease(step) if step is not None else None
        if base is None:
            self._missed = max(self._missed, wanted if step is not None else NONE)
            return None
        if self._work.stays and self._held is not None:
            self._done = self.complete  # what was brought of another step is worth nothing any more
        self._let_go()
        with self._lock:
            self._held = base
        return base

    def _lease(self, step: int) -> HeldBase | None:
        sessions = self._roster.ready()
        slots = lease_all(sessions, step) or []
        base = HeldBase(step, sessions, [slot for slot in slots if slot is not None])
        if sessions and len(base.slots) == len(sessions):
            return base
        self._retry_at = time.monotonic() + _ASK_AGAIN_S
        for session, slot in zip(sessions, slots, strict=False):
            if slot is not None:
                self._roster.give_back(session, slot)
        return None

    def _let_go(self) -> None:
        with self._lock:
            base, self._held = self._held, None
        self._give_back(base)

    def _give_back(self, base: HeldBase | None) -> None:
        if base is not None:
            for session, slot in zip(base.sessions, base.slots, strict=True):
                self._roster.give_back(session, slot)

    def _keep(self, step: int) -> None:
        """What all have brought stays on this node, too. With too few slots it does not: captures need one."""
        base: HeldBase | None = None
        with self._lock:
            if self._held is not None and self._held.step == step:
                base, self._held = self._held, None
        if base is None and _has_room(self._roster.ready()):
            base = self._lease(step)
        elif base is not None and not _has_room(base.sessions):
            self._give_back(base)
            base = None
        before, self._kept = self._kept, base
        self._give_back(before)

    def _end_round(self, complete: int) -> None:
        if time.monotonic() < self._retry_at:
            return
        if self._work.stays:
            self._keep(complete)
        else:
            self._let_go()
        try:
            self._work.over(complete, self.complete)
        except Exception as error:  # whatever it is: it is tried again, and nobody is left in the dark
            self._retry_at = time.monotonic() + _REST_S
            self._complain(complete, error)
            return
        self.complete = complete

    def _complain(self, step: int, error: Exception) -> None:
        self._emit(unwritten(f"step {step} is not {_LEVEL[self.name]} yet", error, tier=self._work.tier))


def _has_room(sessions: list[Session]) -> bool:
    return all(s.arena is not None and len(s.arena.slots) >= _ROOM for s in sessions)


_LEVEL = {"disk": "durable", "protect": "protected", "shared": "on the shared tier", "objects": "in the object store"}
