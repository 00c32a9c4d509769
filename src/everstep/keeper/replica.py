"""The replica as the keeper sees it: a process of its own that follows the trainers, and what it has to say.

It needs torch and much time, so it is no thread: the keeper starts it, shows it the arenas and rings of the trainers,
and never waits for it but when it asks for an image to write. If it dies another one goes on, from what is sealed; if
the keeper dies it hears so from their socket, and ends. There is one for each life of the trainers.
"""

from __future__ import annotations

import selectors
import socket
import subprocess
import sys
import threading
from pathlib import Path

from everstep.capture.arena import Arena
from everstep.errors import KeeperLost
from everstep.events import Degraded, Sink
from everstep.keeper.process import environment
from everstep.keeper.protocol import AnyMessage, Attach, Channel, Held, Hold, Replicated
from everstep.keeper.roster import Roster
from everstep.keeper.session import Session
from everstep.topology import node_name

_HOLD_TIMEOUT_S = 5.0
_STARTS = 4  # in one life of the trainers
_END_TIMEOUT_S = 2.0


class Replicas:
    """Those of all ranks on this node: one process has them."""

    def __init__(self, directory: Path, emit: Sink, roster: Roster, selector: selectors.BaseSelector) -> None:
        self._directory, self._emit = directory, emit
        self._roster, self._selector = roster, selector
        self._generation = ""
        self._starts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._holding = threading.Condition()
        self._held: int | None = None
        self.state: Replicated | None = None

    # -- the keeper's main thread

    def follow(self, session: Session) -> None:
        """A trainer is there. The first one of a life begins a replica, if it wants one."""
        hello = session.hello
        if hello.generation != self._generation:
            self.end()
            self._generation, self._starts = hello.generation, 0
        if not hello.replica:
            if session.replica is not None:
                session.replica.close()  # it is the trainer's now, to be used up
                session.replica = None
            return
        if self._process is None:
            self._start()
        self._introduce(session)

    def show(self, arena: Arena) -> None:
        """A trainer has another arena."""
        self._tell(Attach(place=arena.place), arena.descriptors)

    def _start(self) -> None:
        self._starts += 1
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "everstep.keeper.replica_process", str(theirs.fileno()), str(self._directory)]
        with theirs, open(self._directory / f"keeper-{node_name()}.log", "ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment(), start_new_session=True,
                pass_fds=[theirs.fileno()],
            )  # fmt: skip
        channel = self._channel = Channel(ours)
        self._selector.register(ours, selectors.EVENT_READ, lambda _: self._hear(channel))

    def _introduce(self, session: Session) -> None:
        self._tell(session.hello)
        for arena in (session.replica, session.arena, session.ring):
            if arena is not None:
                self.show(arena)

    def _hear(self, channel: Channel) -> None:
        heard = channel.receive()
        if heard is None:
            self._lose()
            return
        message, descriptors = heard
        match message:
            case Replicated():
                self.state = message
                self._roster.tell(message)
            case Held(step=step):
                with self._holding:
                    self._held = step
                    self._holding.notify_all()
            case Attach(place=place):
                arena = Arena(descriptors, place)
                session = self._roster.sessions[arena.rank]
                before, session.replica = session.replica, arena
                if before is not None:
                    before.close()

    def _lose(self) -> None:
        """It has ended: by its own decision, which it has explained, or not."""
        process = self._process
        self.end()
        if process is None or process.returncode == 0:
            return
        reason = f"its process ended with {process.returncode}"
        if self._starts >= _STARTS:
            self._emit(Degraded(what="there is no replica, the run is kept by its log", reason=reason))
            return
        self._emit(Degraded(what="the replica died; another one is started", reason=reason))
        self._start()
        for session in self._roster.all():
            self._introduce(session)

    def end(self) -> None:
        """Let it end; what it has sealed stays."""
        process, channel, began = self._process, self._channel, self.state is not None
        self._process = self._channel = self.state = None
        if channel is not None:
            self._selector.unregister(channel.connection)
            channel.close()
        if process is not None:
            try:
                process.wait(_END_TIMEOUT_S if began else 0)  # it finishes the step that it is in
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        with self._holding:
            self._holding.notify_all()

    def _tell(self, message: AnyMessage, descriptors: list[int] | None = None) -> None:
        channel = self._channel
        try:
            if channel is not None:
                channel.send(message, descriptors)
        except KeeperLost:
            return  # the selector is about to say so

    # -- the flushing thread

    def hold(self, step: int) -> int:
        """The step of an image that stays as it is until it is asked for again; `step` if nobody changes that one."""
        with self._holding:
            self._held = None
            channel = self._channel
            self._tell(Hold())
            self._holding.wait_for(lambda: self._held is not None or self._channel is not channel, _HOLD_TIMEOUT_S)
            return step if self._held is None else self._held
