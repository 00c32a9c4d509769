"""How keepers of different nodes ask each other: questions with answers, bulk beside them, a bound on every wait.

A `Peer` asks one `Server` (in `peer_server`). They promise: an ask ends with the answer to this very question, with
`PeerFailed` (the other end could not do it, and says why), with `Damaged` (its payload arrived otherwise than it was
sent) or with `PeerLost`: after the timeout, or at once if the connection is closed by which it went; one life of a
server handles a question at most once; what one peer, one handler or one stranger does delays nobody else as long as a
worker is free; all queues are short. Who may talk, and what somebody on the path can see and do, is said in `wire`.
They do not know what is asked.

Payloads are not copied on their way out. When `ask` has returned or raised, nobody reads its payload any more; of a
`Reply` the same is said by calling its `release`.

Make both in the process that uses them, after any fork. Both hold threads; nothing of them keeps an interpreter from
ending.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from everstep.errors import Damaged, PeerFailed, PeerLost
from everstep.keeper import wire
from everstep.keeper.rate import Limiter
from everstep.keeper.wire import Kind, zmq

TIMEOUT_S = 10.0
_CONNECTIONS = 4  # of one peer to another, each with one question in flight
_WINDOW_BYTES = 64 << 20  # in flight between one peer and another
_CONNECT_MS = 2000  # then the name is looked up and dialled again
_RECONNECT_MS, _RECONNECT_MAX_MS = 20, 500
_LOOK_S = 0.1  # between two looks at a limiter whose rate may change, or whether this is over


class Ask(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


class Answer(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


AnswerT = TypeVar("AnswerT", bound=Answer)


@dataclass(frozen=True, slots=True)
class Answered(Generic[AnswerT]):
    """`payload`: a part of the asker's `into`, or memory of its own; None if there was none."""

    answer: AnswerT
    payload: memoryview | None


class _NoAnswer(Exception):
    """Nothing was heard in time, or nothing will be."""


class _Cut(_NoAnswer):
    """The connection was closed after something was sent by it."""


