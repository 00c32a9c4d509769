"""What the optimizers consumed: a record per step, from which the step can be repeated without forward and backward.

The road of one record:

    hook      an optimizer is about to step: the gradients that it will see are copied, on its own stream, before it can
              change them: host gradients into the ring, those of a device into spare memory there
    cut       the values that no gradient explains (buffers, the scaler's tensors) follow, and the extras
    drain     the copier thread: from spare memory into the ring, as bases leave a device
    seal      the record is whole: it survives the trainer

A record is an image like a base's, in a slot of a ring. The keeper takes records from the ring to a medium, and says
which nobody needs any more (`Arena.taken`): only those are overwritten. If it is too slow the ring is full, and if a
step cannot be repeated (an optimizer stepped twice in it, say) there is nothing to record: then the chain ends, with a
reason, and only a base makes a new beginning. `whole_since` is the step that this base must have reached.

A medium may be too slow for all records at any time, as a disk is for the gradients of a large model. After the ring
was full once bases are taken before it is full again: with a newer base in memory nobody needs the records before it,
and each step still survives the trainer.
"""

from __future__ import annotations

import time
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from everstep.capture import extras as trees
from everstep.capture.arena import Arena, ArenaKind
from everstep.capture.compression import Compression
from everstep.capture.copier import Copier
from everstep.capture.digest import digest
from everstep.capture.form import Form, as_it_is, call_of, fits, make_form, members_of, on_device, scalar_of
from everstep.capture.hooks import around_step
from everstep.capture.layout import Subjects
from everstep.capture.life import Life
from everstep.capture.purity import Purity
from everstep.capture.room import FULL, Room
from everstep.capture.shape import Shape
from everstep.capture.stepped import gradients_of, has_none
from everstep.capture.tap import Tap
from everstep.capture.update import flushes_denormals
from everstep.events import ChainEnded, RingMade
from everstep.image import ImageLayout
from everstep.timeline import Kind

_PATIENCE_S = 0.5  # with a full ring, beside the share of the time that all of this may cost
_LOOK_S = 0.001
_LOOKS = 4  # records whose gradients are compared with their packed form, before signs are trusted
_DIGEST_EVERY = 64  # steps; a digest costs a few passes over the state
_BEGINS = "records begin with a base, and with the step in which an optimizer is tried"
_grad = attrgetter("grad")


