"""Who does not come to a stop in time is ended; a keeper that was late itself blames nobody."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from everstep.keeper.lines import Lines
from everstep.keeper.protocol import Channel, Enrol, Free, Lost

DETECT_S = 10.0
TOLD_AT = 100.0


@pytest.fixture
def worker() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def channel() -> Iterator[Channel]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        one = Channel(ours)
        yield one
        one.close()


def told(worker: subprocess.Popen[bytes], channel: Channel) -> Lines:
    """Lines of one that has been told that its view has ended."""
    lines = Lines()
    said = Enrol(worker="w", job="j", pid=worker.pid, view=0, rank=0, world=2, on_loss=("rollback",), detect_s=DETECT_S)
    lines.enrol(channel, said)
    lines.end_the_hung(TOLD_AT)
    lines.deliver({"w": Lost(view=0, ranks=(1,), reason="its process ended")}, None, TOLD_AT)
    return lines


def look(lines: Lines, begin: float, end: float) -> None:
    for second in range(round(begin), round(end) + 1):
        lines.end_the_hung(float(second))


def test_whoever_does_not_come_to_a_stop_is_ended(worker: subprocess.Popen[bytes], channel: Channel) -> None:
    lines = told(worker, channel)
    look(lines, TOLD_AT, TOLD_AT + DETECT_S)
    assert worker.poll() is None
    look(lines, TOLD_AT + DETECT_S + 1, TOLD_AT + DETECT_S + 1)
    assert worker.wait(10) == -signal.SIGKILL


def test_a_keeper_that_slept_gives_them_their_time_when_it_wakes(
    worker: subprocess.Popen[bytes], channel: Channel
) -> None:
    lines = told(worker, channel)
    woke = TOLD_AT + 3 * DETECT_S
    look(lines, woke, woke + DETECT_S - 1)
    assert worker.poll() is None
    look(lines, woke + DETECT_S, woke + DETECT_S + 2)
    assert worker.wait(10) == -signal.SIGKILL


def test_one_that_is_on_its_own_time_is_waited_for(worker: subprocess.Popen[bytes], channel: Channel) -> None:
    lines = told(worker, channel)
    lines.free(channel, Free(view=0))
    look(lines, TOLD_AT, TOLD_AT + 5 * DETECT_S)
    assert worker.poll() is None
