"""Connections of other processes are ended, or silent for a while, without their help."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from everstep.errors import EverstepError
from everstep.lab import connections
from everstep.lab.connections import Connections

PATIENCE_S = 30.0
SILENT_S = 0.5
# Gives back whatever it gets, on as many connections as it is told to make; ends when one of them has ended.
ECHO = """
import select, socket, sys
where, made = ("127.0.0.1", int(sys.argv[1])), []
inner = socket.create_server(("127.0.0.1", 0))
both = socket.create_connection(inner.getsockname()), inner.accept()[0]
while True:
    for ready in select.select([sys.stdin, *made], [], [])[0]:
        if ready is sys.stdin:
            sys.stdin.readline()
            made.append(socket.create_connection(where))
        else:
            said = ready.recv(100)
            if not said:
                both[0].sendall(b"x")
                sys.exit(7 if both[1].recv(1) == b"x" else 1)
            ready.sendall(said)
"""


@dataclass
class Echo:
    process: subprocess.Popen[bytes]
    server: socket.socket

    def connect(self) -> socket.socket:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()
        made = self.server.accept()[0]
        made.settimeout(PATIENCE_S)
        return made

    def pids(self) -> set[int]:
        """Of this process, as if it had come of the same command, and the other."""
        return {os.getpid(), self.process.pid}


@pytest.fixture
def echo() -> Iterator[Echo]:
    with started() as one:
        yield one


@contextmanager
def started() -> Iterator[Echo]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(PATIENCE_S)
        words = [sys.executable, "-u", "-c", ECHO, str(server.getsockname()[1])]
        with subprocess.Popen(words, stdin=subprocess.PIPE) as process:
            yield Echo(process, server)
            process.kill()


def cut(echo: Echo, *pids: int) -> Connections:
    tree: Any = echo
    return Connections(pids or (echo.process.pid,), tree)


def answers(talk: socket.socket, said: bytes) -> bool:
    talk.sendall(said)
    talk.settimeout(SILENT_S)
    try:
        return talk.recv(100) == said
    except TimeoutError:
        return False
    finally:
        talk.settimeout(PATIENCE_S)


def test_nothing_passes_while_it_is_silent_and_then_all_of_it_does(echo: Echo) -> None:
    with echo.connect() as talk, echo.connect() as other:
        assert answers(talk, b"a") and answers(other, b"a")
        silent = cut(echo)
        assert silent.silence() == 2
        assert not answers(talk, b"b") and not answers(other, b"b")
        with echo.connect() as late:
            assert silent.silence() == 3
            assert not answers(late, b"c")
            silent.let_go()
            assert [talk.recv(100), other.recv(100), late.recv(100)] == [b"b", b"b", b"c"]
        assert echo.process.wait(PATIENCE_S) == 7


def test_a_side_that_only_sends_is_silent_too(echo: Echo) -> None:
    """Filters are on both ends: what the process sends on its own does not come through either."""
    with echo.connect() as talk:
        assert answers(talk, b"a")
        silent = cut(echo)
        silent.silence()
        copies = [copy.getsockname() for copy in silent._silent.values()]
        assert talk.getsockname() in copies and talk.getpeername() in copies
        silent.let_go()


def test_both_sides_are_told_of_a_connection_that_is_ended_and_inner_ones_stay(echo: Echo) -> None:
    with echo.connect() as talk:
        assert answers(talk, b"a")
        assert cut(echo).end() == 1
        assert talk.recv(100) == b""
        assert echo.process.wait(PATIENCE_S) == 7
    assert cut(echo).end() == 0


def test_what_is_between_those_who_are_cut_off_together_is_left_alone() -> None:
    """In a process that has no other connections: those of other tests in this one would be cut, too."""
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def cut_off_together() -> None:
    with started() as echo, echo.connect() as talk:
        assert answers(talk, b"a")
        assert cut(echo, *echo.pids()).silence() == 0
        assert cut(echo, *echo.pids()).end() == 0
        assert answers(talk, b"b")


def test_a_kernel_that_refuses_is_named_with_what_it_takes(echo: Echo, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(process: int, descriptor: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(connections, "_pidfd_getfd", refuse)
    with echo.connect() as talk:
        assert answers(talk, b"a")
        for act in (cut(echo).end, cut(echo).silence):
            with pytest.raises(
                EverstepError, match=r"sockets of process \d+ away \(Operation not permitted\): .*Linux"
            ):
                act()


def test_a_descriptor_that_is_something_else_by_now_is_left_alone(echo: Echo) -> None:
    with echo.connect() as talk:
        there = connections._Socket(os.getpid(), talk.fileno(), "", "")
        assert connections._copy(there, "1") is None
        copy = connections._copy(there, str(os.fstat(talk.fileno()).st_ino))
        assert copy is not None and copy.getpeername() == talk.getpeername()
        copy.close()


if __name__ == "__main__":
    cut_off_together()
