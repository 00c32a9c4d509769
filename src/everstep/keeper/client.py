"""The trainer's end: finds or starts the keeper, answers its questions, and outlives it.

If the keeper dies the client starts another, introduces itself and its arena again, and all leases are void. Training
notices nothing but an event.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from everstep.capture.arena import MEMFD, Arena, ArenaKind
from everstep.config import KeeperKind
from everstep.errors import EverstepError, KeeperLost, KeeperSilent
from everstep.events import Degraded, Sink, say_again
from everstep.keeper.process import keeper_log, last_words, start
from everstep.keeper.protocol import (
    AnyMessage,
    AskDurable,
    AskReplica,
    Attach,
    BaseAt,
    Bye,
    Cancel,
    Channel,
    Detach,
    Durable,
    Flush,
    Halt,
    Hello,
    Inherit,
    Inherited,
    Join,
    Lease,
    LeaseAnswer,
    Member,
    Message,
    Persist,
    Release,
    Replicated,
    StopAt,
    Trouble,
    Welcome,
    connect,
    find_runtime_folder,
    leave,
)
from everstep.timeline import Mark, unmarked
from everstep.types import Level

_ATTEMPTS = 5
_ASK_AGAIN_S = 1.0
_LONG_S = 60.0  # to wait without a word
_INTRODUCED_S = 10.0  # until a new keeper knows of a trainer that leaves


@dataclass(slots=True, kw_only=True)
class Answers:
    """What the trainer does when the keeper speaks."""

    lease: Callable[[int], int | None]
    release: Callable[[int | None], None]
    stop_at: Callable[[int, str], None]
    base_at: Callable[[int], None]
    halt: Callable[[str], None]


class KeeperClient:
    def __init__(self, kind: KeeperKind, run: str, directory: Path, emit: Sink, mark: Mark = unmarked) -> None:
        self._kind, self._run, self._directory, self._emit, self._mark = kind, run, directory, emit, mark
        self._hello: Hello | None = None
        self._answers: Answers | None = None
        self._arenas: dict[ArenaKind, Arena] = {}
        self._channel: Channel | None = None
        self._state = threading.Condition()
        self._closing = self._is_final = False
        self._listener: threading.Thread | None = None
        self._inline: threading.Event | None = None  # of a keeper in this process: set when it has ended
        self._members: tuple[Member, ...] = ()
        self.address = ""  # of the keeper, for other nodes
        self.durable_step = self.durable_base = self.protected_step = self.shared_step = self.shared_base = -1
        self.shared_next = self.protected_missed = self.shared_missed = -1
        self.base_write_s = self.record_write_s = -1.0  # what the last ones took
        self.flushes: tuple[Flush, ...] = ()
        self.silent: tuple[str, ...] = ()
        self.trouble = self._halt = ""
        self.leased: tuple[int, ...] = ()
        self.replica: Replicated | None = None

    # -- beginning and ending

    def open(self, hello: Hello) -> None:
        """Say hello; must be called before the first attach."""
        self._hello = hello
        self._introduce()
        self._listener = threading.Thread(target=self._listen, name="everstep-keeper-client", daemon=True)
        self._listener.start()

    def listen_with(self, answers: Answers) -> None:
        self._answers = answers
        if self._halt:
            answers.halt(self._halt)

    def close(self, *, final: bool) -> None:
        self._closing, self._is_final = True, final
        self._part()
        if self._listener is not None:  # it may just be telling a new keeper of us
            self._listener.join(_INTRODUCED_S)
        if self._inline is not None:
            self._inline.wait()
            leave(find_runtime_folder(self._run))

    def afterwards(self, do: Callable[[], None]) -> None:
        """Now; or when a keeper in this process has ended, if whoever waited for that was interrupted."""
        ended = self._inline
        if ended is None or ended.is_set():
            do()
            return

        def wait() -> None:
            ended.wait()
            do()

        threading.Thread(target=wait, name="everstep-afterwards", daemon=True).start()

    def _part(self) -> None:
        self._send(Bye(final=self._is_final))
        if self._channel is not None:
            self._channel.close()

    def _introduce(self) -> None:
        failure = ""
        for attempt in range(_ATTEMPTS):
            try:
                self._channel = self._connect()
                if self._channel is not None and self._is_welcome(self._channel):
                    return
            except KeeperSilent:
                raise
            except KeeperLost as error:
                failure = f": {error}"
            time.sleep(0.1 * attempt)  # it was just ending: a new one will do
        if words := last_words(self._directory):
            failure += f"; the last words of one: {words} (all of them: {keeper_log(self._directory)})"
        raise KeeperLost(f"no keeper for {self._directory} after {_ATTEMPTS} attempts{failure}")

    def _is_welcome(self, channel: Channel) -> bool:
        assert self._hello is not None
        channel.send(self._hello)
        heard = channel.hear()
        if heard is None or not isinstance(heard[0], Welcome):
            return False
        self.leased, self.address = heard[0].leased, heard[0].address
        if self._members:
            channel.send(Join(members=self._members))
        for arena in self._arenas.values():
            channel.send(Attach(place=arena.place), arena.descriptors)
        return True

    def _connect(self) -> Channel | None:
        if self._kind == "inline":
            from everstep.keeper.keeper import Keeper  # a whole keeper is loaded only where one is to run

            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            keeper = Keeper(self._directory, self._emit, inline=True, mark=self._mark)
            ended = self._inline = threading.Event()  # a thread whose join() was interrupted is taken for ended

            def serve() -> None:
                try:
                    keeper.serve(None, [Channel(theirs)])
                finally:
                    ended.set()

            threading.Thread(target=serve, name="everstep-keeper", daemon=True).start()
            return Channel(ours)
        channel = connect(self._run)
        if channel is None:
            start(self._run, self._directory)
            channel = connect(self._run)
        return channel

    @property
    def _speaks(self) -> bool:
        """One rank of a node does, unless the keeper is in this process and has spoken itself."""
        return self._hello is not None and self._kind != "inline" and self._hello.rank == min(self._hello.local_ranks)

    # -- what the trainer asks for

    def join(self, members: tuple[Member, ...]) -> None:
        """Tell the keeper who the others are. A keeper that takes its place is to be found where this one was."""
        self._members = members
        if self._hello is not None and self.address:
            self._hello = msgspec.structs.replace(self._hello, address=self.address)
        self._send(Join(members=members))

    def attach(self, arena: Arena) -> None:
        self._arenas[arena.kind] = arena
        self._send(Attach(place=arena.place), arena.descriptors)

    def detach_rings(self) -> None:
        self._arenas = {kind: arena for kind, arena in self._arenas.items() if kind == "base"}
        self._send(Detach())

    def persist(self, step: int, *, as_base: bool, level: Level = Level.DURABLE) -> None:
        self._send(Persist(step=step, as_base=as_base, level=level))

    def cancel(self) -> None:
        """What is on its way to deeper tiers stops."""
        self._send(Cancel())

    def stop_at(self, step: int, halt: str) -> None:
        self._send(StopAt(step=step, halt=halt))

    def base_at(self, step: int) -> None:
        self._send(BaseAt(step=step))

    def wait_durable(self, step: int, timeout_s: float | None, *, as_base: bool = False) -> bool:
        return self.wait_for(Level.DURABLE, step, timeout_s, as_base=as_base)

    def wait_for(self, level: Level, step: int, timeout_s: float | None, *, as_base: bool = False) -> bool:
        """Whether the step was there in time. Raises what the keeper complains of, if that is why it was not."""
        began = time.monotonic()
        deadline = None if timeout_s is None else began + timeout_s
        self.trouble = ""

        def reached() -> bool:
            durable, shared = self.durable_step, self.shared_step
            if as_base:
                durable, shared = self.durable_base, self.shared_base
            levels = {Level.DURABLE: durable, Level.PROTECTED: self.protected_step, Level.SHARED: shared}
            return levels[level] >= step

        while not reached() and not self.trouble:
            if self._closing:
                return False  # nobody answers any more
            left = _ASK_AGAIN_S if deadline is None else min(_ASK_AGAIN_S, deadline - time.monotonic())
            if left <= 0:
                return False
            self.persist(
                step, as_base=as_base, level=level
            )  # again and again: a keeper that has just been born has not heard it
            with self._state:
                self._state.wait_for(lambda: reached() or bool(self.trouble), left)
            if self._speaks and time.monotonic() > began + _LONG_S and not reached():
                say_again("waiting for the keeper", f"step {step} is not {level.name.lower()} after {_LONG_S:g} s")
        if not reached():
            raise EverstepError(f"step {step} is not {level.name.lower()}: {self.trouble}")
        return True

    def levels(self) -> dict[str, object]:
        """How far each level is, and what is on its way to deeper ones."""
        steps = {"durable": self.durable_step, "protected": self.protected_step, "shared": self.shared_step}
        return {
            **{f"{level}_step": step if step >= 0 else None for level, step in steps.items()},
            "flushes": [msgspec.structs.asdict(flush) for flush in self.flushes],
            "silent_nodes": list(self.silent),
        }

    def replica_status(self, step: int) -> dict[str, object] | None:
        """Where the replica stands when the run is at a step."""
        known = self.replica
        return {**msgspec.structs.asdict(known), "behind": step - known.step} if known is not None else None

    def _send(self, message: Message, descriptors: list[int] | None = None) -> None:
        try:
            if self._channel is not None:
                self._channel.send(message, descriptors)
        except KeeperLost:
            return  # the listening thread is about to find out, and introduces us again

    # -- what the keeper asks for

    def _listen(self) -> None:
        while not self._closing:
            channel = self._channel
            heard = channel.receive() if channel is not None else None
            if heard is not None:
                self._hear(heard[0])
            elif not self._closing:
                self._reintroduce()
        self._part()  # from a keeper that came meanwhile, too

    def _hear(self, message: object) -> None:
        answers = self._answers
        match message:
            case Lease(step=step):
                slot = answers.lease(step) if answers else None
                if self._channel is not None:
                    try:
                        self._channel.send(LeaseAnswer(step=step, slot=slot))
                    except KeeperLost:
                        return
            case Release(slot=slot) if answers:
                answers.release(slot)
            case StopAt(step=step, halt=halt) if answers:
                answers.stop_at(step, halt)
            case Halt(why=why):
                self._halt = why  # it may be due before the run is ready to listen
                if self._answers is not None:
                    self._answers.halt(why)
            case BaseAt(step=step) if answers:
                answers.base_at(step)
            case Durable():
                self.base_write_s, self.record_write_s = message.base_write_s, message.record_write_s
                self.flushes, self.silent = message.flushes, message.silent
                with self._state:
                    self.durable_step = max(self.durable_step, message.step)
                    self.durable_base = max(self.durable_base, message.base)
                    self.protected_step = max(self.protected_step, message.protected)
                    self.shared_step = max(self.shared_step, message.shared)
                    self.shared_base = max(self.shared_base, message.shared_base)
                    self.shared_next, self.shared_missed = message.shared_next, message.shared_missed
                    self.protected_missed = message.protected_missed
                    self._state.notify_all()
            case Replicated():
                self.replica = message
            case Trouble(reason=reason):
                with self._state:
                    self.trouble = reason
                    self._state.notify_all()
                if self._speaks:
                    say_again("not all that is in memory is safe elsewhere, and it is tried again", reason)

    def _reintroduce(self) -> None:
        if self._answers is not None:
            self._answers.release(None)
        self._emit(Degraded(what="the keeper died", reason="a new one is started; training goes on"))
        while not self._closing:
            try:
                self._introduce()
                return
            except (EverstepError, OSError) as error:
                self._emit(Degraded(what="no keeper", reason=str(error)))
                time.sleep(5.0)


def inherited(run: str) -> list[Arena]:
    """The memfd arenas that a keeper of this node holds for a run."""
    channel = connect(run)
    if channel is None:
        return []
    arenas = []
    try:
        channel.send(Inherit())
        more = True
        while more and (heard := channel.hear()) is not None:
            message, descriptors = heard
            more = isinstance(message, Inherited) and message.more
            for count in message.counts if isinstance(message, Inherited) else ():
                mine, descriptors = descriptors[:count], descriptors[count:]
                arenas.append(Arena(mine, MEMFD))
    except KeeperSilent:
        raise
    except KeeperLost:
        return arenas  # it has just died, and memory that has no name goes with the last who holds it
    finally:
        channel.close()
    return arenas


def replica_of(run: str) -> Replicated | None:
    """Where the replica of a run stands, if a keeper of this node has one."""
    answer = asked_of(run, AskReplica())
    return answer if isinstance(answer, Replicated) else None


def levels_of(run: str) -> Durable | None:
    """How far each level of a run is, if it has a keeper on this node."""
    answer = asked_of(run, AskDurable())
    return answer if isinstance(answer, Durable) else None


def asked_of(run: str, question: Message) -> AnyMessage | None:
    """What the keeper of a run on this node answers; None if there is none."""
    channel = connect(run)
    if channel is None:
        return None
    try:
        channel.send(question)
        heard = channel.hear()
    except KeeperSilent:
        raise
    except KeeperLost:
        return None
    finally:
        channel.close()
    return heard[0] if heard is not None else None


def keeper_pid(run: str) -> int | None:
    """The process that answers for a run on this node."""
    channel = connect(run)
    if channel is None:
        return None
    try:
        return channel.peer
    finally:
        channel.close()
