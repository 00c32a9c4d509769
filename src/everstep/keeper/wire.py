"""What keepers of different nodes put on the wire: messages that only holders of the run's secret can write.

A message is a head frame (prelude, MAC, rest) and as many payload frames as the rest says. An asker opens a session:
`HELLO` with a nonce of its own, `WELCOME` with the session's name, which the server has made up. Both nonces and the
secret give the session's keys, one set for each direction and each node that is asked, so that nothing said in one
session, one direction, to one node or in one life of its server is believed in another. `ASK` and `ANSWER` (or
`FAILED`) carry a sequence number that only grows: what was recorded and is sent again is refused. `STALE` says that
the server does not know the session (it was started anew) and has done nothing.

What is protected. Without the secret nobody can ask, answer, alter, repeat or redirect a message, on the path or off
it: heads have an HMAC-SHA256, and payloads a GMAC (AES-256-GCM over no plaintext) under keys of the session with the
sequence number as its nonce; the head's MAC covers the payload's. GMAC was measured fast enough to be always on
(`bench/results/wire.md`), so there is no unkeyed digest beside it: it finds a flipped bit as well.
What is not, without encryption: whoever sees the packets can read them, state of the training included; and whoever
reaches the port can make a server read up to its limits and throw it away, or hold connections. Encryption (CURVE, by
libzmq, with keys derived from the secret, and strangers turned away at the handshake) closes both, but moves a
fraction of the bytes a second (the same table), so it is chosen by whoever does not trust the network.
Neither holds against somebody who has the secret, nor for the past once it leaks (CURVE's sessions excepted).
"""

from __future__ import annotations

import hmac
import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import msgspec

from everstep.errors import BadConfig, Damaged

try:
    import zmq as zmq  # also for the modules beside this one: its absence is explained here
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
    from zmq.utils import z85 as z85
    from zmq.utils.monitor import recv_monitor_message as recv_monitor_message
except ImportError as error:
    raise BadConfig(
        f"keepers of several nodes need {error.name}, which is not installed: pip install 'everstep[nodes]'"
    ) from error

MAX_PAYLOAD_BYTES = 64 << 20  # of one message; more goes in several
MAX_HEAD_BYTES = 1 << 20
_PRELUDE = struct.Struct("<B16sQ")  # kind, session, sequence
_MAC_BYTES = 32
_NONCE_BYTES = 16
_LET_GO_S = 1.0

Socket = zmq.Socket[bytes]
Context = zmq.Context[zmq.Socket[bytes]]


class Kind(IntEnum):
    HELLO = 1
    WELCOME = 2
    ASK = 3
    ANSWER = 4
    FAILED = 5
    STALE = 6


class Refused(Exception):
    """Frames that no holder of the secret has sent, or not here and now; there is nothing to answer."""


class _Rest(msgspec.Struct, frozen=True, array_like=True):
    body: bytes
    lengths: tuple[int, ...] = ()
    tag: bytes = b""


_rest = msgspec.msgpack.Decoder(_Rest)


@dataclass(frozen=True, slots=True)
class Keys:
    """Of one direction of one session."""

    head: bytes
    payload: bytes

    def tag(self, sequence: int, views: Iterable[memoryview]) -> bytes:
        """The payload's MAC. A direction uses a sequence number once, which GMAC's nonce depends on."""
        maker = Cipher(algorithms.AES(self.payload), modes.GCM(sequence.to_bytes(12, "little"))).encryptor()
        for view in views:
            maker.authenticate_additional_data(view)
        maker.finalize()
        return maker.tag


@dataclass(frozen=True, slots=True)
class Session:
    name: bytes
    asks: Keys
    answers: Keys


class Secret:
    """What all keepers of a run know, and the keys that follow from it for talking to one node's."""

    def __init__(self, secret: bytes, node: str) -> None:
        if len(secret) < 16:
            raise BadConfig("the secret of a run is at least 16 random bytes: use secrets.token_bytes(32)")
        self._root = hmac.digest(secret, b"everstep keepers 1\0" + node.encode(), "sha256")
        self._of_kind = {kind: self._derive(kind.name.encode()) for kind in (Kind.HELLO, Kind.WELCOME, Kind.STALE)}

    def _derive(self, *words: bytes) -> bytes:
        return hmac.digest(self._root, b"\0".join(words), "sha256")

    def of_kind(self, kind: Kind) -> bytes:
        """The key of what is said outside of a session."""
        return self._of_kind[kind]

    def session(self, nonce: bytes, name: bytes) -> Session:
        keys = [
            Keys(*(self._derive(side, what, nonce + name) for what in (b"head", b"payload")))
            for side in (b"ask", b"answer")
        ]
        return Session(name, *keys)

    def curve(self, side: str) -> tuple[bytes, bytes]:
        """Public and secret key of the node's server, or of all who ask it, as libzmq writes them."""
        private = z85.encode(self._derive(b"curve", side.encode()))
        return zmq.curve_public(private), private


