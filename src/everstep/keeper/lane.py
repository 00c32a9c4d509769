"""One place beyond this node's own memory, and the thread that brings bases there when they are appointed.

All nodes bring the same step (see `rounds`). A lane holds the slots of every local rank while it works, and where
others read them too, until all have done their parts. Training never waits for it: who needs a slot finds one free.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from everstep.capture.arena import Arena, Seal
from everstep.errors import Damaged
from everstep.events import Degraded, Sink
from everstep.keeper.protocol import Hello
from everstep.keeper.roster import Roster
from everstep.keeper.rounds import NONE, Lane, Order
from everstep.keeper.session import Session, lease_all

_TICK_S = 0.01
_REST_S = 1.0
_TRIES = 3  # of one step; then the others are told not to wait for it


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
    """What a lane does. `shows`: others read the slots until all have done their parts."""

    name: str
    shows: bool

    def do(self, base: HeldBase) -> None:
        """Bring a base there; may be tried again after it raised."""

    def reach(self, base: int) -> int:
        """The newest step that records there lead to from a base that all have brought."""

    def over(self, base: int, before: int) -> None:
        """All nodes have brought `base`, and `before` is the one that they had brought before it."""


class LaneWorker:
    def __init__(self, work: Work, roster: Roster, emit: Sink, order: Callable[[], Order]) -> None:
        """`order`: what is to be done now."""
        self._work, self._roster, self._emit, self._order = work, roster, emit, order
        self._lock = threading.Lock()
        self._held: HeldBase | None = None
        self._done, self._missed, self._seconds = NONE, NONE, 0.0
        self.complete = NONE  # the newest step that all nodes have brought, as far as this one has seen to it
        self._failures, self._retry_at = 0, 0.0

    @property
    def name(self) -> str:
        return self._work.name

    def status(self) -> Lane:
        reach = self._work.reach(self.complete)
        return Lane(done=self._done, missed=self._missed, reach=reach, seconds=self._seconds)

    def held(self, step: int) -> HeldBase | None:
        """The base of a step, if it is held for others to read."""
        with self._lock:
            return self._held if self._held is not None and self._held.step == step else None

    def work(self, ending: threading.Event) -> None:
        while not ending.wait(_TICK_S):
            order = self._order()
            if order.complete > self.complete:
                self._end_round(order.complete)
            if order.step > max(self._done, self._missed) and time.monotonic() >= self._retry_at:
                self._try(order.step)
        self._let_go()

    def _try(self, wanted: int) -> None:
        base = self._hold(wanted)
        if base is None:
            return
        began = time.monotonic()
        try:
            self._work.do(base)
        except Exception as error:  # whatever it is: it is tried again, and nobody is left in the dark
            self._let_go()
            self._failures += 1
            if self._failures >= _TRIES:
                self._missed, self._failures = wanted, 0
            self._retry_at = time.monotonic() + min(30.0, 0.25 * 2**self._failures)
            self._emit(Degraded(what=f"step {base.step} is not {_LEVEL[self.name]} yet", reason=str(error)))
            return
        self._failures, self._done, self._seconds = 0, base.step, time.monotonic() - began
        if not self._work.shows:
            self._let_go()

    def _hold(self, wanted: int) -> HeldBase | None:
        """The first base at or after a step, as soon as all local ranks have it."""
        with self._lock:
            if self._held is not None and self._held.step >= wanted:
                return self._held
        self._let_go()
        sessions = self._roster.ready()
        step = self._roster.first_base(wanted)
        if step is None:
            return None
        slots = lease_all(sessions, step) or []
        held = [(session, slot) for session, slot in zip(sessions, slots, strict=False) if slot is not None]
        if len(held) < len(sessions):
            for session, slot in held:
                self._roster.give_back(session, slot)
            self._missed = wanted
            return None
        with self._lock:
            self._held = HeldBase(step, sessions, [slot for _, slot in held])
            return self._held

    def _let_go(self) -> None:
        with self._lock:
            base, self._held = self._held, None
        if base is not None:
            for session, slot in zip(base.sessions, base.slots, strict=True):
                self._roster.give_back(session, slot)

    def _end_round(self, complete: int) -> None:
        self._let_go()
        if time.monotonic() < self._retry_at:
            return
        try:
            self._work.over(complete, self.complete)
        except Exception as error:  # whatever it is: it is tried again, and nobody is left in the dark
            self._retry_at = time.monotonic() + _REST_S
            self._emit(Degraded(what=f"step {complete} is not {_LEVEL[self.name]} yet", reason=str(error)))
            return
        self.complete = complete


_LEVEL = {"disk": "durable", "protect": "protected", "shared": "on the shared tier", "objects": "in the object store"}
