"""How a keeper answers those of other nodes: one thread that talks, a few that work.

The talking thread owns the socket. It takes a question only while a worker is free and little is waiting to be sent;
what it does not take waits in the connections, which TCP holds back. Workers verify, call the handler, and seal what it
gave. Whatever a handler raises becomes a `PeerFailed` for the asker; whatever a stranger sends is dropped and counted.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from everstep.errors import Damaged
from everstep.keeper import wire
from everstep.keeper.peers import Answer, Ask
from everstep.keeper.wire import Kind, z85, zmq

WORKERS = 8
_UNSENT_BYTES = 256 << 20  # answers that askers have not taken yet; above it nothing is taken on
_SESSIONS = 4096  # the least used is forgotten, and its asker begins another
_LOOK_MS = 20  # between two looks at what is being sent
_JOIN_S = 5.0
_REASON_LETTERS = 2000
_HEARTBEAT_MS, _DEAD_MS = 2000, 30_000  # an asker that is silent for so long is cut off, and what it was to get let go
_ZAP = "inproc://zeromq.zap.01"  # where libzmq asks whether a public key may come in

AskT = TypeVar("AskT", bound=Ask)


@dataclass(frozen=True, slots=True)
class Reply:
    """What a handler gives back.

    `release` is called exactly once, from any thread, as soon as nobody reads `payload` any more: it was sent, or
    there is nobody to send it to. Until then the bytes must stay as they are, else the asker finds them damaged.
    """

    answer: Answer
    payload: Sequence[memoryview] = ()
    release: Callable[[], None] | None = None


class _Sessions:
    """Those that this server has opened, and how far each has come.

    What is not in it was never opened or is forgotten, and is not believed; so nothing recorded is ever believed again.
    """

    def __init__(self, secret: wire.Secret) -> None:
        self._secret = secret
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, tuple[wire.Session, int]] = OrderedDict()

    def open(self, nonce: bytes) -> wire.Session:
        session = self._secret.session(nonce, wire.nonce())
        with self._lock:
            self._known[session.name] = (session, 0)
            while len(self._known) > _SESSIONS:
                self._known.popitem(last=False)
        return session

    def find(self, name: bytes) -> wire.Session | None:
        with self._lock:
            found = self._known.get(name)
        return found[0] if found else None

    def advance(self, session: wire.Session, sequence: int) -> None:
        with self._lock:
            _, last = self._known.get(session.name, (session, sequence))
            if sequence <= last:
                raise wire.Refused("this was asked before")
            self._known[session.name] = (session, sequence)
            self._known.move_to_end(session.name)


@dataclass(frozen=True, slots=True)
class _Outgoing:
    """What came of one question; no frames if there is nothing to say."""

    frames: Sequence[bytes | memoryview] = ()
    release: Callable[[], None] | None = None

    @property
    def size(self) -> int:
        return sum(map(len, self.frames))


class Server(Generic[AskT]):
    """Answers until it is closed.

    `node` is the name under which it is asked; who means another gets no answer. `address` is what the others are told:
    the host that the caller says it is known by (`advertise`), and the port. `bind`: a local address, or * for all;
    `port` 0: any that is free.
    """

    def __init__(
        self,
        node: str,
        secret: bytes,
        asks: msgspec.msgpack.Decoder[AskT],
        handle: Callable[[AskT, memoryview | None], Reply],
        *,
        advertise: str,
        bind: str = "*",
        port: int = 0,
        encrypt: bool = False,
        workers: int = WORKERS,
    ) -> None:
        self.refused = 0  # messages that nobody with the secret can have sent here and now
        self._secret, self._asks, self._handle = wire.Secret(secret, node), asks, handle
        self._sessions = _Sessions(self._secret)
        self._context: wire.Context = zmq.Context()
        self._zap = self._guard() if encrypt else None
        self._router = self._context.socket(zmq.ROUTER)
        try:
            self._listen(bind, port)
        except zmq.ZMQError as error:
            self._context.destroy(0)
            raise OSError(error.errno, f"cannot listen on {bind}:{port or '*'}: {error}") from error
        bound = self._router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
        self.address = f"[{advertise}]:{bound}" if ":" in advertise else f"{advertise}:{bound}"
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._closing = False
        self._idle_workers = workers
        self._work: queue.SimpleQueue[list[zmq.Frame] | None] = queue.SimpleQueue()  # at most one for each worker
        self._outgoing: deque[_Outgoing] = deque()  # the same
        self._unsent: list[tuple[zmq.MessageTracker, _Outgoing]] = []
        self._threads = [threading.Thread(target=self._talk, name="everstep-peers", daemon=True)] + [
            threading.Thread(target=self._work_on, name=f"everstep-peers-{number}", daemon=True)
            for number in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def _listen(self, bind: str, port: int) -> None:
        wire.prepare(self._router)
        self._router.heartbeat_ivl, self._router.heartbeat_timeout = _HEARTBEAT_MS, _DEAD_MS
        self._router.tcp_maxrt = _DEAD_MS  # heartbeats queue behind an answer that is not taken, and see nothing
        if self._zap is not None:
            self._router.curve_server = True
            self._router.curve_publickey, self._router.curve_secretkey = self._secret.curve("server")
        host = f"[{bind}]" if ":" in bind else bind
        self._router.bind(f"tcp://{host}:{port or '*'}")

    def _guard(self) -> wire.Socket:
        socket = self._context.socket(zmq.REP)
        socket.linger = 0
        socket.bind(_ZAP)
        return socket

    # -- the talking thread

    def _talk(self) -> None:
        while not self._closing:
            for source in self._look():
                if source == self._wake:
                    os.eventfd_read(self._wake)
                elif self._zap is not None and source is self._zap:
                    self._let_in(self._zap)
                else:
                    self._idle_workers -= 1
                    self._work.put(self._router.recv_multipart(copy=False))
            self._send_all()
            self._let_go()
        self._end()

    def _look(self) -> list[object]:
        """Whatever has something for us; the router only while we can take it."""
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        if self._zap is not None:
            poller.register(self._zap, zmq.POLLIN)
        if self._idle_workers and sum(outgoing.size for _, outgoing in self._unsent) < _UNSENT_BYTES:
            poller.register(self._router, zmq.POLLIN)
        return [source for source, _ in poller.poll(_LOOK_MS if self._unsent else None)]

    def _let_in(self, zap: wire.Socket) -> None:
        version, request, _, _, _, mechanism, *credentials = zap.recv_multipart()
        key, _ = self._secret.curve("asker")
        known = mechanism == b"CURVE" and [z85.encode(given) for given in credentials] == [key]
        self.refused += not known
        status, text = (b"200", b"OK") if known else (b"400", b"not of this run")
        zap.send_multipart([version, request, status, text, b"", b""])

    def _send_all(self) -> None:
        while self._outgoing:
            outgoing = self._outgoing.popleft()
            self._idle_workers += 1
            if outgoing.frames:  # an asker that is gone gets nothing: libzmq drops it
                self._unsent.append((wire.send(self._router, outgoing.frames), outgoing))
            else:
                self.refused += 1

    def _let_go(self) -> None:
        done = [outgoing for tracker, outgoing in self._unsent if tracker.done]
        self._unsent = [(tracker, outgoing) for tracker, outgoing in self._unsent if not tracker.done]
        for outgoing in done:
            _release(outgoing)

    def _end(self) -> None:
        self._router.close(0)
        if self._zap is not None:
            self._zap.close(0)
        self._context.term()
        for tracker, outgoing in self._unsent:
            wire.wait_until_unread(tracker)
            _release(outgoing)

    # -- the workers

    def _work_on(self) -> None:
        while (frames := self._work.get()) is not None:
            try:
                outgoing = self._answer(frames)
            except (wire.Refused, IndexError):
                outgoing = _Outgoing()
            del frames  # may be large, and the next question may be long in coming
            if self._closing:
                _release(outgoing)
                return
            self._outgoing.append(outgoing)
            del outgoing
            os.eventfd_write(self._wake, 1)

    def _answer(self, frames: list[zmq.Frame]) -> _Outgoing:
        asker, head = frames[0].bytes, wire.read_head(frames[1].buffer)
        if head.kind is Kind.HELLO:
            head.verify(self._secret.of_kind(Kind.HELLO))
            name = self._sessions.open(head.session).name
            key = self._secret.of_kind(Kind.WELCOME)
            return _Outgoing([asker, wire.write_head(Kind.WELCOME, head.session, 0, key, name)])
        if head.kind is not Kind.ASK:
            raise wire.Refused("not a question")
        session = self._sessions.find(head.session)
        if session is None:
            key = self._secret.of_kind(Kind.STALE)
            return _Outgoing([asker, wire.write_head(Kind.STALE, head.session, head.sequence, key)])
        head.verify(session.asks.head)
        self._sessions.advance(session, head.sequence)
        views = [frame.buffer for frame in frames[2:]]
        return self._handled(asker, head, session, views)

    def _handled(self, asker: bytes, head: wire.Head, session: wire.Session, views: list[memoryview]) -> _Outgoing:
        reply = None
        try:
            question = self._asks.decode(wire.unseal(head, session, views))
            reply = self._handle(question, wire.joined(views))
            payload = wire.flat(reply.payload)
            body = msgspec.msgpack.encode(reply.answer)
            answer = wire.seal(Kind.ANSWER, session, head.sequence, body, payload)
            return _Outgoing([asker, answer, *payload], reply.release)
        except BaseException as error:  # whatever it is: the asker waits, and is told
            reason = error.reason if isinstance(error, Damaged) else f"{type(error).__name__}: {error}"
            failed = wire.seal(Kind.FAILED, session, head.sequence, reason[:_REASON_LETTERS].encode(), ())
            return _Outgoing([asker, failed], reply.release if reply is not None else None)

    def close(self) -> None:
        """Questions that are not answered yet stay so. A handler that does not come back is left behind."""
        self._closing = True
        os.eventfd_write(self._wake, 1)
        for _ in self._threads[1:]:
            self._work.put(None)
        until = time.monotonic() + _JOIN_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        while self._outgoing:
            _release(self._outgoing.popleft())
        if not any(thread.is_alive() for thread in self._threads):  # else it may yet write there
            os.close(self._wake)

    def __enter__(self) -> Server[AskT]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _release(outgoing: _Outgoing) -> None:
    if outgoing.release is None:
        return
    try:
        outgoing.release()
    except Exception:  # said as for any thread that fails; the talking goes on
        threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
