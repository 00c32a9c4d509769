"""Where those of a view meet: words under names, kept by one of them for the process group of all.

Torch has a store for this, and it is not used here for two reasons. It asks a name server what everybody who connects
is called, and where none answers five or ten seconds pass: as long as a rank has until it is taken for hung. And a
client of it that is cut off tries again by itself, for a second and more, although the view is over. Here nobody is
asked, and a connection that is cut is over at once.
"""

from __future__ import annotations

import selectors
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import msgspec
import torch.distributed as dist

_LENGTH = struct.Struct("<I")
_MOST_BYTES = 64 << 20  # of one message
_PIECE_BYTES = 1 << 16
_CALL_S = 1.0  # until somebody who is there has answered a call
_TAKE_S = 5.0  # until an answer must have been taken: whoever asked waits for it
_AGAIN_S = 0.05
_LEAST_S = 0.001
_HERE = "127.0.0.1"

What = Literal["set", "get", "wait", "check", "add", "swap", "delete", "count"]


class _Ask(msgspec.Struct, frozen=True, array_like=True):
    number: int  # only grows: what was asked before is not waited for any more
    what: What
    keys: tuple[str, ...] = ()
    value: bytes = b""
    expected: bytes = b""
    amount: int = 0


_asks = msgspec.msgpack.Decoder(_Ask)
_answers = msgspec.msgpack.Decoder(tuple[int, bytes | int | bool | None])


@dataclass(slots=True, eq=False)
class _Guest:
    connection: socket.socket
    heard: bytearray = field(default_factory=bytearray)
    waits: _Ask | None = None  # for words that nobody has said yet


