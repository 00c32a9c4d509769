"""After a loss: those who are left are told at once, come to a stop, and are called to the next view.

Everybody who trains has a line to the keeper that lasts as long as the process, and so has every spare. The kernel
closes it when the process ends, so a death is known in the moment in which it happens. A process that is stopped, or
does not come to a stop when it is told to, is ended: a hang becomes a death.

Soft state: a keeper that takes the place of another learns who is there from those who enrol again; whoever of the
view does not, in time, is lost.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

from everstep.config import Policy
from everstep.errors import KeeperLost
from everstep.events import Called, RanksLost, Sink
from everstep.keeper.protocol import Channel, Enrol, Lost, Message, Stand, View
from everstep.keeper.views import SPARE, Standing, decide


@dataclass(slots=True)
class _Worker:
    enrolled: Enrol
    channel: Channel
    rank: int  # in the present view
    standing: Standing | None = None
    stopped_at: float | None = None  # when its process was first seen stopped

    def tell(self, message: Message) -> None:
        try:
            self.channel.send(message)
        except KeeperLost:
            return  # its line is about to say so


class Assembly:
    def __init__(self, emit: Sink) -> None:
        self._emit = emit
        self._workers: dict[str, _Worker] = {}
        self._job = ""
        self._number, self._world, self._wished = 0, 0, 0  # the present view, and how many ranks there were to be
        self._policies: tuple[Policy, ...] = ()
        self._since = 0.0  # when the first of this view was here
        self._lost: dict[int, str] = {}  # ranks of the present view, and how it was noticed
        self._ended_at: float | None = None  # when the present view was

    # -- what workers say

    def enrol(self, channel: Channel, said: Enrol) -> None:
        if said.rank != SPARE and said.job != self._job:
            self._job, self._number, self._wished = said.job, 0, 0  # it was started again: views are counted anew
            self._workers = {name: one for name, one in self._workers.items() if one.rank == SPARE}
        if said.rank != SPARE and said.view < self._number:
            channel.send(Lost(view=said.view, ranks=(said.rank,), reason="it was taken for lost: the others went on"))
            return
        is_news = (said.view, said.world) != (self._number, self._world) or not self._trainers()
        if said.rank != SPARE and is_news:
            self._begin(said.view, said.world)
            self._wished, self._policies = max(said.world, self._wished if said.view else 0), said.on_loss
        worker = self._workers[said.worker] = _Worker(said, channel, said.rank)
        if self._ended_at is not None and said.rank != SPARE:
            self._tell_lost([worker])

    def stand(self, channel: Channel, said: Stand) -> None:
        worker = self._of(channel)
        if worker is not None and (worker.rank == SPARE or said.view == self._number):
            worker.standing = Standing(worker=worker.enrolled.worker, rank=worker.rank, address=said.address)
            self._go_on()

    def part(self, channel: Channel, *, final: bool) -> None:
        """It leaves in good order. `final`: the loop is over, and nobody is missed."""
        self._lose(channel, "" if final else "it was asked to leave")

    def closed(self, channel: Channel) -> None:
        """A line was closed by the kernel."""
        self._lose(channel, "its process ended")

    def _lose(self, channel: Channel, how: str) -> None:
        worker = self._of(channel)
        if worker is None:
            return
        del self._workers[worker.enrolled.worker]
        if worker.rank != SPARE and how:
            self._end_view({worker.rank: how})

    # -- now and then

    def look(self) -> None:
        now = time.monotonic()
        for worker in list(self._workers.values()):
            is_stopped = _is_stopped(worker.enrolled.pid)
            worker.stopped_at = (worker.stopped_at or now) if is_stopped else None
            hangs = worker.stopped_at is not None and now - worker.stopped_at > worker.enrolled.detect_s
            is_late = self._ended_at is not None and worker.standing is None and worker.rank != SPARE
            if hangs or (is_late and now - (self._ended_at or now) > worker.enrolled.detect_s):
                _end(worker.enrolled.pid)  # the kernel closes its line, and the rest is as for any death
        trainers = self._trainers()
        if not trainers or self._ended_at is not None:
            return
        missing = set(range(self._world)) - {worker.rank for worker in trainers}
        if missing and now - self._since > trainers[0].enrolled.detect_s:
            self._end_view(dict.fromkeys(missing, "it did not enrol"))
        elif "spare" in self._policies and self._world < self._wished and self._spares():
            self._end_view({}, reason="a spare has come, and ranks are missing")

    # -- views

    def _trainers(self) -> list[_Worker]:
        return [worker for worker in self._workers.values() if worker.rank != SPARE]

    def _spares(self) -> list[Standing]:
        return [one.standing for one in self._workers.values() if one.rank == SPARE and one.standing is not None]

    def _begin(self, number: int, world: int) -> None:
        self._number, self._world, self._since = number, world, time.monotonic()
        self._lost, self._ended_at = {}, None

    def _end_view(self, lost: dict[int, str], reason: str = "") -> None:
        self._lost |= lost
        self._ended_at = time.monotonic()
        for rank, how in lost.items():
            self._emit(RanksLost(view=self._number, rank=rank, how=how))
        self._tell_lost(self._trainers(), reason)
        self._go_on()

    def _tell_lost(self, workers: Sequence[_Worker], reason: str = "") -> None:
        how = reason or "; ".join(f"rank {rank}: {how}" for rank, how in sorted(self._lost.items()))
        for worker in workers:
            worker.tell(Lost(view=self._number, ranks=tuple(sorted(self._lost)), reason=how))

    def _go_on(self) -> None:
        """Once all who are left stand still, call them to the next view."""
        trainers, spares = self._trainers(), self._spares()
        left = [worker.standing for worker in trainers if worker.standing is not None]
        if self._ended_at is None or not trainers or len(left) < len(trainers):
            return
        world = self._world if self._lost else self._wished  # a view that ended for a spare alone grows
        made = decide(world, left, spares, self._policies)
        waited_s = time.monotonic() - self._ended_at
        number = self._number + 1
        self._emit(
            Called(
                view=number, policy=made.policy, world=len(made.workers), lost=made.lost, waited_s=waited_s,
                reason=made.reason,
            )
        )  # fmt: skip
        going = [self._workers[name] for name in made.workers] or trainers
        for rank, worker in enumerate(going):
            worker.rank, worker.standing = rank if made.workers else SPARE, None
        self._begin(number, len(made.workers))
        for worker in going:
            worker.tell(
                View(
                    job=self._job,
                    number=number, rank=worker.rank, world=len(made.workers), address=made.address, policy=made.policy,
                    lost=made.lost, reason=made.reason,
                )
            )  # fmt: skip

    def _of(self, channel: Channel) -> _Worker | None:
        return next((one for one in self._workers.values() if one.channel is channel), None)


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
