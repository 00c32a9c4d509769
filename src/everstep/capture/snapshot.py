"""Off the device without stopping it: a base per cut, copied bucket by bucket while the next step computes.

The road of one capture, and the words for it:

    cut       the training thread: waits until the base before is sealed or skipped; what may change before the next
              update is shadowed, extras are taken, the copier is woken
    copy      the copier thread: each bucket on a side stream behind the cut (or by hand, for host tensors)
    gate      the training thread, before an optimizer steps: the compute stream waits on the device for the buckets
              that this optimizer overwrites; for host tensors the thread itself waits
    seal      the copier thread, once all copies are there: the slot becomes a base
    skip      the capture is given up (no free slot, state changed its shape); the gates open, nothing is sealed

A base is one consistent cut because a gated tensor cannot change between cut and gate, and everything else is copied
in the cut. The copier seals one base before it copies the next, so ranks never drift more than one base apart.
"""

from __future__ import annotations

import struct
import time
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

import torch

from everstep.capture.arena import MEMFD, Arena
from everstep.capture.copier import Copier
from everstep.capture.hooks import Unseen, around_step
from everstep.capture.layout import Subjects
from everstep.capture.life import Life
from everstep.capture.pinned import pin
from everstep.capture.shape import Shape, Views, make_shape, on_side
from everstep.errors import BadConfig
from everstep.events import ArenaMade, Degraded, Skipped
from everstep.image import ImageLayout
from everstep.timeline import Kind

_MANY_UPDATES = 50  # of each optimizer: more than most loops make in a step
_WATCHED_CUTS = 4  # how many first captures are checked for writes that pass by the gates
_SEALS_AHEAD = 3  # a rank that has sealed n + 2 has met the others in that step, so each of them has sealed n
_PAUSE_S = 50e-6  # enough for another thread to wake up and take the interpreter
_version = attrgetter("_version")
_pause = partial(time.sleep, _PAUSE_S)


@dataclass(slots=True)
class _Job:
    step: int
    cut_time: float
    extras: bytes