class _Line:
    """One connection with one session: one question at a time. It is closed when a question stays without answer, so
    that a late answer finds nobody."""

    def __init__(
        self, context: wire.Context, address: str, secret: wire.Secret, encrypt: bool, is_over: Callable[[], bool]
    ) -> None:
        """`is_over`: whether nobody cares for answers any more."""
        self._secret, self._is_over = secret, is_over
        self._session: wire.Session | None = None
        self._sequence = 0
        self._socket = context.socket(zmq.DEALER)
        wire.prepare(self._socket)
        self._socket.connect_timeout = _CONNECT_MS
        self._socket.reconnect_ivl = _RECONNECT_MS
        self._socket.reconnect_ivl_max = _RECONNECT_MAX_MS
        if encrypt:
            self._socket.curve_publickey, self._socket.curve_secretkey = secret.curve("asker")
            self._socket.curve_serverkey, _ = secret.curve("server")
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._is_connected = False
        try:
            self._socket.connect(f"tcp://{address}")
        except zmq.ZMQError:
            self.close()
            raise

    def exchange(
        self, body: bytes, views: Sequence[memoryview], deadline: float
    ) -> tuple[Kind, bytes, Sequence[memoryview]]:
        """Kind, body and payload of the answer. Damaged if its payload is."""
        while True:
            session = self._session or self._open_session(deadline)
            self._sequence += 1
            head = wire.seal(Kind.ASK, session, self._sequence, body, views)
            sent = self._send(head, views, deadline)
            try:
                answer, frames = self._hear(session.name, self._sequence, deadline)
            except _NoAnswer:
                self.close()  # drops what is not on its way yet;
                wire.wait_until_unread(sent)  # then nobody reads the views any more
                raise
            if answer.kind is Kind.STALE:
                self._session = None  # it was started anew, and has done nothing: ask again
                continue
            return answer.kind, wire.unseal(answer, session, frames), frames

    def _open_session(self, deadline: float) -> wire.Session:
        while True:
            mine = wire.nonce()
            self._send(wire.write_head(Kind.HELLO, mine, 0, self._secret.of_kind(Kind.HELLO)), (), deadline)
            try:
                welcome, _ = self._hear(mine, 0, deadline)
                break
            except _Cut:
                continue  # nothing was asked yet: whoever is there next is greeted
        self._session = self._secret.session(mine, welcome.verify(self._secret.of_kind(Kind.WELCOME)).body)
        self._sequence = 0
        return self._session

    def _send(self, head: bytes, views: Sequence[memoryview], deadline: float) -> zmq.MessageTracker:
        self._wait_until(zmq.POLLOUT, deadline)
        self._look_at_connection()
        return wire.send(self._socket, [head, *views])

    def _hear(self, session: bytes, sequence: int, deadline: float) -> tuple[wire.Head, list[memoryview]]:
        """The answer to this question; whatever else arrives is passed over."""
        while True:
            self._wait_until(zmq.POLLIN, deadline)
            first, *others = self._socket.recv_multipart(copy=False)
            try:
                head = wire.read_head(first.buffer)
                if (head.session, head.sequence) != (session, sequence):
                    continue
                if head.kind in (Kind.WELCOME, Kind.STALE):
                    head.verify(self._secret.of_kind(head.kind))
                elif head.kind in (Kind.ANSWER, Kind.FAILED) and self._session is not None:
                    head.verify(self._session.answers.head)
                else:
                    continue
            except wire.Refused:
                continue
            return head, [frame.buffer for frame in others]

    def _wait_until(self, what: int, deadline: float) -> None:
        """Until the socket is ready. For an answer only as long as the connection lives by which it would come."""
        poller = zmq.Poller()
        poller.register(self._socket, what)
        poller.register(self._monitor, zmq.POLLIN)
        while not self._is_over() and (left_s := deadline - time.monotonic()) > 0:
            ready = dict(poller.poll(max(1, round(min(left_s, _LOOK_S) * 1000))))
            if self._socket in ready:
                return
            if self._monitor in ready and self._look_at_connection() and what == zmq.POLLIN:
                raise _Cut
        raise _NoAnswer

    def _look_at_connection(self) -> bool:
        """Take in what became of the connection; whether one was closed."""
        was_cut = False
        while self._monitor.poll(0):
            event = wire.recv_monitor_message(self._monitor)["event"]
            was_cut |= self._is_connected and event == zmq.EVENT_DISCONNECTED
            self._is_connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        return was_cut

    def close(self) -> None:
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._socket.close(0)


