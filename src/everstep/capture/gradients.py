"""What the optimizers consumed: a record per step, from which the step can be repeated without forward and backward.

The road of one record:

    hook      an optimizer is about to step: the gradients that it will see are copied, on its own stream, before it can
              change them: host gradients into the ring, those of a device into spare memory there
    cut       the values that no gradient explains (buffers, the scaler's tensors) follow, and the extras
    drain     the copier thread: from spare memory into the ring, paced as bases are
    seal      the record is whole: it survives the trainer

A record is an image like a base's, in a slot of a ring. The keeper takes records from the ring to a medium, and says
which it has (`Arena.taken`): only those are overwritten. If it is too slow the ring is full, and if a step cannot be
repeated (an optimizer stepped twice in it, say) there is nothing to record: then the chain ends, with a reason, and
only a base makes a new beginning. `whole_since` is the step that this base must have reached.
"""

from __future__ import annotations

import struct
import sys
import time
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from everstep.capture import extras as trees
from everstep.capture.arena import Arena, choose_place
from everstep.capture.copier import Copier
from everstep.capture.digest import state_digest
from everstep.capture.form import Form, make_form, on_device, parameters_of
from everstep.capture.layout import Entry, Share, Subjects
from everstep.capture.purity import Purity
from everstep.capture.shape import Shape, group_alike, on_side, pin, unpin
from everstep.capture.update import Call
from everstep.config import MAX_SLOTS, Settings
from everstep.events import ChainEnded, Degraded, RingMade, Sink
from everstep.image import ImageLayout
from everstep.topology import Topology

_MIN_SLOTS = 4
_DIGEST_EVERY = 64  # steps; a digest costs a few passes over the state
_HALF = 0.5
_grad = attrgetter("grad")
_version = attrgetter("_version")


