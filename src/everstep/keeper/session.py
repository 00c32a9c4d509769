"""What a keeper knows of one rank, and how it borrows slots from it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from everstep.cadence import Every
from everstep.capture.arena import MEMFD, Arena
from everstep.errors import KeeperLost
from everstep.image import CHUNK_BYTES
from everstep.keeper.logbook import Logbook
from everstep.keeper.protocol import AnyMessage, Channel, Hello, Lease, LeaseAnswer, find_runtime_folder, leave

_LEASE_TIMEOUT_S = 5.0
_TICK_S = 0.05
_MANY_NODES_STRIDE = 50
_AUTO_FLOOR_S = 15.0  # by default a step is written at most this often,
_AUTO_SHARE = 0.1  # and writing takes at most this share of the time


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
    leased: set[int] = field(default_factory=set)

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


def newest_common(sessions: list[Session], wanted: int) -> int | None:
    """The newest step that every local rank has sealed, in one generation.

    Among several keepers only the steps that all of them would choose: every so many, and what is waited for.
    """
    stride = 1
    sealed = []
    for session in sessions:
        if session.hello.local < session.hello.world:
            stride = session.hello.every_steps or _MANY_NODES_STRIDE
        assert session.arena is not None
        sealed.append(_sealed(session.arena))
    common = set.intersection(*sealed) if sealed else set()
    return max((step for step, _ in common if step % stride == 0 or step == wanted), default=None)


def newest_replica(sessions: list[Session]) -> int | None:
    """The newest step of which the replicas of all ranks are sealed; only where all ranks are on this node."""
    if not sessions or len(sessions) < sessions[0].hello.world:
        return None
    sealed = [_sealed(session.replica) if session.replica is not None else set() for session in sessions]
    return max((step for step, _ in set.intersection(*sealed)), default=None)


def cadence(hello: Hello, flush_took_s: float) -> Every:
    """How often a base is written."""
    if hello.every_steps is None and hello.every_s is None:
        return Every(seconds=max(_AUTO_FLOOR_S, flush_took_s / _AUTO_SHARE))
    return Every(steps=hello.every_steps, seconds=hello.every_s)


def _sealed(arena: Arena) -> set[tuple[int, str]]:
    return {(seal.step, seal.generation) for seal in arena.seals().values()}


class Leases:
    """Asks trainers for slots. `answers`: what they say, from whoever hears them."""

    def __init__(self) -> None:
        self.answers: queue.Queue[LeaseAnswer] = queue.Queue()

    def ask_all(self, sessions: list[Session], step: int) -> list[int | None] | None:
        """The slots of a true base; None if there is none of this step."""
        if any(session.arena is None or session.arena.slot_of(step) is None for session in sessions):
            return None
        return [self.ask(session, step) for session in sessions]

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
    view, checksums = arena.image(slot), []
    for at in range(0, len(view), CHUNK_BYTES):
        checksums.append(xxhash.xxh3_64_intdigest(view[at : at + CHUNK_BYTES]))
        if stop() or arena.seals().get(slot) != seals[slot]:
            return
    arena.set_checks(slot, seals[slot].sequence, tuple(checksums))
