"""The TCP connections between some processes of a command and all others: ended, or silent for a while.

The processes do not help, and no privilege is needed: whoever may trace a process may have copies of its sockets
(pidfd_getfd). A connection is ended by shutdown. It is silent while filters at both of its ends let no segment in, as
if a cable were pulled: nobody is told, and what was sent meanwhile is sent again when the filters are gone.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

from everstep.errors import EverstepError
from everstep.lab.processes import Tree

_PIDFD_GETFD = 438  # the number of this call on every machine
_ATTACH_FILTER, _DETACH_FILTER = 26, 27  # SO_ATTACH_FILTER and SO_DETACH_FILTER
_NOTHING = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))  # BPF_RET: 0 bytes of a segment come in
_FILTER = struct.pack("HP", 1, ctypes.addressof(_NOTHING))
_MAPPED = "0000000000000000FFFF0000"  # before an address of IPv4 that is written as one of IPv6
_REST_S = 0.05  # between two looks at which connections there are


class _Socket(NamedTuple):
    """A TCP socket that a process holds; addresses as the kernel writes them."""

    pid: int
    descriptor: int
    own: str
    other: str

    @property
    def is_connected(self) -> bool:
        """It does not only listen."""
        return not self.other.endswith(":0000")


class Connections:
    def __init__(self, pids: Collection[int], tree: Tree) -> None:
        """`pids`: whose connections, with whoever is not among them. All came of the command."""
        self._pids, self._tree = set(pids), tree
        self._silent: dict[str, socket.socket] = {}  # copies, by the number of the socket
        self._looked_at = 0.0

    def end(self) -> int:
        """All that there are; both sides are told. How many there were."""
        ended = 0
        for number, one in self._outward(self._sockets()).items():
            copy = _copy(one, number) if one.is_connected else None
            if copy is not None:
                with copy:
                    _shut(copy)
                ended += 1
        return ended

    def silence(self) -> int:
        """Nothing passes until they are let go, also on connections that are found later. How many there are."""
        self._looked_at = time.monotonic()
        found = self._sockets()
        outward = self._outward(found)
        facing = {(one.other, one.own) for one in outward.values()}
        for number, one in found.items():
            if number not in self._silent and (number in outward or (one.own, one.other) in facing):
                copy = _copy(one, number)
                if copy is not None:
                    copy.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, _FILTER)
                    self._silent[number] = copy
        return sum(one.is_connected for one in outward.values())

    def look_again(self) -> None:
        """For connections that were made meanwhile; not more often than is worth it."""
        if time.monotonic() - self._looked_at >= _REST_S:
            self.silence()

    def let_go(self) -> None:
        for copy in self._silent.values():
            with copy:
                copy.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)
        self._silent.clear()

    def _sockets(self) -> dict[str, _Socket]:
        """Of all that came of the command. What several hold counts as that of the processes that are asked for."""
        ours = self._tree.pids()
        return _sockets([*(ours & self._pids), *(ours - self._pids)])

    def _outward(self, found: dict[str, _Socket]) -> dict[str, _Socket]:
        """Those of the processes that are asked for, but for what is between themselves."""
        mine = {number: one for number, one in found.items() if one.pid in self._pids}
        ends = {(one.own, one.other) for one in mine.values()}
        return {number: one for number, one in mine.items() if (one.other, one.own) not in ends}


def _sockets(pids: Iterable[int]) -> dict[str, _Socket]:
    """The TCP sockets of processes, by the number that the kernel gave them; the first who holds one is named."""
    found: dict[str, _Socket] = {}
    for pid in pids:
        try:
            ends, names = _ends(pid), os.listdir(f"/proc/{pid}/fd")
        except PermissionError as error:
            raise _refusal(pid, error) from None
        except OSError:
            continue  # it has just ended
        for name in names:
            try:
                number = os.readlink(f"/proc/{pid}/fd/{name}").removeprefix("socket:[").rstrip("]")
            except FileNotFoundError:
                continue  # it has just been closed
            if number in ends:
                found.setdefault(number, _Socket(pid, int(name), *ends[number]))
    return found


def _ends(pid: int) -> dict[str, tuple[str, str]]:
    """Of every TCP socket in the network that a process sees: its own address, and the other's."""
    found = {}
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            found[words[9]] = (words[1].removeprefix(_MAPPED), words[2].removeprefix(_MAPPED))
    return found


def _copy(one: _Socket, number: str) -> socket.socket | None:
    """None: it is not there any more."""
    try:
        process = os.pidfd_open(one.pid)
        try:
            descriptor = _pidfd_getfd(process, one.descriptor)
        finally:
            os.close(process)
    except OSError as error:
        if error.errno in (errno.ESRCH, errno.EBADF):
            return None
        raise _refusal(one.pid, error) from None
    if os.fstat(descriptor).st_ino != int(number):
        os.close(descriptor)
        return None
    return socket.socket(fileno=descriptor)


def _pidfd_getfd(process: int, descriptor: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    copied: int = libc.syscall(_PIDFD_GETFD, process, descriptor, 0)
    if copied < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return copied


def _shut(copy: socket.socket) -> None:
    try:
        copy.shutdown(socket.SHUT_RDWR)
    except OSError as error:
        if error.errno != errno.ENOTCONN:  # it has just been ended by somebody else
            raise


def _refusal(pid: int, error: OSError) -> EverstepError:
    return EverstepError(
        f"the kernel does not give the sockets of process {pid} away ({error.strerror}): that takes Linux 5.6, and the "
        "right to trace it (kernel.yama.ptrace_scope 0 or 1; in a container, seccomp must allow pidfd_getfd)"
    )
