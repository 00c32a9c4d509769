"""Those who train on this node, and those who stand by: each has a line to the keeper that lasts as long as it does.

The kernel closes it when the process ends, so a death is known in the moment in which it happens. A process that is
stopped, or does not come to a stop when it is told to, is ended: a hang becomes a death.

Here is known who is there and what each was told, and nothing of what it means for others.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from everstep.errors import KeeperLost
from everstep.keeper.protocol import Bye, Channel, Charter, Enrol, Free, Lost, Stand, Stuck, View
from everstep.keeper.views import SPARE
from everstep.types import Noun

Order = Lost | View | Bye


class Here(Noun, frozen=True, kw_only=True):
    """One worker, as its node reports it."""

    enrolled: Enrol
    standing: Stand | None = None
    stuck: str = ""  # why it believes that somebody hangs


class Gone(Noun, frozen=True, kw_only=True):
    """One that is not there any more. `how` it was noticed; empty: its work is done."""

    worker: str
    view: int
    rank: int
    how: str


@dataclass(slots=True)
class _Line:
    channel: Channel
    here: Here
    told: Order | None = None
    told_at: float = 0.0  # when it was first told that its view had ended
    stopped_at: float | None = None  # when its process was first seen stopped
    is_free: bool = False  # it has heard that its view has ended, and comes in its own time
    end: str = "its process ended"  # how its end is told

    def is_late(self, now: float) -> bool:
        """Whether it should have come to a stop."""
        is_told = isinstance(self.told, Lost) and self.here.standing is None
        return is_told and not self.is_free and now - self.told_at > self.here.enrolled.detect_s

    def hangs(self, now: float) -> bool:
        is_stopped = _is_stopped(self.here.enrolled.pid)
        self.stopped_at = (self.stopped_at or now) if is_stopped else None
        return self.stopped_at is not None and now - self.stopped_at > self.here.enrolled.detect_s


class Lines:
    def __init__(self) -> None:
        self.job = ""
        self.version = 0  # grows with every change
        self._lines: dict[str, _Line] = {}
        self._gone: list[Gone] = []
        self._looked_at: float | None = None

    def __bool__(self) -> bool:
        return bool(self._lines)

    @property
    def here(self) -> tuple[Here, ...]:
        return tuple(line.here for line in self._lines.values())

    @property
    def gone(self) -> tuple[Gone, ...]:
        return tuple(self._gone)

    # -- what workers say

    def enrol(self, channel: Channel, said: Enrol) -> None:
        if said.rank != SPARE and said.job != self.job:  # it was started again
            self.job = said.job
            self._lines = {name: line for name, line in self._lines.items() if line.here.enrolled.rank == SPARE}
            self._gone.clear()
        self.version += 1
        self._gone = [one for one in self._gone if one.worker != said.worker]
        self._lines[said.worker] = _Line(channel, Here(enrolled=replace(said, charter=None)))

    def stand(self, channel: Channel, said: Stand) -> None:
        line = self._of(channel)
        if line is not None and said.view == line.here.enrolled.view:
            line.here = replace(line.here, standing=said)
            self.version += 1

    def stuck(self, channel: Channel, said: Stuck) -> None:
        line = self._of(channel)
        if line is not None and said.view == line.here.enrolled.view:
            line.here = replace(line.here, stuck=said.reason)
            self.version += 1

    def free(self, channel: Channel, said: Free) -> None:
        line = self._of(channel)
        if line is not None and said.view == line.here.enrolled.view:
            line.is_free = True

    def closed(self, channel: Channel) -> None:
        """By the kernel."""
        line = self._of(channel)
        if line is not None:
            self.part(channel, line.end)

    def part(self, channel: Channel, how: str) -> None:
        """It is gone. `how` it was noticed; empty: its work is done."""
        line = self._of(channel)
        if line is None:
            return
        enrolled = line.here.enrolled
        del self._lines[enrolled.worker]
        self.version += 1
        if enrolled.rank != SPARE:
            self._gone.append(Gone(worker=enrolled.worker, view=enrolled.view, rank=enrolled.rank, how=how))

    def _of(self, channel: Channel) -> _Line | None:
        return next((line for line in self._lines.values() if line.channel is channel), None)

    # -- what they are told

    def deliver(self, orders: Mapping[str, Order], charter: Charter | None, now: float) -> bool:
        """Whether there was anything new in it. `charter`: for whoever must tell the next keeper of it."""
        is_news = False
        for name, order in orders.items():
            line = self._lines.get(name)
            if line is None or line.told == order:
                continue
            is_news = True
            if not (isinstance(order, Lost) and isinstance(line.told, Lost) and line.told.view == order.view):
                line.told_at = now
            line.told = order
            _send(line.channel, replace(order, charter=charter) if isinstance(order, View) else order)
            if isinstance(order, View):
                place = replace(
                    line.here.enrolled, job=order.job, view=order.number, rank=order.rank, world=order.world
                )
                line.here, line.is_free = Here(enrolled=place), False
                self._gone = [one for one in self._gone if one.view >= order.number]
                self.version += 1
        return is_news

    def end_the_hung(self, now: float) -> None:
        """The kernel closes their lines, and the rest is as for any death.

        A keeper that did not look for long has not heard who came to a stop meanwhile: nobody is late by that.
        """
        slept_s, self._looked_at = now - (now if self._looked_at is None else self._looked_at), now
        for line in self._lines.values():
            if slept_s > line.here.enrolled.detect_s / 2:
                line.told_at += slept_s
            if line.hangs(now) or line.is_late(now):
                line.end = "it was stopped" if line.stopped_at is not None else "it did not come to a stop"
                _end(line.here.enrolled.pid)


def _send(channel: Channel, order: Order) -> None:
    try:
        channel.send(order)
    except KeeperLost:
        return  # its line is about to say so


def _is_stopped(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rsplit(b")", 1)[1].split()[0] in (b"T", b"t")
    except OSError:
        return False


def _end(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # it has just ended by itself
