"""One per node: owns everything slow, so that no trainer ever waits for a medium.

A session is what the keeper knows of one rank: its conversation, its arena, whether it lives. The keeper looks at the
seals in the arenas, decides when the newest step that all local ranks have sealed is due, leases its slots, writes
them, commits, and tells. When the trainers are gone it writes the newest sealed step (scavenging), waits a while for
them to come back, and ends; it removes arenas only once what they hold is durable.

States of a session: `alive` -> `gone` (closed or killed) or `done` (said goodbye for good).
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from pathlib import Path

from everstep.capture.arena import MEMFD, Arena
from everstep.config import Keep
from everstep.errors import Damaged, KeeperLost
from everstep.events import Degraded, Persisted, Rejected, Retired, Scavenged, Sink
from everstep.keeper import flush
from everstep.keeper.logbook import Logbook
from everstep.keeper.pace import Pace
from everstep.keeper.protocol import (
    AnyMessage,
    AskReplica,
    Attach,
    Bye,
    Channel,
    Detach,
    Durable,
    Hello,
    Inherit,
    Inherited,
    LeaseAnswer,
    Persist,
    Release,
    StopAt,
    Trouble,
    Welcome,
)
from everstep.keeper.replica import Replicas
from everstep.keeper.session import Leases, Session, cadence, check_all, give_up, newest_common, newest_replica
from everstep.store.manifest import committed_steps
from everstep.store.places import Places

_TICK_S = 0.05
_LOG_TICK_S = 0.02  # between two looks at the rings
_CHECK_SHARE = 0.1  # checksumming slots that nobody writes takes at most this share of a core
_PATIENCE_S = 86400.0  # how long an arena is held that cannot be made durable
_INLINE_PATIENCE_S = 30.0


class Keeper:
    def __init__(self, directory: Path, emit: Sink, *, inline: bool = False) -> None:
        """`inline`: a thread of the trainer, which waits for it; so it does not insist where a medium fails."""
        self._inline = inline
        self.tier = Places.written(directory).disk_tier()
        self._emit = emit
        self._sessions: dict[int, Session] = {}
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._leases = Leases()
        self._generation = ""
        self._overtaken: list[Arena] = []  # of ranks that the present life no longer has
        self._wanted = -1  # a step that somebody waits for,
        self._wanted_base = -1  # or for its base
        self._logbook = Logbook(self.tier, emit)
        self._replicas = Replicas(directory, emit, self._sessions, self._selector)
        self._pace = Pace(self._logbook, emit)
        self._writing_log = threading.Lock()
        self._durable_base = max(committed_steps(self.tier), default=-1)
        self._wrote = -1  # the newest base that this keeper made durable itself
        self._last_flush_at, self._last_flush_took = 0.0, -1.0  # -1: there was none
        self._retry_at, self._failures, self._log_failures = 0.0, 0, 0
        self._idle_since = time.monotonic()
        self._ending = threading.Event()
        self._asked = threading.Event()  # somebody waits: do not sleep a whole tick,
        self._log_asked = threading.Event()  # nor after a failure
        self._threads = [
            threading.Thread(target=self._flush_loop, name="everstep-flush", daemon=True),
            threading.Thread(target=self._check_loop, name="everstep-check", daemon=True),
            threading.Thread(target=self._log_loop, name="everstep-log", daemon=True),
        ]

    @property
    def durable_step(self) -> int:
        """The newest step that a reboot would leave: a base on the disk, and the records that follow it there."""
        return self._logbook.reach(self._durable_base)

    # -- the conversation

    def serve(self, listener: socket.socket | None, channels: list[Channel]) -> None:
        """Talk until there is nobody left to talk to and nothing left to do."""
        if listener is not None:
            self._selector.register(listener, selectors.EVENT_READ, self._accept)
        for channel in channels:
            self._add(channel)
        for thread in self._threads:
            thread.start()
        while not self._may_end():
            for key, _ in self._selector.select(_TICK_S):
                key.data(key.fileobj)
            self._let_go_rings()
        self._ending.set()
        self._log_asked.set()
        for thread in self._threads:
            thread.join()
        self._replicas.end()
        self._remove_spent_arenas()

    def _accept(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        self._add(Channel(connection))

    def _add(self, channel: Channel) -> None:
        self._selector.register(channel.connection, selectors.EVENT_READ, lambda _: self._hear(channel))

    def _hear(self, channel: Channel) -> None:
        heard = channel.receive()
        session = next((s for s in self._sessions.values() if s.channel is channel), None)
        if heard is None:
            self._selector.unregister(channel.connection)
            channel.close()
            if session is not None:
                self._lose(session)
            return
        message, descriptors = heard
        try:
            self._answer(channel, session, message, descriptors)
        except KeeperLost:
            return  # it died while we spoke; the selector will say so
        except Exception as error:
            self._emit(Degraded(what=f"{type(message).__name__} came to nothing", reason=str(error)))
            try:
                channel.send(Trouble(reason=str(error)))  # it may wait for an answer
            except KeeperLost:
                return

    def _answer(self, channel: Channel, session: Session | None, message: AnyMessage, descriptors: list[int]) -> None:
        match message:
            case Hello():
                self._welcome(channel, message)
            case Attach() if session is not None:
                arena = Arena(descriptors[0], descriptors[1:], message.place)
                arena.populate()
                if arena.kind in ("log", "values"):
                    self._take_in(session, arena)
                else:
                    with self._lock:
                        if session.arena is not None:
                            session.outgrown.append(session.arena)
                        session.arena = arena
                self._replicas.show(arena)
            case Detach() if session is not None:
                session.ring_is_spent = True
            case LeaseAnswer():
                self._leases.answers.put(message)
            case Persist():
                self._wanted = max(self._wanted, message.step)
                if message.as_base:
                    self._wanted_base = max(self._wanted_base, message.step)
                self._retry_at = 0.0  # whoever waits wants to know now
                self._asked.set()
                self._log_asked.set()
                if self.durable_step >= message.step:
                    channel.send(self._durable())
            case StopAt():
                self._tell_all(message)
            case Inherit():
                known = [a for s in self._sessions.values() for a in (*s.outgrown, *s.arenas())]
                held = [a for a in known if a.place == MEMFD]
                counts = tuple(len(arena.descriptors) for arena in held)
                channel.send(Inherited(counts=counts), [d for arena in held for d in arena.descriptors])
            case AskReplica():
                channel.send(self._replicas.state or Trouble(reason="there is no replica"))
            case Bye() if session is not None:
                session.done = message.final
                session.alive = False
                self._idle_since = time.monotonic()
            case _:
                channel.send(Trouble(reason=f"the keeper does not understand {type(message).__name__} now"))

    def _durable(self) -> Durable:
        return Durable(
            step=self.durable_step, base=self._durable_base, base_write_s=self._last_flush_took,
            record_write_s=self._pace.flush_s,
        )  # fmt: skip

    def _take_in(self, session: Session, ring: Arena | None) -> None:
        with self._writing_log:
            session.take_in(ring, self._logbook)

    def _let_go_rings(self) -> None:
        """A ring that nothing is recorded into any more is needed until all ranks have a base that is as new."""
        for session in [s for s in self._sessions.values() if s.ring_is_spent]:
            newest = newest_common(self._ready(), self._wanted)
            if session.ring is not None and newest is not None and newest >= session.ring.live().step:
                self._take_in(session, None)

    def _welcome(self, channel: Channel, hello: Hello) -> None:
        with self._lock:
            earlier = self._sessions.get(hello.rank)
            session = Session(hello, channel)
            if hello.generation != self._generation:
                self._begin_life(hello)
            if earlier is not None:
                self._lose(earlier)
                session.arena, session.leased, session.outgrown = earlier.arena, earlier.leased, earlier.outgrown
                session.ring, session.values, session.replica = earlier.ring, earlier.values, earlier.replica
                session.ring_is_spent = earlier.ring_is_spent
            with self._writing_log:
                self._logbook.open(hello)
            self._sessions[hello.rank] = session
            try:
                session.watcher = os.pidfd_open(hello.pid)
                self._selector.register(session.watcher, selectors.EVENT_READ, lambda _: self._lose(session))
            except OSError:
                session.watcher = -1  # the socket alone will tell
        self._replicas.follow(session)
        channel.send(Welcome(leased=tuple(session.leased)))

    def _begin_life(self, hello: Hello) -> None:
        """The first trainer of a new life: what was passed over at its recovery makes room."""
        self._generation = hello.generation
        for gone in [self._sessions.pop(rank) for rank in list(self._sessions) if rank >= hello.world]:
            self._overtaken += [arena for arena in (gone.arena, gone.ring, gone.replica) if arena is not None]
        with self._writing_log:
            self._logbook.overtake(hello)
        for step in flush.set_aside(self.tier, hello.resumed_from, hello.run, hello.generation):
            self._emit(Retired(step=step, reason=f"newer than step {hello.resumed_from}, from which the run went on"))
        self._durable_base = max(committed_steps(self.tier), default=-1)

    def _lose(self, session: Session) -> None:
        if session.watcher >= 0:
            self._selector.unregister(session.watcher)
            os.close(session.watcher)
            session.watcher = -1
        session.alive = False
        self._idle_since = time.monotonic()

    def _tell_all(self, message: AnyMessage) -> None:
        for session in list(self._sessions.values()):
            session.tell(message)

    # -- writing

    def _flush_loop(self) -> None:
        while not self._ending.is_set():
            self._asked.wait(_TICK_S)
            self._asked.clear()
            step = None
            try:
                for session in list(self._sessions.values()):
                    session.let_go_outgrown(self._lock)
                step = self._due()
                if step is not None:
                    self._flush(step)
                    self._failures = 0
            except Exception as error:  # whatever it is: the next step is tried again, and nobody is left in the dark
                self._failures += 1
                self._retry_at = time.monotonic() + min(60.0, 0.5 * 2**self._failures)
                self._emit(Degraded(what=f"step {step} is not durable yet", reason=str(error)))
                self._tell_all(Trouble(reason=str(error)))

    def _ready(self) -> list[Session]:
        """The local ranks with arenas, if all of this node's are here."""
        with self._lock:
            sessions = list(self._sessions.values())
        complete = sessions and all(s.arena is not None for s in sessions)
        return sessions if complete and len(sessions) >= sessions[0].hello.local else []

    def _newest(self, sessions: list[Session]) -> int | None:
        """The newest step of which all local ranks have a base, be it their replicas'."""
        found = (newest_common(sessions, self._wanted), newest_replica(sessions))
        return max((step for step in found if step is not None), default=None)

    def _due(self) -> int | None:
        sessions = self._ready()
        newest = self._newest(sessions)
        if newest is None or newest <= self._durable_base or time.monotonic() < self._retry_at:
            return None
        hello = sessions[0].hello
        if self._is_waited_for(sessions) or hello.every_capture or not any(s.alive for s in sessions):
            return newest
        last = self._durable_base if self._durable_base >= 0 else None
        every = cadence(hello, self._last_flush_took)
        return newest if every.due(newest, time.monotonic(), last, self._last_flush_at) else None

    def _is_waited_for(self, sessions: list[Session]) -> bool:
        """Whether somebody waits for what only a base can give."""
        if self._wanted_base > self._durable_base:
            return True
        if self._wanted <= self.durable_step:
            return False
        rings = [session.ring for session in sessions if session.ring is not None]
        return len(rings) < len(sessions) or not self._logbook.will_reach(self._wanted, self._durable_base, rings)

    def _flush(self, step: int) -> None:
        sessions = self._ready()
        hello = sessions[0].hello
        began = time.monotonic()
        leased = self._leases.ask_all(sessions, step)
        arenas = [session.replica if leased is None else session.arena for session in sessions]
        slots = leased
        if slots is None:
            step = self._replicas.hold(step)
            slots = [replica.slot_of(step) if replica is not None else None for replica in arenas]
        try:
            if None in slots:
                return
            total, generation = 0, ""
            for session, arena, slot in zip(sessions, arenas, slots, strict=True):
                assert arena is not None and slot is not None
                try:
                    part = flush.persist_part(self.tier, arena, slot, torch_version=session.hello.torch)
                except Damaged as error:
                    arena.unseal(slot)  # so that the next best is taken
                    self._emit(Rejected(step=step, source="memory", reason=str(error)))
                    raise
                if part is None:
                    return
                total, generation = total + part.bytes, part.generation
            if not flush.commit(self.tier, step, hello.ranks_here, hello.world, generation):
                return  # the last keeper to have its parts in place commits
        finally:
            for session, slot in zip(sessions, leased or [], strict=False):
                if slot is not None:
                    self._release(session, slot)
        self._durable_base = self._wrote = step
        while self._overtaken:
            arena = self._overtaken.pop()
            arena.remove()
            arena.close()
        self._last_flush_at, self._last_flush_took = time.monotonic(), time.monotonic() - began
        self._emit(Persisted(step=step, bytes=total, seconds=self._last_flush_took, direct=self.tier.wrote_direct))
        if not any(session.alive for session in sessions):
            self._emit(Scavenged(step=step, ranks=tuple(session.hello.rank for session in sessions)))
        self._tell_all(self._durable())
        for gone in flush.retire(self.tier, Keep(last=hello.keep_last, every=hello.keep_every), hello.run):
            self._emit(Retired(step=gone, reason="newer checkpoints are committed"))
        flush.clean(self.tier)
        with self._writing_log:
            self._logbook.rotate()
            self._logbook.forget(min(committed_steps(self.tier), default=-1))

    def _log_loop(self) -> None:
        """Take records from the rings as they come. While one flush runs the next records gather: the group commit."""
        rest = _TICK_S
        while not self._ending.is_set():
            self._log_asked.wait(rest)
            self._log_asked.clear()
            rest = _LOG_TICK_S
            try:
                self._take_records()
                self._log_failures = 0
            except Exception as error:  # whatever it is: rings hold the records, and nobody is left in the dark
                self._log_failures += 1
                rest = min(60.0, 0.5 * 2**self._log_failures)
                self._emit(Degraded(what="records are not durable yet", reason=str(error)))
                self._tell_all(Trouble(reason=str(error)))

    def _take_records(self) -> None:
        before, sessions = self.durable_step, list(self._sessions.values())
        is_urgent = self._wanted > before or not any(session.alive for session in sessions)
        found = [session.values for session in sessions if session.values is not None]
        with self._writing_log:
            self._logbook.hold_values(found, [session.ring for session in sessions if session.ring is not None])
        for session in sessions:
            with self._writing_log:
                if session.ring is not None:
                    self._pace.take(session.ring, session.hello, is_urgent=is_urgent or session.ring_is_spent)
        with self._writing_log:
            self._logbook.save_values(found, torch_version=sessions[0].hello.torch if sessions else "")
        if self.durable_step > before:
            self._tell_all(self._durable())

    def _release(self, session: Session, slot: int) -> None:
        """To whoever holds that rank now: a lease may outlive the trainer that granted it."""
        current = self._sessions.get(session.hello.rank, session)
        session.leased.discard(slot)
        current.leased.discard(slot)
        current.tell(Release(slot=slot))

    # -- checking

    def _check_loop(self) -> None:
        """Give the newest sealed slots their checksums, at leisure; at once when their trainer is gone."""
        rest = _TICK_S
        while not self._ending.wait(rest):
            began, sessions = time.monotonic(), self._ready()
            check_all(sessions, self._ending.is_set)
            busy = time.monotonic() - began
            rest = max(_TICK_S, busy / _CHECK_SHARE if any(s.alive for s in sessions) else 0.0)

    # -- ending

    def _may_end(self) -> bool:
        sessions = list(self._sessions.values())
        if any(s.alive for s in sessions):
            return False
        idle = time.monotonic() - self._idle_since
        linger = max((s.hello.linger_s for s in sessions), default=30.0)
        if sessions and all(s.done for s in sessions):
            linger = 0.0
        if idle < linger:
            return False
        patience_s = _INLINE_PATIENCE_S if self._inline else _PATIENCE_S
        gives_up = idle > patience_s or (self._inline and self._failures + self._log_failures > 0)
        newest = self._newest(self._ready())
        if newest is not None and newest <= self._durable_base and self._wrote < newest:
            self._read_back(sessions[0].hello.run, newest)
        is_held = any(s.outgrown or self._is_behind(s) for s in sessions)
        return gives_up or not (is_held or (newest is not None and newest > self._durable_base))

    def _is_behind(self, session: Session) -> bool:
        return session.ring is not None and self._logbook.is_behind(session.ring, self._durable_base)

    def _read_back(self, run: str, newest: int) -> None:
        """Memory is about to be given up for what an earlier keeper wrote: only if that is still sound."""
        self._durable_base = next(flush.sound_steps(self.tier, run), -1)
        if newest <= self._durable_base:
            self._wrote = newest
        elif newest in committed_steps(self.tier):
            flush.remove_checkpoint(self.tier, newest)  # damaged; memory has it, and writes it anew

    def _remove_spent_arenas(self) -> None:
        ready = self._ready()
        newest = self._newest(ready)
        if not ready or (newest is not None and newest > self._durable_base):
            return
        for session in ready:
            for arena in session.arenas():
                if arena is session.ring and self._is_behind(session):
                    continue
                give_up(arena)