class Capture:
    """Takes bases of `subjects`, one per cut. One thread of training, one thread of copying."""

    def __init__(
        self,
        subjects: Subjects,
        life: Life,
        *,
        left: list[Arena],
        resumed_from: int | None,
        resumed_base: int | None,
        leased: set[int],
    ) -> None:
        self._subjects, self._life, self._moments = subjects, life, life.moments
        self._left = left  # arenas of an earlier life of this rank, until the first base of this one is sealed
        self._arena: Arena | None = None
        self._seals = 0  # in the present arena
        self._shape: Shape | None = None
        self._order: list[int] = []  # optimizers, as they first stepped
        self._stepped, self._unseen = False, Unseen(subjects)
        self._uncut: int | None = 0  # updates before the first step of this life; None: there was one
        self._copier = Copier()
        self._lock = self._copier.changed
        self._leased: set[int] = leased
        self._progress = 1 << 30  # buckets of the current job whose copies are launched (device) or done (host)
        self._reshape = False
        self._watched: tuple[list[torch.Tensor], int] | None = None  # gated tensors, and how often they were written
        self._cuts = 0
        self._fence_in_cut = False
        self.sealed_step: int | None = resumed_base  # or made by an earlier life
        self.pending_step: int | None = None  # cut, and neither sealed nor skipped yet
        self.stall_s = 0.0
        self.copy_s = 0.0  # of the newest base, from cut to seal
        self._handles = [
            handle
            for i, optimizer in enumerate(subjects.optimizers)
            for handle in around_step(optimizer, partial(self._gate, i), partial(self._after_step, i))
        ]
        for arena in left:
            arena.unseal_after(resumed_from)
            is_own = (arena.rank, arena.world) == (life.topology.rank, life.topology.world)
            if is_own and resumed_base is not None and arena.slot_of(resumed_base) is not None:
                self._use(arena)  # so that the keeper can save what was restored from memory

    # -- hooks on the optimizers

    def _gate(self, optimizer: int, *_: object) -> None:
        """Let no update pass a copy."""
        self._moments.updates()
        shape = self._shape
        needed = shape.gates.get(optimizer) if shape is not None else None
        if shape is None or not needed:
            return
        if self._watched is not None:
            self._check_versions()
        if self._progress <= needed[-1]:
            begin = time.monotonic()
            with self._lock:
                self._lock.wait_for(lambda: self._progress > needed[-1])
            end = time.monotonic()
            self.stall_s += end - begin
            self._moments.waited(begin, end, optimizer)
        for bucket in needed:
            event = shape.events[bucket]
            if event is not None:
                torch.cuda.current_stream(shape.sources[bucket][0].device).wait_event(event)

    def _after_step(self, optimizer: int, *_: object) -> None:
        self._stepped = True
        if self._uncut is not None:
            self._uncut += 1
            if self._uncut == _MANY_UPDATES * len(self._subjects.optimizers):
                self.tell_uncut()
        self._moments.updated(optimizer)
        if self._shape is None and optimizer not in self._order:
            self._order.append(optimizer)

    # -- the training thread

    @property
    def stepped(self) -> bool:
        """Whether an optimizer has stepped since the last one that was taken note of."""
        return self._stepped

    def take_step(self) -> bool:
        """The same, and it is taken note of. Misuse if something else than optimizers changes the parameters."""
        stepped, self._stepped = self._stepped, False
        if stepped:
            self._uncut = None
        self._unseen.stepped() if stepped else self._unseen.look()
        return stepped

    def tell_uncut(self) -> None:
        """If the program has trained without saying where a step ends."""
        if self._uncut is not None and self._uncut > len(self._subjects.optimizers):
            reason = (
                f"{self._uncut} updates, and nobody has said where a step ends: iterate the run and not the loader, or "
                "call run.done() after each step. Nothing is kept before that"
            )
            self._life.emit(Degraded(what="this training is not kept", reason=reason))

    def cut(self, step: int, extras: bytes) -> None:
        """The state is consistent now: begin to copy it."""
        self.raise_failure()
        begin = time.perf_counter()
        self._await_base()
        shape = self._shape
        if shape is not None and not shape.listing.unchanged_at_cut() and not shape.rebind(self._subjects):
            self._reshape = True
        if shape is None or self._reshape or len(extras) > shape.layout.extras_bytes - 8:
            self._copier.wait()
            shape = self._shape = self._make_shape(len(extras))
            self._reshape = False
        for shadows, sources in shape.cut_groups:
            torch._foreach_copy_(shadows, sources)
        for device, lane in shape.lanes.items():
            lane.cut.record(torch.cuda.current_stream(device))
        cut_time = time.time()
        shape.arena.set_live(step, cut_time)
        self._watch_versions(shape)
        self._progress, self.pending_step = 0, step
        job = _Job(step, cut_time, extras)
        self._copier.submit(lambda: self._take(job))
        if self._fence_in_cut:
            self._copier.wait()
        self.stall_s += time.perf_counter() - begin

    def _await_base(self) -> None:
        """Until the base before is sealed or skipped; records may be on their way."""
        if self.pending_step is not None:
            with self._lock:
                self._lock.wait_for(lambda: self.pending_step is None)

    def prepare(self, extras_bytes: int) -> Shape:
        """Be ready before the first cut, where the optimizers have their state already."""
        if self._shape is None:
            self._order = list(range(len(self._subjects.optimizers)))
            self._shape = self._make_shape(extras_bytes)
        return self._shape

    @property
    def shape(self) -> Shape | None:
        return self._shape

    @property
    def base_step(self) -> int:
        """The newest step that is, or is about to be, a base; -1 if there is none."""
        return max(-1 if step is None else step for step in (self.sealed_step, self.pending_step))

    def leave_behind(self, arenas: list[Arena]) -> None:
        """Keep these too until bases that every rank has made since are safe."""
        if arenas:
            self._copier.wait()
            self._left += arenas
            self._seals = 0

    def wait_sealed(self) -> None:
        self._copier.wait()
        self.raise_failure()

    def raise_failure(self) -> None:
        """What went wrong with the last base, if anything did."""
        self._copier.raise_failure()

    def lease(self, step: int) -> int | None:
        """Keep the slot of a sealed step as it is until `release`; None if it is no longer there."""
        with self._lock:
            slot = self._arena.slot_of(step) if self._arena is not None else None
            if slot is not None:
                self._leased.add(slot)
            return slot

    def release(self, slot: int | None = None) -> None:
        """Give back one slot, or all of them when the keeper is gone."""
        with self._lock:
            self._leased = self._leased - {slot} if slot is not None else set()
            self._lock.notify_all()

    def arena(self) -> Arena | None:
        return self._arena

    def held(self) -> list[Arena]:
        """All that this process holds of them."""
        return [*self._left, *([self._arena] if self._arena is not None else [])]

    def close(self) -> None:
        try:
            self._copier.close()
        finally:
            for handle in self._handles:
                handle.remove()
            if self._life.reserve is not None:
                self._life.reserve.close()  # no cut has come
        if self._arena is not None:
            self._arena.unpin()  # not if that was interrupted: copies may be on their way

    def _watch_versions(self, shape: Shape) -> None:
        """In the first captures, remember how often each gated tensor was written, to compare at the gate."""
        self._cuts += 1
        if self._cuts <= _WATCHED_CUTS:
            entries = [s.entry for s in shape.shares if not s.entry.at_cut]
            gated = [tensor for e in entries for tensor in (e.tensor, e.given) if tensor is not None]
            self._watched = gated, sum(map(_version, gated))

    def _check_versions(self) -> None:
        shape = self._shape
        assert shape is not None and self._watched is not None
        (gated, before), self._watched = self._watched, None
        changed = sum(map(_version, gated)) != before
        if changed and not self._fence_in_cut:
            self._fence_in_cut = True
            self._unseal_newest(shape)
            self._life.emit(
                Degraded(
                    what="capture is no longer asynchronous",
                    reason="the loop writes parameters outside optimizer.step(), between two steps; from now on every "
                    "cut waits for its copies. Write them before asking for the next batch to get the speed back.",
                )
            )

    def _unseal_newest(self, shape: Shape) -> None:
        """The capture in flight may be torn: it must not be found."""
        self._copier.wait()
        with self._lock:
            slot = shape.arena.slot_of(self.sealed_step) if self.sealed_step is not None else None
            if slot is not None:
                shape.arena.unseal(slot)  # if the keeper is reading it, it finds the seal gone and drops what it wrote
            self.sealed_step = max((seal.step for seal in shape.arena.seals().values()), default=None)

    # -- making the shape

    def _make_shape(self, extras_bytes: int) -> Shape:
        shape = make_shape(
            self._subjects,
            self._life,
            order=self._order,
            extras_bytes=extras_bytes,
            arena_for=self._make_arena,
        )
        is_pinned = bool(shape.lanes) and pin(shape.arena.slots, shape.lanes, self._life.emit)
        self._life.emit(
            ArenaMade(
                rank=self._life.topology.rank, slots=len(shape.arena.slots), slot_bytes=shape.arena.slot_bytes,
                place=shape.arena.place, buckets=len(shape.buckets), pinned=is_pinned,
            )
        )  # fmt: skip
        return shape

    def _make_arena(self, layout: ImageLayout) -> Arena:
        """Take over an arena that is there and fits; else make one beside it.

        What is there goes only when every rank has sealed a base in its new one.
        """
        self._seals = 0
        if self._shape is not None:
            self._shape.arena.unpin()
            self._left.append(self._shape.arena)
        alike = [a for a in self._left if a.kind == "base"]
        fitting = [a for a in alike if (a.layout_digest, a.slot_bytes) == (layout.digest, layout.total_bytes)]
        if fitting:
            self._left.remove(fitting[0])
            fitting[0].adopt(layout)
            return self._use(fitting[0])
        slots = self._life.base_slots
        if slots <= self._life.newest:
            raise BadConfig(
                f"Memory(slots={slots}) is too few for several ranks: each keeps its newest two; use 3 or 4"
            )
        arena = self._use(self._life.make_arena(layout, slots=slots))
        if not self.outlives_process:
            reason = (
                "shared memory is too small, and an inline keeper cannot hold the arena for it; use keeper='process'"
            )
            self._life.emit(Degraded(what="captures die with this process", reason=reason))
        return arena

    @property
    def outlives_process(self) -> bool:
        """Whether what is sealed does: memory that has no name is held by a keeper, if that is a process."""
        is_named = self._arena is None or self._arena.place != MEMFD
        return is_named or self._life.settings.keeper != "inline"

    def _use(self, arena: Arena) -> Arena:
        self._arena = arena
        self._life.attach(arena)
        return arena

    # -- the copier thread

    def _take(self, job: _Job) -> None:
        try:
            self._copy_and_seal(job)
        finally:
            with self._lock:
                self._progress = 1 << 30  # whatever happened, no update waits for it
                self.pending_step = None  # after that: the next cut begins to count anew as soon as it sees this
                self._lock.notify_all()

    def _advance(self, progress: int) -> None:
        with self._lock:
            self._progress = progress
            self._lock.notify_all()

    def _copy_and_seal(self, job: _Job) -> None:
        shape = self._shape
        assert shape is not None
        if not shape.listing.unchanged(_pause) and not shape.rebind(self._subjects):
            self._reshape = True
            self._skip(job, "the state changed its shape; the next step is captured into a new arena")
            return
        for lane in shape.lanes.values():
            lane.cut.synchronize()
        began = time.monotonic()
        with self._lock:
            slot = shape.arena.free_slot(self._life.newest, self._leased)
            if slot is not None:
                shape.arena.unseal(slot)
        if slot is None:
            self._skip(job, "no free slot: a flush is still reading, and the other slots hold the newest steps")
            return
        views = shape.views[slot]
        payload = struct.pack("<Q", len(job.extras)) + job.extras
        views.extras[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        self._copy(shape, views, job.step)
        self._life.seal(shape.arena, slot, step=job.step, cut_time=job.cut_time)
        ended = time.monotonic()
        self.sealed_step, self.copy_s = job.step, ended - began
        self._moments.mark(Kind.COPY, job.step, began, ended)
        self._seals += 1
        if self._seals >= (1 if self._life.topology.world == 1 else _SEALS_AHEAD):
            self.let_go()

    def let_go(self) -> None:
        """Give up the arenas that nobody will need again: all ranks have newer bases, or the newest is durable."""
        while self._left:
            arena = self._left.pop()
            arena.remove()
            arena.close()  # an open descriptor would hold its memory

    def _copy(self, shape: Shape, views: Views, step: int) -> None:
        began = time.monotonic()
        with on_side(shape.lanes):
            for index, sources in enumerate(shape.sources):
                lane, event = shape.lanes.get(sources[0].device), shape.events[index]
                gathered = shape.gathered.get(index)
                if lane is not None and gathered is None:
                    lane.copy(views.buckets[index], sources)
                else:
                    torch._foreach_copy_(gathered or views.buckets[index], sources)
                if lane is not None and event is not None:
                    event.record(lane.stream)
                self._advance(index + 1)
                if lane is None:  # of a device only the launching would be seen
                    before, began = began, time.monotonic()
                    self._moments.mark(Kind.BUCKET, step, before, began, index)
            for device, runs in shape.runs.items():
                for run in runs:
                    run.leave(shape.lanes[device], views.flat, run.begin, run.end)
        if views.shadows:
            torch._foreach_copy_(views.shadows, [shadow for shadow in shape.shadows if not shadow.is_cuda])
        for lane in shape.lanes.values():
            lane.drain()

    def _skip(self, job: _Job, reason: str) -> None:
        self._life.emit(Skipped(rank=self._life.topology.rank, step=job.step, reason=reason))
