"""What a keeper knows of one rank, and how it borrows slots from it."""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from everstep.capture.arena import MEMFD, Arena
from everstep.errors import KeeperLost
from everstep.image import CHUNK_BYTES
from everstep.keeper.logbook import Logbook
from everstep.keeper.protocol import (
    AnyMessage,
    Channel,
    Hello,
    Lease,
    LeaseAnswer,
    Release,
    find_runtime_folder,
    leave,
)

_LEASE_TIMEOUT_S = 5.0
TICK_S = 0.05  # between two looks at what trainers have sealed,
SOON_S = 0.01  # and between the first ones after something has happened


def longer(rest_s: float) -> float:
    """How long to rest after a look that found nothing new."""
    return min(TICK_S, 1.5 * rest_s)


@dataclass(slots=True)
class Session:
    hello: Hello
    channel: Channel
    watcher: int = -1  # a descriptor that becomes readable when the process ends
    alive: bool = True
    done: bool = False
    arena: Arena | None = None
    ring: Arena | None = None
    replica: Arena | None = None
    values: Arena | None = None
    ring_is_spent: bool = False  # nothing is recorded any more
    outgrown: list[Arena] = field(default_factory=list)  # earlier ones, held until the present one has a seal
    leased: Counter[int] = field(default_factory=Counter)  # slot -> how many hold it
    leasing: threading.Lock = field(default_factory=threading.Lock)
    answers: queue.Queue[LeaseAnswer] = field(default_factory=queue.Queue)  # to questions for a lease

    def arenas(self) -> list[Arena]:
        """All that this rank has in memory, but for what was outgrown."""
        return [one for one in (self.arena, self.ring, self.values, self.replica) if one is not None]

    def at_rest(self) -> list[Arena]:
        """Those with bases that may be checksummed; a replica changes with every step."""
        return [one for one in (self.arena, None if self.alive else self.replica) if one is not None]

    def tell(self, message: AnyMessage) -> None:
        if self.alive:
            try:
                self.channel.send(message)
            except KeeperLost:
                self.alive = False

    def take_in(self, ring: Arena | None, logbook: Logbook) -> None:
        """A ring follows another, or none: what is left in that one goes to the disk first."""
        if ring is not None and ring.kind == "values":
            before, self.values = self.values, ring
            if before is not None:
                before.close()
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


def lease_all(sessions: list[Session], step: int) -> list[int | None] | None:
    """The slots of a true base; None if there is none of this step."""
    if any(session.arena is None or session.arena.slot_of(step) is None for session in sessions):
        return None
    return [_lease(session, step) for session in sessions]


def _lease(session: Session, step: int) -> int | None:
    """The slot of a step, which stays as it is until all who asked give it back; None if it is not to be had."""
    assert session.arena is not None
    with session.leasing:
        if not session.alive:
            slot = session.arena.slot_of(step)
        else:
            while not session.answers.empty():
                _refuse(session, session.answers.get_nowait())
            session.tell(Lease(step=step))
            slot = _await_answer(session, step)
        if slot is not None:
            session.leased[slot] += 1
        return slot


def give_back(session: Session, slot: int) -> None:
    """The trainer hears of it when nobody else holds the slot."""
    with session.leasing:
        session.leased[slot] -= 1
        if session.leased[slot] <= 0:
            del session.leased[slot]
            session.tell(Release(slot=slot))


def _await_answer(session: Session, step: int) -> int | None:
    deadline = time.monotonic() + _LEASE_TIMEOUT_S
    while session.alive and time.monotonic() < deadline:
        try:
            answer = session.answers.get(timeout=TICK_S)
        except queue.Empty:
            continue
        if answer.step == step:
            return answer.slot
        _refuse(session, answer)
    return None


def _refuse(session: Session, late: LeaseAnswer) -> None:
    """An answer to an earlier question, for which nobody waits any more: the trainer is not to hold that slot."""
    if late.slot is not None and late.slot not in session.leased:
        session.tell(Release(slot=late.slot))


def give_up(arena: Arena) -> None:
    """Free its memory, and the run's directory there if it was the last, unless the keeper's socket lies there too."""
    arena.remove()
    folder = Path(arena.place).parent
    if arena.place != MEMFD and folder != find_runtime_folder(arena.run):
        leave(folder)


def check_all(sessions: list[Session], stop: Callable[[], bool]) -> None:
    for arena in (arena for session in sessions for arena in session.at_rest()):
        try:
            check_newest(arena, stop)
        except ValueError:
            continue  # it was closed in this moment: its successor has a seal


def check_newest(arena: Arena, stop: Callable[[], bool]) -> None:
    """Checksum the newest sealed slot if it has none yet. The trainer is not asked: a changed seal voids the work."""
    seals = arena.seals()
    slot = max(seals, key=lambda s: seals[s].sequence, default=None)
    if slot is None or arena.checks(slot) is not None:
        return
    view, found = arena.image(slot), []
    for at in range(0, len(view), CHUNK_BYTES):
        found.append(xxhash.xxh3_64_intdigest(view[at : at + CHUNK_BYTES]))
        if stop() or arena.seals().get(slot) != seals[slot]:
            return
    arena.set_checks(slot, seals[slot].sequence, tuple(found))


def checksums(arena: Arena, slot: int) -> tuple[int, ...]:
    """Those of a slot that is leased."""
    known = arena.checks(slot)
    if known is None:
        view = arena.image(slot)
        known = tuple(xxhash.xxh3_64_intdigest(view[at : at + CHUNK_BYTES]) for at in range(0, len(view), CHUNK_BYTES))
        arena.set_checks(slot, arena.seals()[slot].sequence, known)
    return known