def nonce() -> bytes:
    return os.urandom(_NONCE_BYTES)


@dataclass(frozen=True, slots=True)
class Head:
    kind: Kind
    session: bytes
    sequence: int
    _mac: bytes = field(repr=False)
    _signed: bytes = field(repr=False)

    def verify(self, key: bytes) -> _Rest:
        """What follows the prelude, if a holder of this key wrote it."""
        if not hmac.compare_digest(self._mac, hmac.digest(key, self._signed, "sha256")):
            raise Refused("the MAC does not hold")
        try:
            return _rest.decode(self._signed[_PRELUDE.size :])
        except msgspec.DecodeError as error:
            raise Refused("another version of Everstep") from error


def write_head(kind: Kind, session: bytes, sequence: int, key: bytes, rest: _Rest | bytes = b"") -> bytes:
    prelude = _PRELUDE.pack(kind, session, sequence)
    body = msgspec.msgpack.encode(rest if isinstance(rest, _Rest) else _Rest(rest))
    if len(body) > MAX_HEAD_BYTES // 2:
        raise ValueError(f"a message of {len(body)} bytes is too long: send its bulk as payload")
    return prelude + hmac.digest(key, prelude + body, "sha256") + body


def read_head(frame: bytes | memoryview) -> Head:
    data = bytes(frame[:MAX_HEAD_BYTES])
    if len(data) < _PRELUDE.size + _MAC_BYTES:
        raise Refused("too short")
    kind, session, sequence = _PRELUDE.unpack_from(data)
    if kind not in Kind._value2member_map_:
        raise Refused("no kind of ours")
    mac, rest = data[_PRELUDE.size : _PRELUDE.size + _MAC_BYTES], data[_PRELUDE.size + _MAC_BYTES :]
    return Head(Kind(kind), session, sequence, mac, data[: _PRELUDE.size] + rest)


def flat(payload: Sequence[memoryview]) -> list[memoryview]:
    """The same bytes, as bytes."""
    views = [view.cast("B") for view in payload]
    if (total := sum(map(len, views))) > MAX_PAYLOAD_BYTES:
        raise ValueError(f"a payload of {total} bytes is over {MAX_PAYLOAD_BYTES}: send it in several messages")
    return views


def seal(kind: Kind, session: Session, sequence: int, body: bytes, views: Sequence[memoryview]) -> bytes:
    """The head of a message; `views` follow it as frames, and stay as they are until they are sent."""
    keys = session.asks if kind is Kind.ASK else session.answers
    tag = keys.tag(sequence, views) if views else b""
    rest = _Rest(body, tuple(map(len, views)), tag)
    return write_head(kind, session.name, sequence, keys.head, rest)


def unseal(head: Head, session: Session, views: Sequence[memoryview]) -> bytes:
    """The body of a message whose head and payload are what was sent.

    Refused: nobody with the secret wrote this head. Damaged: somebody did, and the payload is not what he sent.
    """
    keys = session.asks if head.kind is Kind.ASK else session.answers
    rest = head.verify(keys.head)
    if rest.lengths != tuple(map(len, views)):
        raise Damaged("a payload came with another length than it was sent with")
    if views and not hmac.compare_digest(rest.tag, keys.tag(head.sequence, views)):
        raise Damaged("a payload was changed on its way")
    return rest.body


def joined(views: Sequence[memoryview]) -> memoryview | None:
    """One view of all the bytes, copied only if they came in several frames."""
    if len(views) <= 1:
        return views[0] if views else None
    whole = memoryview(bytearray(sum(map(len, views))))
    copy_into(whole, views)
    return whole


def copy_into(target: memoryview, views: Sequence[memoryview]) -> None:
    at = 0
    for view in views:
        target[at : at + len(view)] = view
        at += len(view)


def send(socket: Socket, frames: Sequence[bytes | memoryview]) -> zmq.MessageTracker:
    """One message. The tracker is done when libzmq no longer reads any of its frames."""
    trackers = []
    for left, frame in zip(reversed(range(len(frames))), frames, strict=True):
        tracker = socket.send(frame, zmq.SNDMORE if left else 0, copy=False, track=True)
        trackers.append(tracker)
    return zmq.MessageTracker(*trackers)


def wait_until_unread(sent: zmq.MessageTracker) -> None:
    """For a message whose socket is closed."""
    try:
        sent.wait(_LET_GO_S)
    except zmq.NotDone:
        return  # libzmq still has a reference, so the memory stays; the bytes go nowhere any more


def prepare(socket: Socket) -> None:
    """What both ends have in common: nothing waits at the end, queues are short, both versions of IP."""
    socket.linger = 0
    socket.ipv6 = True
    socket.sndhwm = socket.rcvhwm = 8  # messages of one connection; each end has one in flight
    socket.maxmsgsize = MAX_PAYLOAD_BYTES + MAX_HEAD_BYTES
