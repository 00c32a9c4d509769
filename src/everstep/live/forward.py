"""A step that lost a rank is finished by the others, with the gradients that they have: lossy, and nothing is redone.

This is the communication hook of the run's DDP models. Scaled by this rank's share of the batch, a bucket goes into a
buffer of its own, where it is reduced: so the gradient of this rank stays in the bucket until the result is there, and
the result until nobody can lack it any more. Whatever thread of the group completes a reduction hands the result on;
nobody else is woken. When one fails because somebody is lost, a thread of its own meets those who are left, while the
program still waits in its backward pass, and they bring each other out of the step: `course` says how. The program
notices nothing; the next life begins at the end of a batch that all have finished.

Until then there is no process group but for that thread: whatever else the program wants to tell other ranks fails, and
then the step is given up, and the next policy holds. So it is wherever ranks cannot be brought together in this way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from everstep import topology
from everstep.capture.layout import Subjects
from everstep.capture.reductions import has_hook
from everstep.config import Settings
from everstep.errors import BadConfig, Restart
from everstep.keeper.protocol import View
from everstep.live.course import Begin, Give, GiveUp, GoOn, Lossy, Move, Reduce, Saying, next_move
from everstep.live.presence import Presence


class Then(Enum):
    """What the loop does, once the ranks that are left know of each other."""

    GO_ON = auto()  # with the next batch
    CARRY = auto()  # begin a life with the state as it is
    RESTORE = auto()  # begin a life with what is restored: the step was given up
    MEET = auto()  # the same, in a view that was called by another policy, and is still to be met


@dataclass(slots=True, eq=False)
class _Bucket:
    number: int
    batch: int
    local: Tensor  # what this rank has to give
    result: Tensor
    error: Exception | None = None  # why it has to be reduced among others; None: it is under way
    future: torch.futures.Future[Any] = field(default_factory=torch.futures.Future)

    def failure(self, done: torch.futures.Future[Any]) -> Exception | None:
        try:
            done.value()
        except Exception as error:  # whatever it is: nobody else would hear of it
            return error
        return None


@dataclass(slots=True, eq=False)
class _Stop:
    """The program is between two batches, and asks what to do."""

    broken: str
    answer: Future[Then] = field(default_factory=Future)


class Forward:
    def __init__(self, subjects: Subjects, presence: Presence, is_settled: Callable[[], bool]) -> None:
        """`is_settled`: whether DDP's buckets are final, so that a life in another group can begin with the same."""
        self._subjects, self._presence, self._is_settled = subjects, presence, is_settled
        self.is_under_way = False  # from a loss until a life has begun in the new group
        self._changed = threading.Condition()  # also so that nothing is begun in a group that is about to be left
        self._group: Any = dist.group.WORLD
        self._called: View | None = None  # by another policy, and still to be met
        self._even = 1.0 / dist.get_world_size()  # a rank's share of the batch, where all have the same
        self._has_met = False  # those who are left
        self._then: Then | BaseException | None = None  # how the step ends, once that is known
        self._obstacle = ""  # why this rank cannot go forward
        self._batch, self._number = 0, 0
        self._open: dict[int, _Bucket] = {}  # by number, in their order: there is no result yet
        self._stop: _Stop | None = None
        self._buffers: dict[tuple[int, int], list[tuple[int, Tensor]]] = {}  # two of each bucket, and whose they are
        self._held: dict[int, Tensor] = {}  # results of this pass, and of the one before
        self._missing: dict[int, list[float]] = {}  # by batch: what share of it, in each bucket made without the lost
        for i, model in enumerate(_models(subjects)):
            model.register_comm_hook(None, self._hook(i))
        threading.Thread(target=self._serve, name="everstep-forward", daemon=True).start()

    @classmethod
    def chosen(
        cls, settings: Settings, subjects: Subjects, presence: Presence | None, is_settled: Callable[[], bool]
    ) -> Forward | None:
        if presence is None or "forward" not in settings.on_loss:
            return None
        return cls(subjects, presence, is_settled)

    # -- the program's thread

    def _hook(self, model: int) -> Callable[[object, dist.GradBucket], torch.futures.Future[Tensor]]:
        def hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            local = bucket.buffer()
            asked = _Bucket(self._number, self._batch, local, self._buffer((model, bucket.index()), local))
            self._number += 1
            torch.mul(local, self._share, out=asked.result)
            with self._changed:
                self._open[asked.number] = asked
                work = None if self.is_under_way else self._begin_reduction(asked.result)
                if work is None:
                    asked.error = ConnectionError("the process group has ended")
                    self._changed.notify_all()
            if work is not None:
                work.get_future().add_done_callback(partial(self._hear, asked))
            return asked.future.then(_value)

        hook.__annotations__ = {"bucket": dist.GradBucket}  # DDP compares it, and not as a string
        return hook

    def _begin_reduction(self, result: Tensor) -> Any:
        try:
            return self._group.allreduce([result])
        except RuntimeError:
            return None  # its connections are cut already

    def _hear(self, asked: _Bucket, done: torch.futures.Future[Any]) -> None:
        """A reduction has ended. In a thread of the group."""
        failure = asked.failure(done)
        if failure is None:
            self._finish(asked)
            return
        with self._changed:
            asked.error = failure
            self._changed.notify_all()

    @property
    def _share(self) -> float:
        return self._even if self._subjects.share is None else self._subjects.share

    def _buffer(self, key: tuple[int, int], like: Tensor) -> Tensor:
        """One of two in turn: a rank can be a pass ahead of another, and has then what that one needs."""
        turns = self._buffers.setdefault(key, [])
        number, buffer = turns.pop(0) if len(turns) == 2 else (-1, like)
        self._held.pop(number, None)
        if buffer is like or (buffer.shape, buffer.dtype) != (like.shape, like.dtype):
            buffer = torch.empty_like(like)
        turns.append((self._number, buffer))
        return buffer

    def enter(self) -> None:
        """The program begins its next batch."""
        self._batch += 1

    def is_by_loss(self, error: BaseException) -> bool:
        """Also whatever fails because there is no process group for the program at the moment."""
        return (self.is_under_way and self._presence.is_of_group(error)) or self._presence.is_by_loss(error)

    def ask(self, broken: str) -> Then:
        """Between two batches, after a loss: what to do. `broken`: why the one before could not be finished."""
        stop = _Stop(broken)
        with self._changed:
            self._stop = stop
            self._changed.notify_all()
        return stop.answer.result()

    def meet(self) -> None:
        """Those of a view that was called by another policy."""
        assert self._called is not None
        self._presence.meet(self._called)

    def has_begun(self, then: Then) -> Lossy:
        """A life has begun in the present group; what it goes without."""
        lossy = Lossy.of(self._missing.values() if then is Then.CARRY else ())
        self._missing.clear()
        if then is not Then.CARRY:  # others may have come, who count from here
            self._batch, self._number = 0, 0
            self._buffers.clear()
            self._held.clear()
        self._group, self._even = dist.group.WORLD, 1.0 / dist.get_world_size()
        self.is_under_way = False
        return lossy

    # -- a thread of its own

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stop is not None or self._broken() is not None)
                broken = self._broken()
            if not self.is_under_way and broken is not None and not self._presence.is_by_loss(broken[1]):
                self._fail(*broken)
                continue
            self._leave_group()
            while self._open or self._stop is not None:
                try:
                    self._cross()
                except (Exception, SystemExit) as error:
                    if isinstance(error, Restart) or not self._presence.is_by_loss(error):
                        self._then = error

    def _broken(self) -> tuple[_Bucket, Exception] | None:
        return next(((bucket, bucket.error) for bucket in self._open.values() if bucket.error is not None), None)

    def _first(self) -> _Bucket | None:
        return next(iter(self._open.values()), None)

    def _leave_group(self) -> None:
        if not self.is_under_way:
            self._obstacle = "" if self._is_settled() else "DDP has not made its final buckets yet"
        with self._changed:
            self.is_under_way = True

    def _finish(self, bucket: _Bucket) -> None:
        with self._changed:
            del self._open[bucket.number]
            self._held[bucket.number] = bucket.result
            if self.is_under_way:  # else nobody waits for it but the program
                self._changed.notify_all()
        bucket.future.set_result(bucket.result)

    def _fail(self, bucket: _Bucket, error: Exception) -> None:
        with self._changed:
            del self._open[bucket.number]
        bucket.future.set_result(error)

    def _cross(self) -> None:
        """One round, or the end of it."""
        with self._changed:  # what was begun before the loss ends, since its connections are cut
            self._changed.wait_for(lambda: all(bucket.error is not None for bucket in self._open.values()))
        if self._then is None and (not self._has_met or self._presence.lost is not None):
            self._meet()
        if self._then is None:
            self._do(next_move(self._say()))
        if self._then is not None:
            self._end(self._then)

    def _meet(self) -> None:
        self._show_group()
        called = self._presence.next_view()
        if called.policy != "forward":
            self._called, self._then = called, Then.MEET
            return
        self._presence.meet(called)
        self._group, self._has_met = dist.group.WORLD, True
        dist.group.WORLD = None  # nobody else is to use it yet

    def _show_group(self) -> None:
        if self._has_met:
            dist.group.WORLD = self._group
        self._has_met = False

    def _say(self) -> list[Saying]:
        broken = self._stop.broken if self._stop is not None else ""
        first = self._first()
        mine = Saying(
            batch=self._batch, share=self._share, needs=None if first is None else first.number,
            has=tuple(self._held), broken=broken or self._obstacle,
        )  # fmt: skip
        told = topology.messages_of(self._group).exchange(msgspec.msgpack.encode(mine))
        return [msgspec.msgpack.decode(one, type=Saying) for one in told]

    def _do(self, move: Move) -> None:
        match move:
            case Give():
                self._give(move)
            case Reduce():
                self._reduce(self._open[move.number], move)
                self._finish(self._open[move.number])
            case GoOn():
                if self._stop is not None and self._batch < move.batch:
                    self._answer(self._stop, Then.GO_ON)
            case Begin():
                self._then = Then.CARRY
            case GiveUp():
                self._presence.fall_back(move.reason)
                self._then = Then.RESTORE

    def _give(self, move: Give) -> None:
        bucket = self._open.get(move.number)
        result = bucket.result if bucket is not None else self._held[move.number]
        dist.broadcast(result, group=self._group, group_src=move.source)
        if bucket is not None:
            self._finish(bucket)

    def _reduce(self, bucket: _Bucket, move: Reduce) -> None:
        torch.mul(bucket.local, move.weight(self._share), out=bucket.result)
        self._group.allreduce([bucket.result]).wait()
        self._missing.setdefault(bucket.batch, []).append(1.0 - move.present)

    def _end(self, then: Then | BaseException) -> None:
        """The step is over; if it is given up, the program comes out of it with an error, and asks."""
        while (first := self._first()) is not None:
            self._fail(first, ConnectionError("the process group has ended: the step is given up"))
        if self._stop is not None:
            self._show_group()
            self._then = None
            self._answer(self._stop, then)

    def _answer(self, stop: _Stop, then: Then | BaseException) -> None:
        self._stop = None
        if isinstance(then, Then):
            stop.answer.set_result(then)
        else:
            stop.answer.set_exception(then)


