"""The connections of process groups: what a collective hangs on when a peer is lost, and how it is set free.

Gloo has no abort: only the neighbours of a dead rank notice, and the others wait for a timeout of many minutes. But its
connections are sockets of this process. Shutting them down ends every operation on them with an error at once, in
whatever thread it waits, and its peers see the end of theirs.

While a group is being made there may be no connection yet to shut down: of each two ranks one dials and the other waits
to be dialled, for as long as any collective may take, although the one that should dial has given up. So whoever cuts
dials in its place, and hangs up.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

_DIAL_S = 1.0  # within this machine


@dataclass(slots=True)
class Wires:
    """Sockets that were opened while something was made. A descriptor may be another's by now: its inode tells."""

    sockets: dict[int, str] = field(default_factory=dict)  # descriptor -> inode
    _before: dict[int, str] | None = None  # what there was, while it is being made
    _ranks: int = 0  # that may dial meanwhile
    # what is being made is not finished while somebody looks for what belongs to it: he would find what comes next
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def cut(self) -> None:
        """Shut down the connections. What only listens is left alone, since gloo ends the process otherwise."""
        with self._lock:
            self._cut()

    def _cut(self) -> None:
        for descriptor, inode in self._known().items():
            if _inode(descriptor) != inode:
                continue
            try:
                with socket.socket(fileno=os.dup(descriptor)) as one:
                    if one.family not in (socket.AF_INET, socket.AF_INET6):
                        continue
                    if not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        one.shutdown(socket.SHUT_RDWR)
                    elif self.are_being_made:
                        _dial(one, self._ranks)
            except OSError:
                continue  # it was closed by its other end, or in this very moment by ours

    @property
    def are_being_made(self) -> bool:
        return self._before is not None

    def _known(self) -> dict[int, str]:
        before = self._before
        return self.sockets if before is None else self.sockets | dict(_sockets().items() - before.items())

    @contextmanager
    def noting(self, ranks: int) -> Iterator[None]:
        """Take down the sockets that are opened meanwhile, beside those of before, by groups of so many ranks."""
        self._ranks, self._before = ranks, _sockets()
        try:
            yield
        finally:
            with self._lock:
                self.sockets, self._before = self._known(), None


def _dial(listener: socket.socket, ranks: int) -> None:
    """Be everybody whom gloo waits for there: a caller first says the number that it is expected by."""
    for number in range(ranks):
        with socket.socket(listener.family, socket.SOCK_STREAM) as caller:
            caller.settimeout(_DIAL_S)
            caller.connect(listener.getsockname())
            caller.sendall(struct.pack("=q", number))


def _sockets() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        inode = _inode(int(name))
        if inode.startswith("socket:"):
            found[int(name)] = inode
    return found


def _inode(descriptor: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""