class Recorder:
    """Takes a record per step, where it can."""

    def __init__(
        self,
        subjects: Subjects,
        life: Life,
        *,
        left: list[Arena],
        resumed_from: int | None,
        compression: Compression | None,
    ) -> None:
        self._subjects, self._life = subjects, life
        self._copier = Copier()  # not that of bases: the next record waits for the one before, and a base takes long
        self._left = left  # rings and values of an earlier life, until they are taken over or a base takes their place
        self._form: Form | None = None
        self._born, self._waited_s = time.monotonic(), 0.0  # for room in the ring
        self._room = Room(life)
        self._slot: int | None = None  # that the present step is recorded into
        self._draining: set[int] = set()  # slots that earlier steps are still on their way to
        self._calls: dict[int, dict[str, Any]] = {}
        self._gap = _BEGINS  # why the present step cannot be recorded
        self._told = self._gap
        self._compression = compression
        self._is_packed = compression is not None  # whether the packed form is what optimizers see
        self._written: set[str] = set()  # state that no optimizer has and the loop writes
        self._loose: list[tuple[int, int]] = []  # of the rest: how often each was written, and its digest at first
        self._looked = 0  # records whose gradients were compared with their packed form
        self.whole_since = resumed_from if resumed_from is not None else -1
        self.ended_full, self.begins = False, True  # why there is no chain: no room, as others may have; none yet
        self.recorded_step: int | None = resumed_from  # sealed
        self.cut_step = -1  # the newest that was asked for
        self.stall_s = self.copy_s = 0.0  # that all records have cost the loop; that the newest took to leave a device
        self.update_s = self._update_s = self._began = 0.0  # that optimizers took in a step; of a device the launching
        for ring in left:
            ring.unseal_after(resumed_from)
        self._tap = Tap(subjects, self._copier, life.emit, life.moments) if compression is None else None
        self._purity: Purity | None = Purity(subjects)
        self._impure = ""  # why no step can be repeated
        self._handles = [
            handle
            for i, optimizer in enumerate(subjects.optimizers)
            for handle in around_step(optimizer, partial(self._before_step, i), partial(self._after_step, i))
        ]

    @property
    def impure(self) -> str:
        """Why no step of these optimizers can be repeated, if so."""
        return self._impure

    @property
    def record_bytes(self) -> int:
        return self._form.record.layout.total_bytes if self._form is not None else 0

    # -- the training thread, in front of an update

    def _before_step(self, index: int, _: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        form = self._form
        if form is not None and not self._gap:
            began = time.monotonic()
            self._gap = self._obstacle(index, form, args, kwargs)
            if not self._gap:
                self._take_gradients(index, form)
            ended = time.monotonic()
            self.stall_s += ended - began
            self._life.moments.recorded(began, ended, index)
        if self._purity is not None:
            self._purity.before(index, call_of(self._subjects.optimizers[index], index))
        self._began = time.perf_counter()

    def _after_step(self, index: int, *_: object) -> None:
        self._update_s += time.perf_counter() - self._began
        if self._purity is not None:
            self._purity.after(index)

    def _obstacle(self, index: int, form: Form, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Why this update cannot be recorded, if so."""
        if self._purity is not None and not self._purity.tries_next(index):
            return _BEGINS
        if any(given is not None for given in (*args[1:], kwargs.get("closure"))):
            return "the optimizer is given a closure, so its gradients are made inside step()"
        if index in self._calls:
            return "an optimizer stepped twice in one step"
        consumer = form.consumers[index]
        if members_of(self._subjects.optimizers[index]) != consumer.members:
            self._give_up_form()
            return "the optimizer has other parameters than before"
        if any(g is not None for g in map(_grad, consumer.others)):
            self._give_up_form()
            return "a parameter has a gradient that had none before"
        if self._slot is None:
            self._open_slot(form)
            if self._slot is None:
                self._room.was_full()
                return FULL
        if not self._calls:
            form.record.await_drain(self._copier)
        return self._take_packed(form) if not self._calls and form.fields else ""

    def _open_slot(self, form: Form) -> None:
        self._slot = form.record.arena.taken_slot(self._draining)
        if self._slot is None and self._life.topology.world > 1:
            self._await_room(form)
        if self._slot is not None:
            form.record.arena.unseal(self._slot)
        if self._tap is not None:
            self._tap.begin(form, self._slot)

    def _await_room(self, form: Form) -> None:
        """A chain that ends on one rank ends for all: better to wait a little, within the budget for all of this."""
        began = time.monotonic()
        budget_s = _PATIENCE_S + self._life.settings.overhead_budget * (began - self._born) - self._waited_s
        while self._slot is None and time.monotonic() - began < budget_s:
            time.sleep(_LOOK_S)
            self._slot = form.record.arena.taken_slot(self._draining)
        self._waited_s += time.monotonic() - began

    def _take_packed(self, form: Form) -> str:
        """Copy this rank's part of what the compressor made of the gradients, before the first update of a step."""
        assert self._compression is not None and self._slot is not None
        found = self._compression.compressor.packed
        if self._compression.skipped:
            return self._compression.skipped
        if {key: list(map(id, parameters)) for key, (parameters, _) in found.items()} != form.buffers:
            self._give_up_form()
            return "gradients are packed in other buffers than before"
        look = self._looked < _LOOKS or self._looked % _DIGEST_EVERY == 0
        self._looked += 1
        if self._compression.changed(look=look):
            self._is_packed = False
            self._give_up_form()
            return "gradients are changed after they were compressed, so their log is dense"
        arrays = [found[item.key][1][item.name] for item in form.fields]
        if any(tuple(array.shape) != item.shape for array, item in zip(arrays, form.fields, strict=True)):
            self._give_up_form()
            return "gradients are packed into another number of bytes than before"
        for array, item in zip(arrays, form.fields, strict=True):
            part = array.narrow(0, item.first, item.count) if array.dim() else array
            item.targets[self._slot].copy_(part)
        return ""

    def _take_gradients(self, index: int, form: Form) -> None:
        assert self._slot is not None
        consumer = form.consumers[index]
        absent: list[str] = []
        places = zip(consumer.names, consumer.cuts, consumer.targets[self._slot], strict=True)
        lists = zip(consumer.parameters, consumer.placements, places, strict=True)
        for parameters, placements, (names, cuts, targets) in lists:
            gradients = gradients_of(parameters, placements)
            if isinstance(gradients, str):
                self._gap = gradients
                return
            if self._tap is not None:
                self._tap.close(parameters)
                if self._tap.has(parameters, gradients):
                    absent += [name for name, g in zip(names, gradients, strict=True) if g is None]
                    continue
                form.record.early.clear()  # what is copied now must leave again
            for i, item in cuts.items():
                gradients[i] = item.source(gradients[i]) if gradients[i] is not None else None
            if has_none(gradients):
                absent += [name for name, g in zip(names, gradients, strict=True) if g is None]
                kept = [(t, g) for t, g in zip(targets, gradients, strict=True) if g is not None]
                targets, gradients = [t for t, _ in kept], [g for _, g in kept]
            if gradients:
                torch._foreach_copy_(targets, gradients)  # type: ignore[arg-type]
        optimizer: Any = self._subjects.optimizers[index]
        self._calls[index] = {
            "optimizer": index,
            "absent": absent + consumer.frozen,
            "groups": [
                {k: as_it_is(v) for k, v in group.items() if k != "params" and not on_device(v)}
                for group in optimizer.param_groups
            ],
            "scaled": getattr(optimizer, "grad_scale", None) is not None,
        }
        for name, targets in consumer.scalars:
            value = scalar_of(optimizer, name)
            if value is not None:
                targets[self._slot].copy_(value)

    # -- the training thread, at the cut

    def cut(self, step: int, tree: dict[str, Any]) -> bool:
        """Complete the record of the step that has just been done; False if there is none."""
        began = time.perf_counter()
        try:
            return self._cut(step, tree)
        finally:
            self.stall_s += time.perf_counter() - began

    def _cut(self, step: int, tree: dict[str, Any]) -> bool:
        self.cut_step = step
        self._copier.raise_failure()
        self.update_s, self._update_s = self._update_s, 0.0
        calls, self._calls = list(self._calls.values()), {}
        if self._purity is not None:
            self._look_at_purity()
        form, slot, gap = self._form, self._slot, self._gap
        self._gap = self._impure
        if form is None or slot is None or gap or not calls:
            return self._miss(step, gap or "no optimizer was seen to step")
        digested = step % _DIGEST_EVERY == 0
        how = {"threads": torch.get_num_threads(), "flushes": flushes_denormals()}
        payload = trees.encode({**tree, "calls": calls, "digested": digested, **how}, "state")
        obstacle = self._obstacle_at_cut(form, len(payload))
        if obstacle:
            self._give_up_form()
            return self._miss(step, obstacle)
        form.values.take(slot)
        if digested:
            form.take_digest(slot, form.shape.shares_now(self._subjects, self._life.topology))
        self._slot, cut_time = None, time.time()
        form.record.arena.set_live(step, cut_time)
        early = form.record.mark_cut()
        large = self._take_large(form)
        job = partial(self._drain, form, slot, early, large, step, cut_time, payload)
        self._draining.add(slot)
        if form.record.leaves_later:
            self._copier.submit(job)
        else:
            job()
        self._open_slot(form)
        return True

    def _obstacle_at_cut(self, form: Form, extras_bytes: int) -> str:
        written = self._written_by_loop(form)
        if written:
            self._written |= written
            return f"the loop writes {min(written)}, which no optimizer has; it is recorded from now on"
        if not form.listing.unchanged_at_cut() and not self._rebind(form):
            return "the state changed its shape"
        if extras_bytes > form.record.layout.extras_bytes - 8:
            return "the extras have outgrown their room"
        return ""

    def _written_by_loop(self, form: Form) -> set[str]:
        """What of the state that nobody should write was written: by its count of writes, and at first by its bits."""
        known, self._loose = self._loose, [(e.tensor._version, 0) for e in form.loose]
        bits = known and known[0][1] != 0
        now = [(e.tensor._version, int(digest(e.name, e.tensor)) | 1 if bits else 0) for e in form.loose]
        return {entry.name for entry, a, b in zip(form.loose, known, now, strict=True) if a != b}

    def _take_large(self, form: Form) -> int | None:
        """Copy the large values too; the slot that they go to. There always is one: one is written, one is read."""
        if form.heavy is None:
            return None
        sheet, values = form.heavy
        self._copier.wait()  # the slot of the step before must be sealed, or it would be given away again
        held = sheet.arena.slot_of(sheet.arena.taken())
        slot = sheet.arena.free_slot(self._life.newest, {held} if held is not None else set())
        assert slot is not None
        sheet.arena.unseal(slot)
        sheet.await_drain(self._copier)
        values.take(slot)
        sheet.mark_cut()
        return slot

    def _look_at_purity(self) -> None:
        """Whether steps of these optimizers can be repeated at all is known after the first ones."""
        assert self._purity is not None
        reason = self._purity.at_cut()
        if reason is not None:
            self._purity = None
        if reason:
            self._gap = self._impure = reason
            self._life.tell_no_log(reason)

    def _rebind(self, form: Form) -> bool:
        """Values were replaced by others: take those, if they have the same shape."""
        listing = self._subjects.listing()
        now, then = ({e.name: e for e in one.entries if e.at_cut} for one in (listing, form.listing))
        if now.keys() != then.keys() or any(not fits(now[name], then[name]) for name in then):
            return False
        form.listing = listing
        form.values.rebind(listing.named)
        if form.heavy is not None:
            form.heavy[1].rebind(listing.named)
        return True

    def needs_base(self, newest: int) -> bool:
        """Whether only a base that is newer than the newest can make room in the ring before it is full."""
        return self._form is not None and self._room.needs_base(self._form.record.arena, newest)

    def _miss(self, step: int, reason: str) -> bool:
        self.whole_since, self.ended_full, self.begins = step, reason == FULL, reason == _BEGINS
        if reason != self._told:
            self._told = reason
            self._life.emit(ChainEnded(rank=self._life.topology.rank, step=step, reason=reason))
        return False

    # -- the copier thread (or the training thread, where all is on the host)

    def _drain(
        self,
        form: Form,
        slot: int,
        early: list[tuple[int, int]],
        large: int | None,
        step: int,
        cut_time: float,
        payload: bytes,
    ) -> None:
        began = time.monotonic()
        try:
            copying = form.record.launch(slot, early, self._copier)
        finally:  # whatever happened, no update waits for either
            if form.heavy is not None and large is not None:
                form.heavy[0].launch(large, [], self._copier)
        if form.heavy is not None and large is not None:
            form.heavy[0].finish(large, trees.encode({"step": step}, "state"))
            self._life.seal(form.heavy[0].arena, large, step=step, cut_time=cut_time)
        form.record.finish(slot, payload)
        self._life.seal(form.record.arena, slot, step=step, cut_time=cut_time)
        self._draining.discard(slot)
        self.recorded_step, self.copy_s = step, time.perf_counter() - copying
        if form.record.leaves_later:
            self._life.moments.mark(Kind.DRAIN, step, began, time.monotonic())

    # -- making the form

    def prepare(self, shape: Shape) -> list[Arena]:
        """Make records possible, of the state that `shape` captures; nothing to do while the form holds.

        Returns the arenas that an earlier life left and that nobody needs once a base is sealed.
        """
        if not self.fits(shape):
            self._give_up_form()  # bases of another shape cannot be followed by these records
        if self._form is None and (self._compression is None or self._compression.compressor.packed):
            compressor = self._compression.compressor if self._compression is not None and self._is_packed else None
            form = self._form = make_form(
                self._subjects, shape, self._life, compressor=compressor, written=self._written,
                arena_for=partial(self._arena_for, shape.layout.total_bytes),
            )  # fmt: skip
            ring, sheets = form.record.arena, (form.record, *(form.heavy or ())[:1])
            pinned = bool(form.record.lanes) and all(sheet.pin(self._life.emit) for sheet in sheets)
            self._life.emit(
                RingMade(
                    rank=self._life.topology.rank, slots=len(ring.slots), record_bytes=ring.slot_bytes,
                    place=ring.place, pinned=pinned,
                )
            )  # fmt: skip
            self._calls, self._gap = {}, self._impure
            self._open_slot(form)
            self._loose = [(e.tensor._version, int(digest(e.name, e.tensor)) | 1) for e in form.loose]
        left, self._left = self._left, []
        return left

    def fits(self, shape: Shape) -> bool:
        return self._form is None or self._form.shape is shape

    def _give_up_form(self) -> None:
        """The next base brings another one; what is in the ring is held until that base is safe."""
        form, self._form, self._slot = self._form, None, None
        if form is not None:
            if self._tap is not None:
                self._tap.begin(None, None)
            self._copier.wait()
            form.close()
            self._left += [form.record.arena, *([form.heavy[0].arena] if form.heavy is not None else [])]

    def _arena_for(self, base_bytes: int, layout: ImageLayout, kind: ArenaKind) -> Arena:
        """Take over an arena that is there and fits, else make one."""
        for arena in self._left:
            if arena.rank == self._life.topology.rank and arena.kind == kind:
                self._life.attach(arena)  # so that the keeper writes what is in it before it looks at the new one
        of_values = self._life.newest + 2  # the newest stay, one is written, one is read
        slots = self._room.slots(base_bytes, layout.total_bytes) if kind == "log" else of_values
        for arena in self._left:
            is_alike = (arena.kind, arena.layout_digest, arena.slot_bytes) == (kind, layout.digest, layout.total_bytes)
            if is_alike and len(arena.slots) >= slots:
                self._left.remove(arena)
                arena.adopt(layout)
                self._life.attach(arena)
                return arena
        arena = self._life.make_arena(layout, kind=kind, slots=slots)
        self._life.attach(arena)
        return arena

    def wait_sealed(self) -> None:
        self._copier.wait()
        self._copier.raise_failure()

    def close(self) -> list[Arena]:
        """Returns the rings, which somebody needs until a base is safe."""
        try:
            self._copier.close()
        finally:
            for handle in self._handles:
                handle.remove()
        self._give_up_form()
        left, self._left = self._left, []
        return left
