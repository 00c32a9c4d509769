"""The process that follows: it takes the newest true base of all local ranks, and applies every record after it.

Ranks go in step: the next step is applied when its records of all of them are there, from the rings or, if it is
behind, from the log. Records are copied before they are used, so no ring waits for it. While a step is applied its
image has no seal; then it is a base like any other, which recovery finds in memory and the keeper writes to a disk.

At every true base the replica is compared with it and goes on from there. If records are missing, or it is found to be
wrong, it waits for the next true base.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from everstep.capture.arena import Arena
from everstep.errors import EverstepError, KeeperLost
from everstep.events import Degraded, Drift, EventLog, ReplicaMade, Sink
from everstep.keeper.protocol import Attach, Channel, Held, Hello, Hold, Replicated
from everstep.keeper.replica_image import Lost
from everstep.keeper.replica_rank import Key, Rank
from everstep.store.disk import DiskTier
from everstep.topology import node_name

_NICENESS = 10
_IDLE_S = 0.005
_REPORT_S = 0.25
_LOOK_S = 0.5
_BASE_PATIENCE_S = 5.0  # how long a base may take to be sealed before the replica goes on without comparing


class Follower:
    def __init__(self, channel: Channel, directory: Path, emit: Sink) -> None:
        self._channel, self._tier, self._emit = channel, DiskTier(directory), emit
        self._ranks: dict[int, Rank] = {}
        self._step = -1
        self._following = False
        self._not_before = 0  # the next true base to begin with
        self._compared = -1
        self._waits_since: float | None = None
        self._hold_wanted = False
        self._cpu_s_per_step = 0.0
        self._drift = (-1, 0, 0.0)
        self._reported_at = self._looked_at = 0.0

    # -- the conversation

    def serve(self) -> None:
        busy = False
        while True:
            if select.select([self._channel.connection], [], [], 0.0 if busy else _IDLE_S)[0]:
                heard = self._channel.receive()
                if heard is None:
                    return
                self._answer(*heard)
            else:
                busy = self._go_on()
                self._report()

    def _answer(self, message: object, descriptors: list[int]) -> None:
        match message:
            case Hello():
                self._ranks[message.rank] = Rank(self._tier, message)
            case Attach():
                self._take(Arena(descriptors, message.place))
            case Hold():
                self._hold_wanted = True

    def _take(self, arena: Arena) -> None:
        rank = self._ranks[arena.rank]
        if arena.kind == "log":
            rank.records.add_ring(arena)
        elif arena.kind == "replica":
            rank.add_replica(arena)
        elif arena.kind == "values":
            arena.close()  # of records that cannot be followed
        elif rank.add_base(arena) and self._following:
            self._following, self._not_before = False, self._step + 1

    def _report(self) -> None:
        now = time.monotonic()
        if now - self._reported_at < _REPORT_S or self._step < 0:
            return
        self._reported_at = now
        newest = min(rank.records.newest() for rank in self._ranks.values())
        self._channel.send(
            Replicated(
                pid=os.getpid(), step=self._step, behind=max(0, newest - self._step), exact=self._is_exact,
                cpu_s_per_step=self._cpu_s_per_step, drift_step=self._drift[0], differing=self._drift[1],
                largest=self._drift[2],
            )
        )  # fmt: skip

    @property
    def _is_exact(self) -> bool:
        return all(rank.hello.replica == "cpu" for rank in self._ranks.values())

    # -- following

    def _go_on(self) -> bool:
        """Do what can be done now; whether there may be more to do."""
        ranks = [self._ranks[number] for number in sorted(self._ranks)]
        if not ranks or len(ranks) < ranks[0].hello.local or any(rank.base is None for rank in ranks):
            return False
        if self._following and not self._hold_wanted and not self._has_news(ranks):
            return False
        try:
            with _alone(ranks) as alone:
                if not alone:
                    return False  # somebody reads
                if not self._following:
                    return self._begin(ranks)
                if self._hold_wanted:
                    self._hold(ranks)
                return self._is_at_base(ranks) or self._apply(ranks)
        except Lost as lost:
            self._following, self._not_before = False, self._step + 1
            self._emit(Degraded(what="the replica waits for the next base", reason=str(lost)))
            return False

    def _has_news(self, ranks: list[Rank]) -> bool:
        """By a glance at control pages; now and then yes, since a new ring does not know what the log has."""
        now = time.monotonic()
        recorded = all(rank.records.newest() > self._step for rank in ranks)
        captured = self._compared != self._step and any(_live(rank) == self._step for rank in ranks)
        if recorded or captured or now - self._looked_at > _LOOK_S:
            self._looked_at = now
            return True
        return False

    def _begin(self, ranks: list[Rank]) -> bool:
        """From what an earlier process of this kind has left, or from a true base, whichever is newer."""
        nothing: Key = (-1, "")
        left = max(set.intersection(*(rank.left() for rank in ranks)), default=nothing) if self._step < 0 else nothing
        bases = set.intersection(*(rank.bases() for rank in ranks))
        true = max((key for key in bases if key[0] >= self._not_before), default=nothing)
        if max(left, true) == nothing:
            return False
        if left[0] > true[0]:
            for rank in ranks:
                rank.take_over(left)
            self._step, self._compared = left[0], -1
        else:
            if not all(rank.copy_base(true) for rank in ranks):
                return True  # it was overwritten: there is a newer one
            self._step = self._compared = true[0]
        shared = {name: value for rank in ranks for name, value in rank.rowless().items()}
        for rank in ranks:
            rank.begin(self._step, shared)
            replica = rank.replica
            assert replica is not None
            self._channel.send(Attach(place=replica.place), replica.descriptors)
            self._emit(
                ReplicaMade(
                    rank=rank.hello.rank, step=self._step, slot_bytes=replica.slot_bytes, place=replica.place,
                    exact=self._is_exact,
                )
            )  # fmt: skip
        self._following, self._not_before = True, 0
        return True

    def _apply(self, ranks: list[Rank]) -> bool:
        began = time.process_time()
        records = [rank.records.fetch(self._step + 1) for rank in ranks]
        found = [record for record in records if record is not None]
        if len(found) < len(ranks):
            return False
        if not all(rank.is_mine for rank in ranks):
            raise EverstepError("somebody else has changed the replica")
        for rank, record in zip(ranks, found, strict=True):
            rank.advance(record)
        for rank, record in zip(ranks, found, strict=True):
            rank.seal(record)
        self._step += 1
        took = time.process_time() - began
        self._cpu_s_per_step = took if not self._cpu_s_per_step else 0.9 * self._cpu_s_per_step + 0.1 * took
        return True

    def _hold(self, ranks: list[Rank]) -> None:
        for rank in ranks:
            rank.hold()
        self._hold_wanted = False
        self._channel.send(Held(step=self._step))

    def _is_at_base(self, ranks: list[Rank]) -> bool:
        """Where trainers took a base of the present step: see how far the replica is off, and go on from the base."""
        if self._compared == self._step:
            return False
        bases = [rank.base for rank in ranks if rank.base is not None]
        if any(base.slot_of(self._step) is None for base in bases):
            return any(_live(rank) == self._step for rank in ranks) and self._may_wait()
        self._compared, self._waits_since = self._step, None
        for rank in ranks:
            found = rank.drift(self._step)
            if found is None:
                return False
            differing, largest = found
            self._drift = (self._step, *found)
            self._emit(Drift(rank=rank.hello.rank, step=self._step, differing=differing, largest=largest))
            if differing:
                self._following, self._not_before = False, self._step
                if self._is_exact:
                    reason = f"rank {rank.hello.rank}: {differing} elements differ by up to {largest}"
                    self._emit(Degraded(what="the replica was wrong, and goes on from the true base", reason=reason))
        return True

    def _may_wait(self) -> bool:
        """A base of this step is being copied: comparing with it is worth a moment."""
        now = time.monotonic()
        self._waits_since = self._waits_since or now
        if now - self._waits_since < _BASE_PATIENCE_S:
            time.sleep(_IDLE_S)
            return True
        self._compared, self._waits_since = self._step, None
        return False


def _live(rank: Rank) -> int:
    """The step that the trainer has last begun to copy."""
    return rank.base.live().step if rank.base is not None else -1


@contextmanager
def _alone(ranks: list[Rank]) -> Iterator[bool]:
    """Whether no reader, and no other process of this kind, has its hands on the replicas."""
    try:
        yield all(arena.lock(shared=False, wait=False) for rank in ranks for arena in rank.arenas())
    finally:
        for arena in (arena for rank in ranks for arena in rank.arenas()):
            arena.unlock()


def main(descriptor: int, directory: Path) -> None:
    os.nice(max(0, _NICENESS - os.nice(0)))
    torch.set_num_threads(1)
    emit = EventLog(directory / f"events-replica-{node_name()}.jsonl")
    channel = Channel(socket.socket(fileno=descriptor))
    try:
        Follower(channel, directory, emit).serve()
    except KeeperLost:
        return  # nobody is left to follow for
    except EverstepError as error:
        emit(Degraded(what="there is no replica, the run is kept by its log", reason=str(error)))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
    os._exit(0)  # the next life waits for this; taking torch apart would take longer than the work
