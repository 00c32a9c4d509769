"""Who does not come to a stop in time is ended; a keeper that was late itself blames nobody."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from everstep.keeper import lines as lines_module
from everstep.keeper.lines import Lines
from everstep.keeper.protocol import Channel, Enrol, Free, Lost

DETECT_S = 10.0
TOLD_AT = 100.0


class Told:
    """The lines of one worker, this very process, which has just been told that its view has ended."""

    def __init__(self, channel: Channel) -> None:
        self.channel, self.lines, self.ended = channel, Lines(), list[int]()
        enrolled = Enrol(
            worker="w", job="j", pid=os.getpid(), view=0, rank=0, world=2, on_loss=("rollback",), detect_s=DETECT_S
        )
        self.lines.enrol(channel, enrolled)
        self.lines.end_the_hung(TOLD_AT)
        self.lines.deliver({"w": Lost(view=0, ranks=(1,), reason="its process ended")}, None, TOLD_AT)

    def look(self, begin: float, end: float) -> bool:
        """Every second. Whether it was ended."""
        for second in range(round(begin), round(end) + 1):
            self.lines.end_the_hung(float(second))
        return self.ended != []


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        made = Told(Channel(ours))
        monkeypatch.setattr(lines_module, "_end", made.ended.append)
        yield made


def test_whoever_does_not_come_to_a_stop_is_ended(told: Told) -> None:
    assert not told.look(TOLD_AT, TOLD_AT + DETECT_S)
    assert told.look(TOLD_AT + DETECT_S + 1, TOLD_AT + DETECT_S + 1)


def test_a_keeper_that_slept_gives_them_their_time_when_it_wakes(told: Told) -> None:
    woke = TOLD_AT + 3 * DETECT_S
    assert not told.look(woke, woke + DETECT_S - 1)
    assert told.look(woke + DETECT_S, woke + DETECT_S + 2)


def test_one_that_is_on_its_own_time_is_waited_for(told: Told) -> None:
    told.lines.free(told.channel, Free(view=0))
    assert not told.look(TOLD_AT, TOLD_AT + 5 * DETECT_S)