def _value(done: torch.futures.Future[Any]) -> Tensor:
    value = done.value()
    if isinstance(value, Exception):
        raise value  # only like this it reaches DDP as an error
    assert isinstance(value, Tensor)
    return value


def _models(subjects: Subjects) -> list[nn.parallel.DistributedDataParallel]:
    modules = [module for model in subjects.models for module in model.modules()]
    found = [module for module in modules if isinstance(module, nn.parallel.DistributedDataParallel)]
    problem = next(filter(None, map(_obstacle, found)), "") if found else "needs a model under DistributedDataParallel"
    if subjects.compressor is not None:
        problem = "does not go with compress=, which communicates in its own way"
    if problem:
        raise BadConfig(f"on_loss='forward' {problem}; leave it out, or use 'rollback'")
    return found


def _obstacle(ddp: nn.parallel.DistributedDataParallel) -> str:
    if has_hook(ddp):
        return "finishes the reductions of DDP by itself, and this model has another communication hook"
    if ddp.find_unused_parameters:
        return "needs find_unused_parameters=False: which are unused, DDP tells in a way that cannot be finished"
    if any(ddp._build_params_for_reducer()[1]):
        return "does not know sparse gradients"
    how = topology.formed()  # a spare's group is not of that backend yet
    backend = (how.backend if how is not None else None) or dist.get_backend()
    if "gloo" not in str(backend) or any(p.device.type != "cpu" for p in ddp.parameters()):
        return "needs gradients in host memory and gloo: of other groups nobody hears in which reduction they broke"
    return ""
