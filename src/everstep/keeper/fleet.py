"""This node among the others: it tells the first of them how far it is, hears which step all bring next, and answers.

With one node there is nobody to ask, and the same rounds are held within it. What others ask of it is answered from
its memory: slots that are held for a round, and the blobs that they entrusted to it.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from everstep.cadence import Every
from everstep.errors import Damaged, EverstepError
from everstep.events import Degraded, Joined, Sink
from everstep.keeper.copies import Copies, Takers
from everstep.keeper.deeper import DeeperWork
from everstep.keeper.exchange import (
    ANSWERS,
    ASKS,
    AnyAnswer,
    AnyAsk,
    AskHeld,
    AskSeals,
    Done,
    HeldParts,
    Leave,
    ReadImage,
    RemoteTier,
    TakeBase,
    Tell,
    TierAsk,
    TierHost,
    Told,
)
from everstep.keeper.lane import HeldBase, LaneWorker, Work
from everstep.keeper.logbook import Logbook
from everstep.keeper.note import FleetNote, forget_note, write_note
from everstep.keeper.parity_work import ParityWork, member_of
from everstep.keeper.partners import PartnerWork
from everstep.keeper.peer_server import Reply, Server
from everstep.keeper.peers import Peer
from everstep.keeper.protocol import BaseAt, Flush, Hello, Member, StopAt, Trouble
from everstep.keeper.rate import Limiter
from everstep.keeper.roster import Roster
from everstep.keeper.rounds import NONE, VALUES, Lane, Order, Orders, Report, Rounds, values_of
from everstep.keeper.seals import seals_of
from everstep.keeper.session import SOON_S, longer
from everstep.keeper.sinking import Sinking
from everstep.protect.groups import NodePlace, parity_groups, partners
from everstep.store.disk import DiskTier
from everstep.store.memory import MemoryTier
from everstep.store.tier import Tier
from everstep.tiers import Parity, Partner, Tiers, rate_of, tier_name
from everstep.timeline import Mark
from everstep.types import Level, Source, Survives

_TELL_S = 0.1  # since orders come as answers, even what is not new is told again
_TELLS_PER_S = 500  # that the first node hears at most; many nodes tell more rarely
_SHARE = 0.1  # of its time, that a lane without a cadence takes at most
_STUCK_S = 5.0
_PROGRESS_S = 0.2  # between two words on how far a flush is
_GUESTS = "guests"


class Fleet:
    def __init__(
        self, hello: Hello, node: str, tiers: Tiers, roster: Roster, guests: MemoryTier, disk: DiskTier,
        takers: Takers, emit: Sink, announce: Callable[[], None], mark: Mark,
    ) -> None:  # fmt: skip
        """`announce`: tell the trainers how far each level is."""
        self._hello, self._node, self._tiers, self._roster = hello, node, tiers, roster
        self._guests, self._takers, self._emit, self._announce, self._mark = guests, takers, emit, announce, mark
        self._copies: Copies | None = None
        self._host = TierHost({_GUESTS: guests, "disk": disk}, lent=_GUESTS)
        self._members: tuple[Member, ...] = ()
        self._peers: dict[str, Peer[AnyAnswer]] = {}
        self._lanes: dict[str, LaneWorker] = {}
        self._deeper: Sequence[DeeperWork] = []
        self._reported: dict[str, Callable[[], Lane]] = {}  # lanes that others work in
        self._rounds: Rounds | None = None
        self._rounding = threading.Lock()
        self.orders = Orders()
        self.wanted: dict[str, int] = {}
        self._wanted_bases: dict[str, int] = {}
        self._stuck_since = time.monotonic()
        self._silent: tuple[str, ...] = ()
        self._silent_since: float | None = time.monotonic()  # None: it was told of
        self._announced: dict[str, int] = {}
        self._announced_at = 0.0
        self._seen: tuple[object, ...] = ((), ())
        self._ending = threading.Event()
        self._threads: list[threading.Thread] = []
        self._server: Server[AnyAsk] | None = None
        if hello.secret:
            host, _, port = hello.address.rpartition(":")
            self._server = Server(
                node, hello.secret, ASKS, self._answer, advertise=host, port=int(port), encrypt=tiers.encrypt
            )  # fmt: skip

    @property
    def address(self) -> str:
        return self._server.address if self._server is not None else ""

    # -- beginning and ending

    def sinking(self, lane: str, tier: Tier, disk: Logbook) -> Sinking:
        """What brings records from this node's disk to a deeper tier."""
        chosen = next(one for one in self._tiers.deeper if tier_name(one) == lane)
        appointed = partial(self.order, values_of(lane)) if self._hello.secret else None
        return Sinking(
            tier, disk, self._hello, chosen.cadence, self._emit, partial(self._is_urgent, lane),
            rate=rate_of(chosen), appointed=appointed,
        )  # fmt: skip

    def _is_urgent(self, lane: str) -> bool:
        return self.wanted.get(lane, NONE) > self.order(lane).reach or not self._roster.is_anybody_alive()

    def _cadences(self) -> dict[str, Every]:
        """How often bases go to each place."""
        found = {tier_name(tier): tier.cadence for tier in self._tiers.deeper}
        found |= {values_of(name): Every() for name in found}
        if self._tiers.protection is not None:
            found["protect"] = Every(steps=self._tiers.protection.every)
        return found | {"disk": Every(steps=self._hello.every_steps, seconds=self._hello.every_s), VALUES: Every()}

    def join(
        self, members: tuple[Member, ...], deeper: Sequence[DeeperWork], own: Mapping[str, Callable[[], Lane]]
    ) -> None:  # fmt: skip
        """Begin to work with the others. `own`: how far this node's disk is, where there are several."""
        self._members, self._deeper = members, deeper
        self._meet(members)
        works: list[Work] = [*self._protection(), *deeper]
        self._reported |= own
        if self._copies is not None and VALUES in own:
            self._reported[VALUES] = partial(self._copies.values_status, own[VALUES])
        self._reported |= {values_of(work.name): work.records.values.status for work in deeper if own}
        for work in works:
            lane = LaneWorker(work, self._roster, self._emit, partial(self.order, work.name), self._mark)
            self._lanes[work.name], self._reported[work.name] = lane, lane.status
        if members[0].node == self._node:
            names = {name: every for name, every in self._cadences().items() if name in self._reported}
            self._rounds = Rounds([m.node for m in members], names, self._hello.generation, _SHARE)
        if self._reported:
            self._threads.append(threading.Thread(target=self._tell_loop, name="everstep-tell", daemon=True))
        for lane in self._lanes.values():
            name = f"everstep-{lane.name}"
            self._threads.append(threading.Thread(target=lane.work, args=(self._ending,), name=name, daemon=True))
        copiers: list[Copies | Sinking] = [work.records for work in self._deeper]
        for records in copiers if self._copies is None else [*copiers, self._copies]:
            name = f"everstep-{type(records).__name__.lower()}"
            self._threads.append(threading.Thread(target=records.work, args=(self._ending,), name=name, daemon=True))
        for thread in self._threads:
            thread.start()

    def _meet(self, members: tuple[Member, ...]) -> None:
        """One rate is for all that this node sends to others and reads from them."""
        secret, encrypt, scheme = self._hello.secret, self._tiers.encrypt, self._tiers.protection
        write_note(self._hello.run, FleetNote(members=members, secret=secret, encrypt=encrypt))
        limiter = Limiter(rate_of(scheme) if scheme is not None else None)
        for member in members:
            if member.node != self._node:
                self._peers[member.node] = Peer(
                    member.node, member.address, secret, ANSWERS, encrypt=encrypt, limiter=limiter
                )  # fmt: skip

    def _copied_to(self, nodes: Sequence[str]) -> Copies:
        """Records are small beside bases, so they are copied whatever the scheme is, as often as nodes may be lost."""
        tiers = [RemoteTier(self._peers[node], _GUESTS, Survives.PROCESS) for node in nodes]
        return Copies(tiers, self._roster, self._takers, self._emit, partial(self.order, VALUES))

    def _protection(self) -> list[Work]:
        """Who protects whom; every node computes the same."""
        scheme = self._tiers.protection
        if scheme is None or len(self._members) < 2:
            return []
        places = [NodePlace(node=member.node, domain=member.domain) for member in self._members]
        others: tuple[str, ...] = ()
        work: Work | None = None
        if isinstance(scheme, Partner):
            chosen = partners(places, copies=scheme.copies)
            others, warnings = chosen.of[self._node], chosen.warnings
            self._copies = self._copied_to(others)
            lent = [RemoteTier(self._peers[node], _GUESTS, Survives.PROCESS) for node in others]
            work = PartnerWork(lent, self._guests, self._copies, self._emit)
        else:
            assert isinstance(scheme, Parity)
            division = parity_groups(places, size=scheme.group, losses=scheme.covers)
            others, warnings = (), division.warnings
            for group in division.groups:
                if self._node in group:
                    at = group.index(self._node)
                    others = (*group[at + 1 :], *group[:at])
                    self._copies = self._copied_to(others[: scheme.covers])
                    work = ParityWork(
                        group, self._node, scheme.covers, self._peers, self._guests, self._copies, self._emit,
                        lambda step: self.order("protect").step <= step,
                    )  # fmt: skip
        self._emit(
            Joined(node=self._node, nodes=len(places), scheme=repr(scheme), others=others, warnings=tuple(warnings))
        )
        return [work if work is not None else _Unprotected()]

    def close(self) -> None:
        forget_note(self._hello.run)
        self._ending.set()
        for peer in self._peers.values():
            peer.close()
        for thread in self._threads:
            thread.join()
        if self._server is not None:
            self._server.close()
        self._host.close()

    @property
    def has_joined(self) -> bool:
        return bool(self._members)

    @property
    def may_end(self) -> bool:
        """Whether no other node is left waiting for what only this one can tell it, and deeper tiers have all."""
        newest = self._roster.newest_of_life()
        deeper = [self._lanes[tier_name(tier)] for tier in self._tiers.deeper if self._lanes]
        if newest is not None and any(lane.complete < newest - 1 for lane in deeper):
            return False  # a rank may have been a step ahead of the others when all died
        if not all(work.records.is_even for work in self._deeper):
            return False
        return self._rounds is None or self._rounds.has_told_all

    def want(self, level: Level, step: int, *, as_base: bool) -> None:
        """Somebody waits until a step has reached a level, or its base has."""
        lanes = {Level.DURABLE: ["disk"], Level.PROTECTED: ["protect"]}.get(
            level, list(map(tier_name, self._tiers.deeper))
        )
        for lane in lanes if as_base else [*lanes, *map(values_of, lanes), VALUES]:
            for wanted in (self.wanted, self._wanted_bases) if as_base else (self.wanted,):
                wanted[lane] = max(step, wanted.get(lane, NONE))

    def cancel(self) -> None:
        """What is on its way to deeper tiers stops, on all nodes. Who waits for it elsewhere has it begun anew."""
        for work in self._deeper:
            self._lanes[work.name].cancel()
            self.wanted.pop(work.name, None)
            self._wanted_bases.pop(work.name, None)
            self.wanted.pop(values_of(work.name), None)

    def objection(self, lane: str, step: int) -> str:
        """Why a step that is on its way is not wanted any more; empty if it is."""
        order = self.order(lane)
        if self._ending.is_set():
            return "the keeper ends, or a new life of the run begins"
        return "" if order.complete < order.step <= step else "it was called off"

    def flushes(self) -> tuple[Flush, ...]:
        """What is on its way from here to deeper tiers."""
        return tuple(flush for flush in (work.flush() for work in self._deeper) if flush is not None)

    def levels(self) -> dict[str, int]:
        """How far the levels beyond this node are, as trainers are told."""
        protect, deeper = self.order("protect"), [self.order(tier_name(tier)) for tier in self._tiers.deeper]
        lanes = [self._lanes[tier_name(tier)] for tier in self._tiers.deeper if self._lanes]
        return {
            "protected": protect.reach,
            "shared": min(map(self._reach, lanes), default=NONE),
            "shared_base": min((lane.complete for lane in lanes), default=NONE),
            "shared_next": min((order.step for order in deeper), default=NONE),
            "protected_missed": protect.missed,
            "shared_missed": max((order.missed for order in deeper), default=NONE),
        }

    def _reach(self, lane: LaneWorker) -> int:
        """A base counts when this node has seen to it, and records when all nodes say that they lead further."""
        order = self.order(lane.name)
        return order.reach if order.reach > order.complete else lane.complete

    def forget_guests(self) -> None:
        """Nobody will ask for what was entrusted to this node."""
        shutil.rmtree(self._guests.root, ignore_errors=True)

    # -- telling

    def order(self, lane: str) -> Order:
        return self.orders.lanes.get(lane, Order())

    def _tell_loop(self) -> None:
        is_lost, told, told_at = False, None, 0.0
        rest = at_least_s = max(SOON_S, len(self._members) / _TELLS_PER_S)
        while not self._ending.wait(rest):
            report = self._report()
            if report == told and time.monotonic() - told_at < _TELL_S:
                rest = max(at_least_s, longer(rest))
                continue
            rest, told, told_at = at_least_s, report, time.monotonic()
            try:
                self._hear(self._tell(report))
                self._complain(report.newest)
                self._name_silent()
                is_lost = False
            except (EverstepError, OSError) as error:
                if not is_lost:
                    self._emit(Degraded(what="no step is protected or brought deeper", reason=str(error)))
                is_lost = True

    def _report(self) -> Report:
        newest, newest_values = self._roster.newest_of_life(), self._roster.newest_values()
        return Report(
            node=self._node, generation=self._hello.generation, newest=NONE if newest is None else newest,
            is_alive=self._roster.is_anybody_alive(), wanted=dict(self.wanted),
            wanted_bases=dict(self._wanted_bases),
            lanes={name: status() for name, status in self._reported.items()},
            newest_values=NONE if newest_values is None else newest_values,
        )  # fmt: skip

    def _tell(self, report: Report) -> Orders:
        if self._rounds is not None:
            return self._take_in(report)
        answer = self._peers[self._members[0].node].ask(Tell(report=report)).answer
        assert isinstance(answer, Told)
        return answer.orders

    def _take_in(self, report: Report) -> Orders:
        if self._rounds is None:
            raise EverstepError(f"{self._node} does not appoint steps")
        with self._rounding:
            return self._rounds.hear(report, time.monotonic())

    def _complain(self, newest: int) -> None:
        """Whoever waits for what can only come with a later base is told so: it would wait for ever."""
        stuck = [
            name
            for name, wanted in self.wanted.items()
            if not name.endswith(VALUES)  # needs no base
            and newest > NONE
            and max(self.order(name).reach, newest) < min(wanted, self.order(name).step)
        ]
        if not stuck:
            self._stuck_since = time.monotonic()
        elif time.monotonic() - self._stuck_since > _STUCK_S:
            self._stuck_since = time.monotonic()
            step = self.order(stuck[0]).step
            self._roster.tell(Trouble(reason=f"other nodes have a base of step {step}, and {self._node} has none yet"))

    def _name_silent(self) -> None:
        """By the node that they do not tell anything: until they do, no step is appointed, or none completed."""
        silent = self.orders.silent if self._rounds is not None else ()
        if silent != self._silent:
            self._silent, self._silent_since = silent, time.monotonic()
        elif silent and self._silent_since is not None and time.monotonic() - self._silent_since > _STUCK_S:
            self._silent_since = None
            self._emit(
                Degraded(what="no step is protected or brought deeper", reason=f"{', '.join(silent)}: not heard of")
            )

    def _hear(self, orders: Orders) -> None:
        if orders.generation != self._hello.generation:
            return  # the other keeper has not joined this life yet
        before, self.orders = self.orders, orders
        if "protect" not in self._lanes and self.order("disk").complete > before.lanes.get("disk", Order()).complete:
            self.forget_guests()  # of an earlier life: the disks of all nodes have something newer
        complete = {name: lane.complete for name, lane in self._lanes.items()}
        if orders.lanes != before.lanes or complete != self._announced:
            self._announced = complete
            self._announce()
        seen = (self.flushes(), orders.silent)
        if seen != self._seen and time.monotonic() - self._announced_at >= _PROGRESS_S:
            self._seen, self._announced_at = seen, time.monotonic()
            self._announce()

    # -- being asked

    def _answer(self, ask: AnyAsk, payload: memoryview | None) -> Reply:
        match ask:
            case Tell(report=report):
                return Reply(Told(orders=self._take_in(report)))
            case TierAsk():
                return self._host.answer(ask, payload)
            case AskSeals():
                return Reply(seals_of(self._node, self._roster.all()))
            case AskHeld(step=step):
                return Reply(HeldParts(parts=member_of(self._node, self._held(step)).parts))
            case ReadImage():
                return self._read_image(ask)
            case Leave(step=step, halt=halt):
                self.pass_to_ranks(StopAt(step=step, halt=halt))
                return Reply(Done())
            case TakeBase(step=step):
                self.pass_to_ranks(BaseAt(step=step))
                return Reply(Done())
            case _:
                raise EverstepError(f"{type(ask).__name__} is not answered here")

    def _held(self, step: int) -> HeldBase:
        lane = self._lanes.get("protect")
        held = lane.held(step) if lane is not None else None
        if held is None:
            raise Damaged(f"step {step} is not held on {self._node}")
        return held

    def _read_image(self, ask: ReadImage) -> Reply:
        for arena, slot, _ in self._held(ask.step).images():
            if arena.rank == ask.rank:
                return Reply(Done(number=ask.length), [arena.image(slot)[ask.offset : ask.offset + ask.length]])
        raise Damaged(f"rank {ask.rank} is not on {self._node}")

    def pass_to_ranks(self, message: StopAt | BaseAt) -> None:
        self._roster.tell(message)

    def pass_on(self, message: StopAt | BaseAt, then: Callable[[], None] = lambda: None) -> None:
        """To the ranks of all other nodes, by threads of their own: one that is lost holds up nobody.

        `then`: is called when all have heard it, or cannot.
        """
        ask: Leave | TakeBase = TakeBase(step=message.step)
        if isinstance(message, StopAt):
            ask = Leave(step=message.step, halt=message.halt)
        threads = [threading.Thread(target=self._pass_to, args=(p, ask), daemon=True) for p in self._peers.values()]
        for thread in threads:
            thread.start()
        threading.Thread(target=_after, args=(threads, then), daemon=True).start()

    def _pass_to(self, peer: Peer[AnyAnswer], ask: Leave | TakeBase) -> None:
        try:
            peer.ask(ask)
        except EverstepError as error:
            self._emit(Degraded(what=f"node {peer.node} does not hear of {ask}", reason=str(error)))


def _after(threads: Sequence[threading.Thread], then: Callable[[], None]) -> None:
    for thread in threads:
        thread.join()
    then()


class _Unprotected:
    """The lane of a node that no group has room for: it does nothing, and the others do not wait for it."""

    name = "protect"
    tier: Source = "memory"
    stays = False

    def do(self, base: HeldBase) -> int:
        return 0

    def reach(self, base: int) -> int:
        return base

    def over(self, base: int, before: int) -> None:
        pass
