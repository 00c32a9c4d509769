"""What a keeper knows of one rank, and how it borrows slots from it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import xxhash

from everstep.capture.arena import Arena
from everstep.errors import KeeperLost
from everstep.image import CHUNK_BYTES
from everstep.keeper.logbook import Logbook
from everstep.keeper.protocol import AnyMessage, Channel, Hello, Lease, LeaseAnswer

_LEASE_TIMEOUT_S = 5.0
_TICK_S = 0.05


@dataclass(slots=True)
class Session:
    hello: Hello
    channel: Channel
    watcher: int = -1  # a descriptor that becomes readable when the process ends
    alive: bool = True
    done: bool = False
    arena: Arena | None = None
    ring: Arena | None = None
    values: Arena | None = None
    ring_is_spent: bool = False  # nothing is recorded any more
    outgrown: list[Arena] = field(default_factory=list)  # earlier ones, held until the present one has a seal
    leased: set[int] = field(default_factory=set)

    def tell(self, message: AnyMessage) -> None:
        if self.alive:
            try:
                self.channel.send(message)
            except KeeperLost:
                self.alive = False

    def take_in(self, ring: Arena | None, logbook: Logbook) -> None:
        """A ring follows another, or none: what is left in that one goes to the disk first."""
        if ring is not None and ring.kind == "values":
            self.values = ring
            return
        before, self.ring, self.ring_is_spent = self.ring, ring, False
        try:
            if before is not None:
                logbook.take(before)
        finally:
            if before is not None:
                before.close()
            if ring is None and self.values is not None:
                self.values.close()
                self.values = None

    def let_go_outgrown(self, lock: threading.Lock) -> None:
        """An arena that its state outgrew is needed until its successor has a seal, and again if there never is one."""
        if not self.outgrown or self.arena is None:
            return
        if self.arena.seals():
            while self.outgrown:
                self.outgrown.pop().close()
        elif not self.alive:
            with lock:
                self.arena = self.outgrown.pop()


class Leases:
    """Asks trainers for slots. `answers`: what they say, from whoever hears them."""

    def __init__(self) -> None:
        self.answers: queue.Queue[LeaseAnswer] = queue.Queue()

    def ask(self, session: Session, step: int) -> int | None:
        """The slot of a step, which stays as it is until it is given back; None if it is not to be had."""
        assert session.arena is not None
        if not session.alive:
            slot = session.arena.slot_of(step)
        else:
            while not self.answers.empty():
                self.answers.get_nowait()  # late answers of an earlier question
            session.tell(Lease(step=step))
            slot = self._await_answer(session, step)
        if slot is not None:
            session.leased.add(slot)
        return slot

    def _await_answer(self, session: Session, step: int) -> int | None:
        deadline = time.monotonic() + _LEASE_TIMEOUT_S
        while session.alive and time.monotonic() < deadline:
            try:
                answer = self.answers.get(timeout=_TICK_S)
            except queue.Empty:
                continue
            if answer.step == step:
                return answer.slot
        return None


def check_all(sessions: list[Session], stop: Callable[[], bool]) -> None:
    for session in sessions:
        assert session.arena is not None
        try:
            check_newest(session.arena, stop)
        except ValueError:
            continue  # it was closed in this moment: its successor has a seal


def check_newest(arena: Arena, stop: Callable[[], bool]) -> None:
    """Checksum the newest sealed slot if it has none yet. The trainer is not asked: a changed seal voids the work."""
    seals = arena.seals()
    slot = max(seals, key=lambda s: seals[s].sequence, default=None)
    if slot is None or arena.checks(slot) is not None:
        return
    view, checksums = arena.image(slot), []
    for at in range(0, len(view), CHUNK_BYTES):
        checksums.append(xxhash.xxh3_64_intdigest(view[at : at + CHUNK_BYTES]))
        if stop() or arena.seals().get(slot) != seals[slot]:
            return
    arena.set_checks(slot, seals[slot].sequence, tuple(checksums))
