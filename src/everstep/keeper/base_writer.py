"""From the arenas to the disk: the keeper's thread that writes the newest base of all local ranks when it is due."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from everstep.cadence import Every
from everstep.capture.arena import Arena
from everstep.config import Keep
from everstep.errors import Damaged
from everstep.events import Degraded, Persisted, Rejected, Retired, Scavenged, Sink
from everstep.keeper import flush
from everstep.keeper.logbook import Logbook
from everstep.keeper.protocol import Hello, Trouble
from everstep.keeper.replica import Replicas
from everstep.keeper.roster import Roster, unwritten
from everstep.keeper.rounds import Lane, Order
from everstep.keeper.session import SOON_S, TICK_S, Session, lease_all, longer
from everstep.store.disk import DiskTier
from everstep.store.manifest import committed_steps
from everstep.timeline import Kind, Mark
from everstep.types import Part

_AUTO_FLOOR_S = 15.0  # by default a step is written at most this often,
_AUTO_SHARE = 0.1  # and writing takes at most this share of the time
_PATIENCE_S = 60.0  # how long a removal is waited for: one that hangs must not keep bases from the disk


class BaseWriter:
    def __init__(
        self, tier: DiskTier, roster: Roster, logbook: Logbook, replicas: Replicas, emit: Sink,
        announce: Callable[[], None], mark: Mark,
    ) -> None:  # fmt: skip
        """`announce`: tell everybody how far the medium is."""
        self._tier, self._roster, self._logbook, self._replicas = tier, roster, logbook, replicas
        self._emit, self._announce, self._mark = emit, announce, mark
        self._wrote = -1  # the newest base that this keeper made durable itself,
        self._there: tuple[int, ...] = ()  # and all that were there then
        self._last_at = 0.0
        self.took_s = -1.0  # that the last base took; -1: there was none
        self._asked = threading.Event()
        self._retry_at = 0.0
        self._removal: threading.Thread | None = None  # of what the newest base makes needless
        self.failures = 0  # in a row,
        self.trouble = ""  # and the last one
        self.appointed: Callable[[], Order] | None = None  # where all nodes write the same step, which one

    def ask(self) -> None:
        """Somebody waits: do not sleep a whole tick, nor after a failure."""
        self._retry_at = 0.0
        self._asked.set()

    def work(self, ending: threading.Event) -> None:
        rest = TICK_S
        while not ending.is_set():
            self._asked.wait(rest)
            self._asked.clear()
            step, rest = None, longer(rest)
            try:
                for session in self._roster.all():
                    session.let_go_outgrown(self._roster.lock)
                step = self._due()
                if step is not None:
                    self._write(step)
                    self.failures, self.trouble, rest = (
                        0,
                        "",
                        SOON_S,
                    )  # who captures a step when the last is durable has one soon
            except Exception as error:  # whatever it is: the next step is tried again, and nobody is left in the dark
                self.failures, self.trouble = self.failures + 1, str(error)
                self._retry_at = time.monotonic() + min(60.0, 0.5 * 2**self.failures)
                self._emit(unwritten(f"step {step} is not durable yet", error, tier="disk"))
                self._roster.tell(Trouble(reason=str(error)))
        self._has_removed()

    # -- when

    def _due(self) -> int | None:
        sessions = self._roster.ready()
        newest, base = self._roster.newest(), self._logbook.base
        if not sessions or time.monotonic() < self._retry_at:
            return None
        hello = sessions[0].hello
        if self.appointed is not None:
            return self._appointed(self.appointed(), hello, is_alive=any(s.alive for s in sessions))
        if newest is None or newest <= base:
            return None
        if self._is_waited_for(sessions) or hello.every_capture or not any(s.alive for s in sessions):
            return newest
        every = _cadence(hello, self.took_s)
        return newest if every.due(newest, time.monotonic(), base if base >= 0 else None, self._last_at) else None

    def _appointed(self, order: Order, hello: Hello, *, is_alive: bool) -> int | None:
        """The first base at or after the step that all nodes write next.

        When the trainers are gone, every base that is only in memory: which of them all nodes have, nobody may know.
        """
        if order.complete > self._logbook.base:
            flush.commit(self._tier, order.complete, hello.ranks_here, hello.world, hello.generation)
            self._logbook.base = self._newest_committed()
        if is_alive:
            return self._roster.first_base(order.step) if order.step > max(self._wrote, order.complete) else None
        return self._roster.first_base(max(self._wrote, self._logbook.base) + 1)

    def _newest_committed(self) -> int:
        return max(committed_steps(self._tier), default=-1)

    def status(self) -> Lane:
        """How far this node's disk is, for the others."""
        done = self._wrote
        return Lane(done=done, reach=self._logbook.reach(), seconds=max(0.0, self.took_s), there=self._there)

    def _is_waited_for(self, sessions: list[Session]) -> bool:
        """Whether somebody waits for what only a base can give."""
        if self._roster.wanted_base > self._logbook.base:
            return True
        if self._roster.wanted <= self._logbook.reach():
            return False
        rings = [session.ring for session in sessions if session.ring is not None]
        values = [session.values for session in sessions if session.values is not None]
        return len(rings) < len(sessions) or not self._logbook.will_reach(self._roster.wanted, rings, values)

    # -- writing

    def _write(self, step: int) -> None:
        sessions = self._roster.ready()
        began = time.monotonic()
        slots = leased = lease_all(sessions, step)
        arenas = [session.arena for session in sessions]
        if slots is None:
            step = self._replicas.hold(step)
            arenas = [session.replica for session in sessions]
            slots = [replica.slot_of(step) if replica is not None else None for replica in arenas]
        try:
            self._make_room(sum(arena.slot_bytes for arena in arenas if arena is not None))
            size = self._persist(step, sessions, arenas, slots)
        finally:
            for session, slot in zip(sessions, leased or [], strict=False):
                if slot is not None:
                    self._roster.give_back(session, slot)
        if size is None:
            return
        self._has_written(step)
        self._logbook.base = self._newest_committed() if self.appointed is not None else step
        while self._roster.overtaken:
            arena = self._roster.overtaken.pop()
            arena.remove()
            arena.close()
        self._last_at = time.monotonic()
        self.took_s = self._last_at - began
        self._logbook.base_bytes_s = size / max(self.took_s, 1e-9)
        self._mark(Kind.PERSIST, step, began, self._last_at)
        self._emit(Persisted(step=step, bytes=size, seconds=self.took_s, direct=self._tier.wrote_direct))
        if not any(session.alive for session in sessions):
            self._emit(Scavenged(step=step, ranks=tuple(session.hello.rank for session in sessions)))
        self._announce()
        with self._logbook.writing:
            self._logbook.rotate()
        if self._has_removed():  # so that a disk that frees slowly does not fill
            retire = threading.Thread(
                target=self._retire, args=(sessions[0].hello,), name="everstep-remover", daemon=True
            )
            retire.start()
            self._removal = retire
        else:
            reason = f"removing them takes longer than {_PATIENCE_S:g} s"
            self._emit(Degraded(what="old checkpoints are still there", reason=reason, tier="disk"))

    def _has_written(self, step: int) -> None:
        self._there = tuple(committed_steps(self._tier))  # first: a step that is complete is among what all have
        self._wrote = step

    def _persist(
        self, step: int, sessions: list[Session], arenas: list[Arena | None], slots: list[int | None]
    ) -> int | None:
        """Every local rank's part, and the commit; the bytes, or None if not all of it is to be had (yet).

        The last keeper to have its parts in place commits; with several nodes the others have done theirs.
        """
        if None in slots:
            return None
        parts: list[Part] = []
        for session, arena, slot in zip(sessions, arenas, slots, strict=True):
            assert arena is not None and slot is not None
            try:
                part = flush.part_in_place(self._tier, arena, slot, session.hello.run) or flush.persist_part(
                    self._tier, arena, slot, torch_version=session.hello.torch
                )
            except Damaged as error:
                arena.unseal(slot)  # so that the next best is taken
                self._emit(Rejected(step=step, source="memory", reason=str(error)))
                raise
            if part is None:
                return None
            parts.append(part)
        hello, generation = sessions[0].hello, parts[-1].generation
        is_last = flush.commit(self._tier, step, hello.ranks_here, hello.world, generation, parts)
        return sum(one.bytes for one in parts) if is_last or self.appointed is not None else None

    def _make_room(self, size: int) -> None:
        """What is being removed may be the room that the next base needs."""
        if not self._tier.has_room(size):
            self._has_removed()

    def _has_removed(self) -> bool:
        """Whether nothing is being removed any more, after some patience."""
        if self._removal is None:
            return True
        self._removal.join(_PATIENCE_S)
        return not self._removal.is_alive()

    def _retire(self, hello: Hello) -> None:
        """Let go what the newest base makes needless, beside the next one: some disks take long to free blocks."""
        try:
            appointed = self.appointed
            if appointed is None and hello.secret:
                return  # a new life's nodes have not met yet: nobody knows what all of them have
            order = appointed() if appointed is not None else None
            before, everywhere = (None, None) if order is None else (order.complete, order.everywhere)
            keep = Keep(last=hello.keep_last, every=hello.keep_every)
            for gone in flush.retire(self._tier, keep, hello.run, before=before, everywhere=everywhere):
                self._emit(Retired(step=gone, reason="newer checkpoints are committed"))
            flush.clean(self._tier)
            with self._logbook.writing:
                self._logbook.forget(flush.oldest_followed(self._tier, keep, hello.run, before=before))
        except Exception as error:  # the next base tries it again
            self._emit(Degraded(what="old checkpoints are still there", reason=str(error), tier="disk"))

    # -- the keeper's main thread

    def read_back(self, run: str, newest: int) -> None:
        """Memory is about to be given up for what an earlier keeper wrote: only if that is still sound."""
        if newest > self._logbook.base or self._wrote >= newest:
            return
        self._logbook.base = next(flush.sound_steps(self._tier, run), -1)
        if newest <= self._logbook.base:
            self._has_written(newest)
        elif newest in committed_steps(self._tier):
            flush.remove_checkpoint(self._tier, newest)  # damaged; memory has it, and writes it anew


def _cadence(hello: Hello, took_s: float) -> Every:
    """How often a base is written."""
    if hello.every_steps is None and hello.every_s is None:
        return Every(seconds=max(_AUTO_FLOOR_S, took_s / _AUTO_SHARE))
    return Every(steps=hello.every_steps, seconds=hello.every_s)