class Peer(Generic[AnswerT]):
    """The server of another node, as one who asks sees it. Any thread may ask.

    `limiter` paces what is sent and what was received, by delaying questions that have a payload or want one; that time
    is not part of the timeout. Small talk is never delayed: others wait for it.
    """

    def __init__(
        self,
        node: str,
        address: str,
        secret: bytes,
        answers: msgspec.msgpack.Decoder[AnswerT],
        *,
        encrypt: bool = False,
        timeout_s: float = TIMEOUT_S,
        limiter: Limiter | None = None,
    ) -> None:
        self.node, self.address, self.timeout_s = node, address, timeout_s
        self._secret, self._encrypt, self._answers = wire.Secret(secret, node), encrypt, answers
        self._limiter = limiter or Limiter()
        # Its own, made when it is first needed: a name that is slow to resolve holds up the thread of its context.
        self._context: wire.Context | None = None
        self._change = threading.Condition()
        self._idle: list[_Line] = []
        self._busy = 0
        self._flying_bytes = 0
        self._heard_at = 0.0
        self._closed = False

    def ask(
        self,
        request: Ask,
        payload: Sequence[memoryview] = (),
        *,
        into: memoryview | None = None,
        timeout_s: float | None = None,
    ) -> Answered[AnswerT]:
        """Ask, and wait for the answer. Its payload goes into the beginning of `into`, once it is verified."""
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        asked = type(request).__name__
        views = wire.flat(payload)
        target = None if into is None else into.cast("B")
        size = sum(map(len, views))
        body = msgspec.msgpack.encode(request)
        if views or target is not None:
            self._await_turn(size)
        with self._line(size + (0 if target is None else len(target)), timeout_s, asked) as line:
            try:
                kind, said, frames = line.exchange(body, views, time.monotonic() + timeout_s)
            except Damaged as error:
                raise Damaged(f"{error.reason}, in the answer to {asked}", tier=f"node {self.node}") from None
        received = sum(map(len, frames))
        self._limiter.book(received)
        if kind is Kind.FAILED:
            raise PeerFailed(self.node, self.address, asked, said.decode(errors="replace"))
        if target is not None and received > len(target):
            raise PeerFailed(self.node, self.address, asked, f"its {received} bytes do not fit into {len(target)}")
        try:
            answer = self._answers.decode(said)
        except msgspec.DecodeError as error:
            raise PeerFailed(self.node, self.address, asked, f"its answer is not understood: {error}") from error
        if target is None or not frames:
            return Answered(answer, wire.joined(frames))
        wire.copy_into(target, frames)
        return Answered(answer, target[:received])

    def _await_turn(self, size: int) -> None:
        ticket = self._limiter.book(size)
        while (wait_s := self._limiter.wait_s(ticket)) and not self._closed:
            time.sleep(min(wait_s, _LOOK_S))

    @contextmanager
    def _line(self, size: int, timeout_s: float, asked: str) -> Iterator[_Line]:
        """A connection of its own for one question, when there is room for it in the window."""
        line = self._take(size, timeout_s, asked)
        healthy = False
        try:
            yield line
            healthy = True
        except Damaged:
            healthy = True  # the answer came
            raise
        except _Cut:
            raise PeerLost(self.node, self.address, asked, "its connection was closed before it answered") from None
        except _NoAnswer:
            raise self._lost(asked, timeout_s) from None
        finally:
            self._give_back(line, size, healthy)

    def _take(self, size: int, timeout_s: float, asked: str) -> _Line:
        began = time.monotonic()
        with self._change:
            while self._busy >= _CONNECTIONS or (self._busy and self._flying_bytes + size > _WINDOW_BYTES):
                left = max(began, self._heard_at) + timeout_s - time.monotonic()
                if left <= 0:  # all connections are taken, and none of them hears anything
                    raise self._lost(asked, timeout_s)
                self._change.wait(left)
            if self._closed:
                raise PeerLost(self.node, self.address, asked, "this end is closed")
            if self._context is None:
                self._context = zmq.Context()
            try:
                line = self._idle.pop() if self._idle else self._dial(self._context)
            except zmq.ZMQError as error:
                raise PeerLost(self.node, self.address, asked, f"cannot be dialled: {error}") from error
            self._busy += 1
            self._flying_bytes += size
            return line

    def _dial(self, context: wire.Context) -> _Line:
        return _Line(context, self.address, self._secret, self._encrypt, lambda: self._closed)

    def _give_back(self, line: _Line, size: int, healthy: bool) -> None:
        with self._change:
            self._busy -= 1
            self._flying_bytes -= size
            spent = [] if healthy and not self._closed else [line]
            if healthy:
                self._heard_at = time.monotonic()
            else:  # the others go the same way; new ones need not wait for TCP to notice
                spent += self._idle
                self._idle.clear()
            if not spent:
                self._idle.append(line)
            for old in spent:
                old.close()
            self._change.notify_all()

    def _lost(self, asked: str, timeout_s: float) -> PeerLost:
        return PeerLost(self.node, self.address, asked, f"no answer within {timeout_s:.1f} s")

    def close(self) -> None:
        """Questions in flight end at once, without an answer."""
        with self._change:
            self._closed = True
            self._change.wait_for(lambda: not self._busy)
            for line in self._idle:
                line.close()
            self._idle.clear()
            if self._context is not None:
                self._context.term()
                self._context = None

    def __enter__(self) -> Peer[AnswerT]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