class Recorder:
    """Takes a record per step, where it can."""

    def __init__(
        self,
        subjects: Subjects,
        copier: Copier,
        *,
        topology: Topology,
        settings: Settings,
        run: str,
        generation: str,
        emit: Sink,
        attach: Callable[[Arena], None],
        left: list[Arena],
        resumed_from: int | None,
    ) -> None:
        self._subjects, self._copier = subjects, copier
        self._topology, self._settings = topology, settings
        self._run, self._generation, self._emit = run, generation, emit
        self._attach, self._left = attach, left
        self._form: Form | None = None
        self._slot: int | None = None  # that the present step is recorded into
        self._calls: dict[int, dict[str, Any]] = {}
        self._gap = "records begin with the first base"  # why the present step cannot be recorded
        self._told = self._gap
        self._launched = True  # whether the copies of the record before are on their way
        self._versions = 0
        self.whole_since = resumed_from if resumed_from is not None else -1
        self.recorded_step: int | None = resumed_from
        for ring in left:
            ring.unseal_after(resumed_from)
        self._purity: Purity | None = Purity(subjects)
        self._impure = ""  # why no step can be repeated
        self._handles = [
            handle
            for i, optimizer in enumerate(subjects.optimizers)
            for handle in (
                optimizer.register_step_pre_hook(partial(self._before_step, i)),
                optimizer.register_step_post_hook(partial(self._after_step, i)),
            )
        ]

    @property
    def record_bytes(self) -> int:
        return self._form.layout.total_bytes if self._form is not None else 0

    # -- the training thread, in front of an update

    def _before_step(self, index: int, _: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        form = self._form
        if form is not None and not self._gap:
            self._gap = self._obstacle(index, form, args, kwargs)
            if not self._gap:
                self._take_gradients(index, form)
        if self._purity is not None:
            self._purity.before(index, _call(self._subjects.optimizers[index], index))

    def _after_step(self, index: int, *_: object) -> None:
        if self._purity is not None:
            self._purity.after(index)

    def _obstacle(self, index: int, form: Form, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Why this update cannot be recorded, if so."""
        if any(given is not None for given in (*args[1:], kwargs.get("closure"))):
            return "the optimizer is given a closure, so its gradients are made inside step()"
        if index in self._calls:
            return "an optimizer stepped twice in one step"
        consumer = form.consumers[index]
        if _members(self._subjects.optimizers[index]) != consumer.members:
            self._give_up_form()
            return "the optimizer has other parameters than before"
        if any(g is not None for g in map(_grad, consumer.others)):
            self._give_up_form()
            return "a parameter has a gradient that had none before"
        if self._slot is None:
            self._slot = form.ring.taken_slot()
            if self._slot is None:
                return "the ring is full: the keeper does not write records as fast as they come"
            form.ring.unseal(self._slot)
        return ""

    def _take_gradients(self, index: int, form: Form) -> None:
        assert self._slot is not None
        self._await_drain(form)
        consumer = form.consumers[index]
        absent: list[str] = []
        lists = zip(consumer.parameters, consumer.names, consumer.cuts, consumer.targets[self._slot], strict=True)
        for parameters, names, cuts, targets in lists:
            gradients = list(map(_grad, parameters))
            if any(g is not None and g.layout is not torch.strided for g in gradients):
                self._gap = "a gradient is sparse"
                return
            for i, item in cuts.items():
                gradients[i] = item.source(gradients[i]) if gradients[i] is not None else None
            if any(g is None for g in gradients):
                absent += [name for name, g in zip(names, gradients, strict=True) if g is None]
                kept = [(t, g) for t, g in zip(targets, gradients, strict=True) if g is not None]
                targets, gradients = [t for t, _ in kept], [g for _, g in kept]
            if gradients:
                torch._foreach_copy_(targets, gradients)
        optimizer: Any = self._subjects.optimizers[index]
        self._calls[index] = {
            "optimizer": index,
            "absent": absent + consumer.frozen,
            "groups": [
                {k: _now(v) for k, v in group.items() if k != "params" and not on_device(v)}
                for group in optimizer.param_groups
            ],
            "scaled": getattr(optimizer, "grad_scale", None) is not None,
        }
        for name, targets in consumer.scalars:
            value = _scalar(optimizer, name)
            if value is not None:
                targets[self._slot].copy_(value)

    def _await_drain(self, form: Form) -> None:
        """Spare device memory is free again once the record before has left it."""
        if not form.lanes:
            return
        if not self._launched:
            with self._copier.changed:
                self._copier.changed.wait_for(lambda: self._launched)
        for device, event in form.drained.items():
            torch.cuda.current_stream(device).wait_event(event)

    # -- the training thread, at the cut

    def cut(self, step: int, tree: dict[str, Any]) -> bool:
        """Complete the record of the step that has just been done; False if there is none."""
        self._copier.raise_failure()
        calls, self._calls = list(self._calls.values()), {}
        if self._purity is not None:
            self._look_at_purity()
        form, slot, gap = self._form, self._slot, self._gap
        self._gap = self._impure
        if form is None or slot is None or gap or not calls:
            return self._miss(step, gap or "no optimizer was seen to step")
        if sum(map(_version, form.loose)) != self._versions:
            self._give_up_form()
            return self._miss(step, "the loop writes state that no optimizer has")
        if not form.listing.unchanged_at_cut() and not self._rebind(form):
            self._give_up_form()
            return self._miss(step, "the state changed its shape")
        digested = step % _DIGEST_EVERY == 0
        how = {"threads": torch.get_num_threads(), "flushes": _flushes_denormals()}
        payload = trees.encode({**tree, "calls": calls, "digested": digested, **how}, "state")
        if len(payload) > form.layout.extras_bytes - 8:
            self._give_up_form()
            return self._miss(step, "the extras have outgrown their room")
        for targets, sources in form.values[slot]:
            torch._foreach_copy_(targets, sources)
        if digested:
            for target, total in zip(form.digest[slot], state_digest(form.shares), strict=True):
                target.copy_(total)
        self._slot, cut_time = None, time.time()
        form.ring.set_live(step, cut_time)
        for device, lane in form.lanes.items():
            lane.cut.record(torch.cuda.current_stream(device))
        self._launched = False
        if form.lanes:
            self._copier.submit(lambda: self._drain(form, slot, step, cut_time, payload))
        else:
            self._drain(form, slot, step, cut_time, payload)
        return True

    def _look_at_purity(self) -> None:
        """Whether steps of these optimizers can be repeated at all is known after the first ones."""
        assert self._purity is not None
        reason = self._purity.at_cut()
        if reason is not None:
            self._purity = None
        if reason:
            self._gap = self._impure = reason
            self._emit(Degraded(what="there is no log, every step is a base", reason=reason))

    def _rebind(self, form: Form) -> bool:
        """Values were replaced by others: take those, if they have the same shape."""
        listing = self._subjects.listing()
        fresh = {entry.name: entry for entry in listing.entries if entry.at_cut}
        known = {entry.name: entry for entry in form.listing.entries if entry.at_cut}
        if fresh.keys() != known.keys() or any(not _fits(fresh[name], known[name]) for name in known):
            return False
        form.listing = listing
        form.in_cut = [Share(fresh[s.entry.name], s.first, s.rows) for s in form.in_cut]
        form.values = [group_alike(places, form.in_cut) for places in form.places]
        return True

    def _miss(self, step: int, reason: str) -> bool:
        self.whole_since = step
        if reason != self._told:
            self._told = reason
            self._emit(ChainEnded(rank=self._topology.rank, step=step, reason=reason))
        return False

    # -- the copier thread (or the training thread, where all is on the host)

    def _drain(self, form: Form, slot: int, step: int, cut_time: float, payload: bytes) -> None:
        try:
            flat = form.flats[slot]
            for lane in form.lanes.values():
                lane.cut.synchronize()
            with on_side(form.lanes):
                for device, runs in form.runs.items():
                    for target, source in (pair for run in runs for pair in run.chunks(flat)):
                        form.lanes[device].begin()
                        target.copy_(source, non_blocking=True)
                        form.lanes[device].end()
                    form.drained[device].record(form.lanes[device].stream)
        finally:
            with self._copier.changed:
                self._launched = True
                self._copier.changed.notify_all()
        begin = form.layout.extras_offset
        room = struct.pack("<Q", len(payload)) + payload
        flat[begin : begin + len(room)] = torch.frombuffer(bytearray(room), dtype=torch.uint8)
        for lane in form.lanes.values():
            lane.drain()
        if self._settings.mode == "direct":
            form.ring.flush(slot)
        form.ring.seal(slot, step=step, cut_time=cut_time, generation=self._generation)
        if self._settings.mode == "direct":
            form.ring.flush(slot)
        self.recorded_step = step

    # -- making the form

    def prepare(self, shape: Shape) -> list[Arena]:
        """Make records possible, of the state that `shape` captures; nothing to do while the form holds.

        Returns the rings that an earlier life left and that nobody needs once a base is sealed.
        """
        if self._form is None:
            self._form = make_form(
                self._subjects, shape, topology=self._topology, run=self._run,
                ring_for=lambda layout: self._make_ring(layout, shape.layout.total_bytes),
            )  # fmt: skip
            ring, on_host = self._form.ring, not self._form.lanes
            self._emit(
                RingMade(
                    rank=self._topology.rank, slots=len(ring.slots), record_bytes=ring.slot_bytes, place=ring.place,
                    pinned=False if on_host else pin(self._form.flats, self._emit),
                )
            )  # fmt: skip
            self._slot, self._calls = None, {}
            self._versions = sum(map(_version, self._form.loose))
            self._gap = self._impure
        left, self._left = self._left, []
        return left

    def _give_up_form(self) -> None:
        """The next base brings another one; what is in the ring is held until that base is safe."""
        form, self._form, self._slot = self._form, None, None
        if form is not None:
            self._copier.wait()
            if form.lanes:
                unpin(form.flats)
            self._left.append(form.ring)

    def _make_ring(self, layout: ImageLayout, base_bytes: int) -> Arena:
        """Take over a ring that is there and fits, else make one of about a base's size, if that is enough."""
        for ring in self._left:
            if ring.rank == self._topology.rank:
                self._attach(ring)  # so that the keeper writes what is in it before it looks at the new one
        for ring in self._left:
            if (ring.layout_digest, ring.slot_bytes) == (layout.digest, layout.total_bytes):
                self._left.remove(ring)
                ring.adopt(layout)
                self._attach(ring)
                return ring
        slots = max(_MIN_SLOTS, min(MAX_SLOTS, base_bytes // layout.total_bytes))
        root = choose_place(self._settings.memory.path, slots * layout.total_bytes, slots)
        ring = Arena.create(
            root, kind="log", run=self._run, rank=self._topology.rank, world=self._topology.world, layout=layout,
            slots=slots,
        )  # fmt: skip
        self._attach(ring)
        return ring

    def close(self) -> None:
        self._copier.wait()
        for handle in self._handles:
            handle.remove()
        if self._form is not None and self._form.lanes:
            unpin(self._form.flats)


def _call(optimizer: Any, index: int) -> Call:
    """The same as it is recorded, for the self-test."""
    groups = [{k: _now(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return Call(
        optimizer=index, groups=groups, absent=frozenset(), scale=_now(getattr(optimizer, "grad_scale", None)),
        found_inf=_now(getattr(optimizer, "found_inf", None)),
    )  # fmt: skip


def _flushes_denormals() -> bool:
    """Whether this thread computes as torch.set_flush_denormal(True) makes it; torch does not tell."""
    return sys.float_info.min * _HALF == 0.0


def _members(optimizer: torch.optim.Optimizer) -> list[int]:
    return list(map(id, parameters_of(optimizer)))


def _scalar(optimizer: Any, name: str) -> Tensor | None:
    if name.startswith("group."):
        _, group, key = name.split(".", 2)
        value: Tensor = optimizer.param_groups[int(group)][key]
        return value
    found: Tensor | None = getattr(optimizer, {"scale": "grad_scale"}.get(name, name), None)
    return found


def _fits(found: Entry, wanted: Entry) -> bool:
    a, b = found.tensor, wanted.tensor
    return (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)


def _now(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
