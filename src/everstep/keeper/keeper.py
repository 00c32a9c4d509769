"""One per node: owns everything slow, so that no trainer ever waits for a medium.

A session is what the keeper knows of one rank: its conversation, its arena, whether it lives. This is where all of
them speak and are answered, on one thread; others write bases (`base_writer`) and records (`record_writer`) and check
what nobody writes. When the trainers are gone it writes the newest sealed step (scavenging), waits a while for them to
come back, and ends; it removes arenas only once what they hold is durable.

States of a session: `alive` -> `gone` (closed or killed) or `done` (said goodbye for good).
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from everstep.capture.arena import MEMFD, Arena
from everstep.errors import KeeperLost
from everstep.events import Degraded, Retired, Sink
from everstep.keeper import flush
from everstep.keeper.base_writer import BaseWriter
from everstep.keeper.copies import Takers
from everstep.keeper.council import Council
from everstep.keeper.deeper import DeeperWork
from everstep.keeper.guests import forget_passed_over
from everstep.keeper.halting import Halting
from everstep.keeper.logbook import Logbook
from everstep.keeper.metrics import Metrics, Tally
from everstep.keeper.protocol import (
    AnyMessage,
    AskDurable,
    AskReplica,
    Attach,
    BaseAt,
    Bye,
    Cancel,
    Channel,
    Convene,
    Detach,
    Durable,
    Enrol,
    Flush,
    Free,
    Hello,
    Inherit,
    Inherited,
    Join,
    LeaseAnswer,
    Persist,
    Stand,
    StopAt,
    Stuck,
    Trouble,
    Welcome,
)
from everstep.keeper.record_writer import RecordWriter
from everstep.keeper.replica import Replicas
from everstep.keeper.roster import Roster
from everstep.keeper.rounds import NONE, VALUES
from everstep.keeper.session import TICK_S, Session, check_all, give_up
from everstep.store.manifest import committed_steps
from everstep.store.places import Places, guest_tier
from everstep.tiers import Tiers, gather, parse, tier_name
from everstep.timeline import Mark, unmarked
from everstep.topology import node_name

if TYPE_CHECKING:
    from everstep.keeper.fleet import Fleet
    from everstep.keeper.scrape import Scrape

_CHECK_SHARE = 0.1  # checksumming slots that nobody writes takes at most this share of a core
_PATIENCE_S = 86400.0  # how long an arena is held that cannot be made durable
_INLINE_PATIENCE_S = 30.0
_FAREWELL_S = 10.0  # until other nodes must have heard how the run ended,
_LAST_FLUSH_S = 120.0  # and until deeper tiers must have what is left of one that did not


class Keeper:
    def __init__(self, directory: Path, emit: Sink, *, inline: bool = False, mark: Mark = unmarked) -> None:
        """`inline`: a thread of the trainer, which waits for it; so it does not insist where a medium fails."""
        tally = Tally(emit, mark)
        emit, mark = tally.emit, tally.mark
        self._inline, self._emit, self._mark = inline, emit, mark
        self._tier = Places.written(directory).disk_tier()
        self._selector = selectors.DefaultSelector()
        self._generation = ""
        self._base_at = NONE  # the newest step at which a rank of this node has asked all for a base, in this life
        self._has_many_nodes = False
        self._roster = Roster()
        self._takers = Takers()
        self._logbook = Logbook(self._tier, emit, lambda ring, step: self._takers.has_taken(self, ring, step))
        self._logbook.base = self._newest_committed()
        self._replicas = Replicas(directory, emit, self._roster, self._selector)
        self._records = RecordWriter(self._logbook, self._roster, emit, self._announce, mark)
        self._halting = Halting(directory, self._roster, emit)
        self._bases = BaseWriter(
            self._tier, self._roster, self._logbook, self._replicas, self._halting.overhear, self._announce, mark
        )
        self._directory = directory
        self._council = Council(directory, emit)
        self._fleet: Fleet | None = None
        self._metrics = Metrics(tally, self._roster, self._logbook, self._durable)
        self._scrape: Scrape | None = None
        self._ending = threading.Event()
        self._threads = [
            threading.Thread(target=self._bases.work, args=(self._ending,), name="everstep-flush", daemon=True),
            threading.Thread(target=self._check_loop, name="everstep-check", daemon=True),
            threading.Thread(target=self._records.work, args=(self._ending,), name="everstep-log", daemon=True),
        ]

    def _newest_committed(self) -> int:
        return max(committed_steps(self._tier), default=-1)

    def _durable(self) -> Durable:
        step, base, levels = self._logbook.reach(), self._logbook.base, dict[str, int]()
        flushes, silent = tuple[Flush, ...](), tuple[str, ...]()
        if self._fleet is not None:
            disk = self._fleet.order("disk")
            levels, flushes, silent = self._fleet.levels(), self._fleet.flushes(), self._fleet.orders.silent
            if self._has_many_nodes:
                step, base = min(step, disk.reach), min(base, disk.complete)
        return Durable(
            step=step, base=base, base_write_s=self._bases.took_s, record_write_s=self._records.flush_s,
            flushes=flushes, silent=silent, trouble=self._bases.trouble or self._records.trouble, **levels,
        )  # fmt: skip

    def _announce(self) -> None:
        self._roster.tell(self._durable())

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
            for key, _ in self._selector.select(TICK_S):
                key.data(key.fileobj)
            self._records.let_go_spent_rings()
            self._council.look()
            self._halting.look(leaving_s=max(0.0, self._bases.took_s), alone=self._inline)
        self._ending.set()
        self._records.asked.set()
        for thread in self._threads:
            thread.join()
        if self._scrape is not None:
            self._scrape.close()
        self._council.close()
        if self._fleet is not None:
            self._fleet.close()
        self._replicas.end()
        self._remove_spent_arenas()
        if self._inline:
            self._leave_process()

    def _leave_process(self) -> None:
        """It goes on without this keeper, and is to hold nothing for it."""
        self._selector.close()
        for session in self._roster.all():
            session.channel.close()
            for arena in (*session.outgrown, *session.arenas()):
                arena.close()
            if session.watcher >= 0:
                os.close(session.watcher)

    def _accept(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        self._add(Channel(connection))

    def _add(self, channel: Channel) -> None:
        self._selector.register(channel.connection, selectors.EVENT_READ, lambda _: self._hear(channel))

    def _hear(self, channel: Channel) -> None:
        heard = channel.receive()
        session = next((s for s in self._roster.all() if s.channel is channel), None)
        if heard is None:
            self._selector.unregister(channel.connection)
            channel.close()
            self._council.closed(channel)
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
                arena = Arena(descriptors, message.place)
                arena.populate()
                if arena.kind in ("log", "values"):
                    if arena.kind == "log":
                        self._takers.join(self, arena)
                    self._records.take_in(session, arena)
                else:
                    with self._roster.lock:
                        if session.arena is not None:
                            session.outgrown.append(session.arena)
                        session.arena = arena
                self._replicas.show(arena)
            case Detach() if session is not None:
                session.ring_is_spent = True
            case LeaseAnswer():
                if session is not None:
                    session.answers.put(message)
            case Persist():
                self._roster.want(message.step, as_base=message.as_base)
                if self._fleet is not None:
                    self._fleet.want(message.level, message.step, as_base=message.as_base)
                self._bases.ask()
                self._records.asked.set()
                if self._logbook.reach() >= message.step:
                    channel.send(self._durable())
            case StopAt():
                self._roster.tell(message)
                if self._fleet is not None:
                    self._fleet.pass_on(message)
            case BaseAt():
                self._pass_on_base(message)
            case Cancel():
                if self._fleet is not None:
                    self._fleet.cancel()
            case Join() if session is not None:
                self._join(message, session.hello)
            case Inherit():
                known = [a for s in self._roster.all() for a in (*s.outgrown, *s.arenas())]
                for arena in (a for a in known if a.place == MEMFD):
                    channel.send(Inherited(counts=(len(arena.descriptors),), more=True), arena.descriptors)
                channel.send(Inherited(counts=()))
            case Convene():
                self._council.convene(channel, message)
            case Enrol():
                self._council.enrol(channel, message)
            case Stand():
                self._council.stand(channel, message)
            case Stuck():
                self._council.stuck(channel, message)
            case Free():
                self._council.free(channel, message)
            case AskDurable():
                channel.send(self._durable())
            case AskReplica():
                channel.send(self._replicas.state or Trouble(reason="there is no replica"))
            case Bye() if session is None:
                self._council.part(channel, final=message.final)
            case Bye() if session is not None:
                self._halting.obeyed(session.arena.live().step if session.arena is not None else 0)
                session.done = message.final
                session.alive = False
                self._roster.idle_since = time.monotonic()
            case _:
                channel.send(Trouble(reason=f"the keeper does not understand {type(message).__name__} now"))

    def _pass_on_base(self, message: BaseAt) -> None:
        """This node's ranks are the last to hear of it: who asked for the base takes it only if others know of it.

        Many may ask at once, because they all have heard too late of one before; the first of them speaks for all.
        """
        if message.step <= self._base_at:
            return
        self._base_at, life = message.step, self._generation

        def tell() -> None:
            if self._generation == life:  # a node that is lost may hold this up until the others have begun another
                self._roster.tell(message)

        if self._fleet is None:
            tell()
        else:
            self._fleet.pass_on(message, then=tell)

    def _welcome(self, channel: Channel, hello: Hello) -> None:
        if hello.generation != self._generation:
            self._meet_others(hello)
            self._metrics.begin_life(hello, node_name())
            self._be_asked_at(hello.metrics)
        with self._roster.lock:
            earlier = self._roster.sessions.get(hello.rank)
            session = Session(hello, channel)
            if hello.generation != self._generation:
                self._begin_life(hello)
            if earlier is not None:
                self._lose(earlier)
                session.arena, session.leased, session.outgrown = earlier.arena, earlier.leased, earlier.outgrown
                session.ring, session.values, session.replica = earlier.ring, earlier.values, earlier.replica
                session.ring_is_spent = earlier.ring_is_spent
            with self._logbook.writing:
                self._logbook.open(hello)
            self._roster.sessions[hello.rank] = session
            try:
                session.watcher = os.pidfd_open(hello.pid)
                self._selector.register(session.watcher, selectors.EVENT_READ, lambda _: self._lose(session))
            except OSError:
                session.watcher = -1  # the socket alone will tell
        self._replicas.follow(session)
        address = self._fleet.address if self._fleet is not None else ""
        channel.send(Welcome(leased=tuple(session.leased), address=address))

    def _begin_life(self, hello: Hello) -> None:
        """The first trainer of a new life: what was passed over at its recovery makes room."""
        self._generation, self._base_at = hello.generation, NONE
        self._halting.begin_life()
        sessions = self._roster.sessions
        for gone in [sessions.pop(rank) for rank in list(sessions) if rank not in hello.local_ranks]:
            self._roster.overtaken += [*gone.outgrown, *gone.arenas()]
        with self._logbook.writing:
            self._logbook.overtake(hello)
        for step in flush.set_aside(self._tier, hello.resumed_from, hello.run, hello.generation):
            self._emit(Retired(step=step, reason=f"newer than step {hello.resumed_from}, from which the run went on"))
        self._logbook.base = self._newest_committed()

    def _meet_others(self, hello: Hello) -> None:
        """A new life has other nodes, and another secret. Its lanes ask who is here, so nobody is locked out."""
        if self._fleet is not None:
            self._fleet.close()
        self._bases.appointed, self._fleet, self._has_many_nodes = None, None, bool(hello.secret)
        self._logbook.appointed = None
        self._logbook.pins.clear()
        self._logbook.pinned_values.clear()
        tiers = gather(parse(hello.tiers, "Hello"))
        if hello.secret or tiers.deeper:
            self._fleet = self._make_fleet(hello, tiers)
            self._logbook.appointed = partial(self._fleet.order, VALUES) if hello.secret else None

    def _be_asked_at(self, address: str) -> None:
        """By Prometheus, if a new life wishes so."""
        if address and self._scrape is None:
            from everstep.keeper.scrape import Scrape  # brings a web server, that most keepers do without

            self._scrape = Scrape(self._metrics, self._emit)
        if self._scrape is not None:
            self._scrape.open(address)

    def _make_fleet(self, hello: Hello, tiers: Tiers) -> Fleet:
        from everstep.keeper.fleet import Fleet  # needs a package that one node alone does not

        guests = guest_tier(hello.run, tiers.memory.path)
        forget_passed_over(guests, hello)
        return Fleet(
            hello, node_name(), tiers, self._roster, guests, self._tier, self._takers, self._emit, self._announce,
            self._mark,
        )  # fmt: skip

    def _join(self, message: Join, hello: Hello) -> None:
        if self._fleet is None or self._fleet.has_joined:
            return
        is_first = message.members[0].node == node_name()
        chosen = {tier_name(tier): tier for tier in gather(parse(hello.tiers, "Hello")).deeper}
        deeper = []
        for name, tier in Places.written(self._directory).deeper_tiers().items():
            records = self._fleet.sinking(name, tier, self._logbook)
            self._logbook.pins.append(records.pinned)
            self._logbook.pinned_values.append(records.values.pinned)
            objection = self._fleet.objection
            deeper.append(DeeperWork(chosen[name], tier, hello, records, self._emit, objection, retires=is_first))
        own = {}
        if self._has_many_nodes:
            self._bases.appointed = partial(self._fleet.order, "disk")
            own = {"disk": self._bases.status, VALUES: self._logbook.values_status}
        self._fleet.join(message.members, deeper, own)

    def _lose(self, session: Session) -> None:
        if session.watcher >= 0:
            self._selector.unregister(session.watcher)
            os.close(session.watcher)
            session.watcher = -1
        session.alive = False
        self._roster.idle_since = time.monotonic()

    # -- checking

    def _check_loop(self) -> None:
        """Give the newest sealed slots their checksums, at leisure; at once when their trainer is gone."""
        rest = TICK_S
        while not self._ending.wait(rest):
            began, sessions = time.monotonic(), self._roster.ready()
            check_all(sessions, self._ending.is_set)
            busy = time.monotonic() - began
            rest = max(TICK_S, busy / _CHECK_SHARE if any(s.alive for s in sessions) else 0.0)

    # -- ending

    def _may_end(self) -> bool:
        sessions = self._roster.all()
        if self._roster.is_anybody_alive() or self._council.is_needed:
            return False
        idle = time.monotonic() - self._roster.idle_since
        linger = max((s.hello.linger_s for s in sessions), default=30.0)
        if sessions and all(s.done for s in sessions):
            linger = 0.0
        if idle < linger:
            return False
        patience_s = _INLINE_PATIENCE_S if self._inline else _PATIENCE_S
        gives_up = idle > patience_s or (self._inline and self._bases.failures + self._records.failures > 0)
        newest = self._roster.newest()
        if newest is not None:
            self._bases.read_back(sessions[0].hello.run, newest)
        is_held = any(s.outgrown or self._is_behind(s) for s in sessions)
        if self._fleet is not None:  # what is on its way is not given up for being slow
            is_waited_for = not self._fleet.may_end and idle < linger + self._farewell_s()
            is_held |= is_waited_for or bool(self._fleet.flushes())
        return gives_up or not (is_held or (newest is not None and newest > self._logbook.base))

    def _farewell_s(self) -> float:
        return _FAREWELL_S if all(session.done for session in self._roster.all()) else _LAST_FLUSH_S

    def _is_behind(self, session: Session) -> bool:
        return session.ring is not None and self._logbook.is_behind(session.ring)

    def _remove_spent_arenas(self) -> None:
        newest = self._roster.newest()
        if newest is not None and newest > self._logbook.base:
            return
        for session in self._roster.ready():
            for arena in session.arenas():
                if arena is session.ring and self._is_behind(session):
                    continue
                give_up(arena)
        if self._fleet is not None and all(session.done for session in self._roster.all()):
            self._fleet.forget_guests()
