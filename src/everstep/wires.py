"""The connections of a process group: what a collective hangs on when a peer is lost, and how it is set free.

Gloo has no abort: only the neighbours of a dead rank notice, and the others wait for a timeout of many minutes. But its
connections are sockets of this process. Shutting them down ends every operation on them with an error at once, in
whatever thread it waits, and its peers see the end of theirs.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class Wires:
    """Sockets that were opened while something was made. A descriptor may be another's by now: its inode tells."""

    sockets: dict[int, str] = field(default_factory=dict)  # descriptor -> inode
    _before: dict[int, str] | None = None  # what there was, while it is being made

    def cut(self) -> None:
        """Shut down the connections; what only listens is left alone, since gloo ends the process otherwise."""
        for descriptor, inode in self._known().items():
            if _inode(descriptor) != inode:
                continue
            try:
                with socket.socket(fileno=os.dup(descriptor)) as one:
                    is_stream = one.family in (socket.AF_INET, socket.AF_INET6)
                    if is_stream and not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        one.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # it was closed by its other end, or in this very moment by ours

    @property
    def are_being_made(self) -> bool:
        return self._before is not None

    def _known(self) -> dict[int, str]:
        before = self._before
        return self.sockets if before is None else dict(_sockets().items() - before.items())

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Take down the sockets that are opened meanwhile."""
        self._before = _sockets()
        try:
            yield
        finally:
            self.sockets, self._before = self._known(), None


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