class Meeting:
    """In this process, in a thread of its own, until it is closed."""

    def __init__(self, host: str) -> None:
        """`host`: where the others find this process. If they are all on this machine, nobody else gets in."""
        self._listener = _listener(host)
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._words: dict[str, bytes] = {}
        self._guests: set[_Guest] = set()
        self._is_closed = False
        threading.Thread(target=self._serve, name="everstep-meeting", daemon=True).start()

    def close(self) -> None:
        """Whoever is here is sent away."""
        self._is_closed = True
        try:
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it is closed already

    # -- a thread of its own

    def _serve(self) -> None:
        with self._listener, selectors.DefaultSelector() as ready:
            ready.register(self._listener, selectors.EVENT_READ)
            while not self._is_closed:
                for key, _ in ready.select():
                    if key.data is None:
                        self._welcome(ready)
                    elif not self._hear(key.data):
                        ready.unregister(key.fileobj)
                        key.data.connection.close()
                        self._guests.discard(key.data)
            for guest in self._guests:
                guest.connection.close()

    def _welcome(self, ready: selectors.BaseSelector) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            time.sleep(0.0 if self._is_closed else _AGAIN_S)  # too many open files, or whoever called hung up
            return
        connection.settimeout(_TAKE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        guest = _Guest(connection)
        self._guests.add(guest)
        ready.register(connection, selectors.EVENT_READ, guest)

    def _hear(self, guest: _Guest) -> bool:
        """Whether it is still there, and makes sense."""
        try:
            data = guest.connection.recv(_PIECE_BYTES)
            guest.heard += data
            while (message := _message(guest.heard)) is not None:
                self._answer(guest, _asks.decode(message))
        except (OSError, msgspec.DecodeError, ValueError):
            return False
        return bool(data)

    def _answer(self, guest: _Guest, ask: _Ask) -> None:
        guest.waits = ask
        count = len(self._words)
        self._tell(guest, ask)
        if len(self._words) > count:
            for other in self._guests:
                if other.waits is not None:
                    self._tell(other, other.waits)

    def _tell(self, guest: _Guest, ask: _Ask) -> None:
        if ask.what in ("get", "wait") and not self._words.keys() >= set(ask.keys):
            return
        guest.waits = None
        try:
            _send(guest.connection, (ask.number, self._do(ask)))
        except OSError:
            return  # it is gone, which is heard when its turn comes

    def _do(self, ask: _Ask) -> bytes | int | bool | None:
        words, key = self._words, ask.keys[0] if ask.keys else ""
        match ask.what:
            case "set":
                words[key] = ask.value
            case "get":
                return words[key]
            case "check":
                return words.keys() >= set(ask.keys)
            case "add":
                words[key] = str(int(words.get(key, b"0")) + ask.amount).encode()
                return int(words[key])
            case "swap":
                if words.get(key, b"") == ask.expected:
                    words[key] = ask.value
                return words.get(key, ask.expected)
            case "delete":
                return words.pop(key, None) is not None
            case "count":
                return len(words)
        return None


class Visit(dist.Store):
    """A connection to a meeting, as what torch takes for a store. Once it is cut, whatever is asked fails at once."""

    def __init__(self, address: str, timeout: timedelta) -> None:
        """`timeout`: for words that somebody has yet to say. An OSError if nobody is there."""
        super().__init__()
        self.set_timeout(timeout)
        self._address, self._lock, self._number = address, threading.Lock(), 0
        self._heard = bytearray()
        self._copies: list[Visit] = []  # torch keeps only its own half of them
        host, _, port = address.rpartition(":")
        self._connection = socket.create_connection((host.strip("[]"), int(port)), _CALL_S)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def set(self, key: str, value: Any) -> None:
        self._ask("set", key, value=_encoded(value))

    def get(self, key: str) -> bytes:
        return bytes(self._ask("get", key))

    def add(self, key: str, value: int) -> int:
        return int(self._ask("add", key, amount=value))

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask("check", *keys))

    def compare_set(self, key: str, expected_value: Any, desired_value: Any) -> bytes:
        return bytes(self._ask("swap", key, value=_encoded(desired_value), expected=_encoded(expected_value)))

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", key))

    def num_keys(self) -> int:
        return int(self._ask("count"))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._ask("wait", *keys, limit=timeout)

    def clone(self) -> Visit:
        self._copies.append(Visit(self._address, self._limit))
        return self._copies[-1]

    deleteKey, getNumKeys = delete_key, num_keys  # torch asks for them by these names

    def close(self) -> None:
        for copy in self._copies:
            copy.close()
        self._connection.close()

    @property
    def _limit(self) -> timedelta:
        limit: timedelta = self.timeout  # type: ignore[attr-defined]
        return limit

    def _ask(self, what: What, *keys: str, limit: timedelta | None = None, **more: Any) -> Any:
        limit = self._limit if limit is None else limit
        with self._lock:
            self._number += 1
            try:
                self._connection.settimeout(_TAKE_S)
                _send(self._connection, _Ask(self._number, what, keys, **more))
                return self._await(self._number, time.monotonic() + limit.total_seconds())
            except TimeoutError as error:
                named = ", ".join(keys)
                raise dist.DistStoreError(f"nobody said {named} in the store of this view within {limit}") from error
            except OSError as error:
                raise dist.DistNetworkError(f"the connection to the store of this view has ended: {error}") from error

    def _await(self, number: int, deadline: float) -> Any:
        while True:
            while (message := _message(self._heard)) is not None:
                of, answer = _answers.decode(message)
                if of == number:
                    return answer
            self._connection.settimeout(max(_LEAST_S, deadline - time.monotonic()))
            data = self._connection.recv(_PIECE_BYTES)
            if not data:
                raise ConnectionResetError("it was closed by the other end")
            self._heard += data


def _listener(host: str) -> socket.socket:
    if host == _HERE:
        return socket.create_server((host, 0), backlog=socket.SOMAXCONN)
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", 0), family=socket.AF_INET6, backlog=socket.SOMAXCONN, dualstack_ipv6=True)
        except OSError:
            pass  # the kernel knows such addresses, and this machine has none
    return socket.create_server(("", 0), backlog=socket.SOMAXCONN)


def _encoded(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _send(connection: socket.socket, message: object) -> None:
    data = msgspec.msgpack.encode(message)
    connection.sendall(_LENGTH.pack(len(data)) + data)


def _message(heard: bytearray) -> bytes | None:
    """The first whole message of what was heard, taken out of it."""
    if len(heard) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack_from(heard)
    if length > _MOST_BYTES:
        raise ValueError(f"a message of {length} bytes is none of ours")
    if len(heard) < _LENGTH.size + length:
        return None
    found = bytes(heard[_LENGTH.size : _LENGTH.size + length])
    del heard[: _LENGTH.size + length]
    return found
