"""What keeping a run costs it: step times, stalls and copies, as they are seen from the training thread.

A step's time runs from cut to cut, so the base that is taken at a cut is paid for in the step after it. A host's stalls
are measured. A device is not asked: there the copy of a base is taken to hide behind most of a step, and what sticks
out of it is the stall. Every so many steps the ranks tell each other, and decide what follows.
"""

from __future__ import annotations

import shutil
from collections import deque
from dataclasses import asdict
from statistics import median

import msgspec

from everstep.capture.gradients import Recorder
from everstep.capture.layout import Subjects, is_replicated
from everstep.capture.life import Life
from everstep.capture.sharded import has_sharded, local_of
from everstep.capture.snapshot import Capture
from everstep.capture.stepped import why_no_log
from everstep.capture.update import kinds_of_device, parameters_of, why_no_replica
from everstep.config import Strategy
from everstep.events import Chose, Degraded, Sink, Tuned
from everstep.topology import exchange
from everstep.tune.controller import REBASE, Controller, Measured, merge
from everstep.tune.models import has_moved, sticking_out
from everstep.tune.strategy import Way

WINDOW = 64  # steps between two decisions


def followed(subjects: Subjects, emit: Sink) -> str:
    """On which kinds of device the state is that a replica is to follow; empty, and an event, if none can."""
    if why_no_log(subjects):
        return ""  # and no log either, as the steering says
    reason = subjects.what_is_sharded() or next(filter(None, map(why_no_replica, subjects.optimizers)), "")
    if subjects.compressor is not None:
        reason = "gradients are compressed, and a replica cannot follow that"
    if reason:
        emit(Degraded(what="there is no replica, the run is kept by its log", reason=reason))
    return "" if reason else " and ".join(kinds_of_device(subjects.optimizers))


class Steering:
    def __init__(self, subjects: Subjects, capture: Capture, life: Life, *, had_log: bool, is_followed: bool) -> None:
        """`had_log`: the past was restored from a log; then "auto" goes on with it, and else begins with bases."""
        self._rarely = REBASE if is_followed else 1
        self._subjects, self._capture, self._life = subjects, capture, life
        settings, topology = life.settings, life.topology
        reason = why_no_log(subjects)
        self._asked: Strategy = "snapshot" if reason else settings.strategy
        if self._asked != settings.strategy:
            life.tell_no_log(reason)
        logs = self._asked in ("log", "replica") or (self._asked == "auto" and had_log)
        self._controller = Controller(
            now="log" if logs else "snapshot", may_choose=self._asked == "auto" and settings.mode != "disk",
            capture=settings.capture, durable=settings.tiers.disk.cadence, budget=settings.overhead_budget,
            mtbf_s=settings.mtbf_s,
        )  # fmt: skip
        # Ranks that do not wait for each other in every step may not wait for each other here either.
        # Those of a mesh do, and every mesh has all ranks.
        self._in_step = topology.world == 1 or all(is_replicated(m) or has_sharded(m) for m in subjects.models)
        self._told_interval: int | None = None
        self._told_strategy: Way | None = None
        self.all_need_base = False  # one of them does, of a step that all ranks have just decided at
        self._steps: deque[float] = deque(maxlen=WINDOW)
        self._bases: deque[float] = deque(maxlen=WINDOW)
        self._records: deque[float] = deque(maxlen=WINDOW)
        self._updates: deque[float] = deque(maxlen=WINDOW)
        self._base, self._base_stall_s, self._record_stall_s = capture.base_step, capture.stall_s, 0.0

    def at_cut(self, step_s: float, recorder: Recorder | None) -> None:
        """A step is over; before anything is done about it."""
        capture = self._capture
        base, stall_s = capture.base_step, capture.stall_s
        self._steps.append(step_s)
        if base > self._base:
            self._bases.append(stall_s - self._base_stall_s)
        self._base, self._base_stall_s = base, stall_s
        if recorder is not None:
            if recorder.recorded_step is not None and recorder.stall_s > self._record_stall_s:
                self._records.append(recorder.stall_s - self._record_stall_s)
            self._record_stall_s = recorder.stall_s
            if recorder.update_s > 0:
                self._updates.append(recorder.update_s)

    @property
    def strategy(self) -> Way:
        return self._controller.strategy

    @property
    def steps_per_base(self) -> int:
        return self._rarely * self._controller.steps_per_base

    def status(self) -> dict[str, object]:
        return {
            "strategy": self.strategy,
            "reason": self._controller.choice.reason,
            "steps_per_base": self.steps_per_base if self.strategy == "log" else None,
        }

    def decide(
        self, step: int, recorder: Recorder | None, base_write_s: float, record_write_s: float, *, needs_base: bool
    ) -> bool:
        """Once in a while, look at what it has cost; True if it is time for a turn. `needs_base`: this rank does."""
        self.all_need_base = False
        if len(self._steps) < WINDOW or not self._in_step:
            return False
        measured = self._read(recorder, base_write_s, record_write_s, step)
        if self._asked == "snapshot":
            return False
        measured = msgspec.structs.replace(measured, needs_base=needs_base)
        said = exchange(msgspec.json.encode(measured), self._life.topology)
        merged = merge([msgspec.json.decode(word, type=Measured) for word in said])
        self.all_need_base = merged.needs_base
        self._controller.decide(merged)
        self._tell(step)
        turns = (self.strategy == "log") != (recorder is not None)
        if turns:
            self._record_stall_s = 0.0  # another recorder, or none
        return turns

    def _tell(self, step: int) -> None:
        """Say what has changed, for those who read events."""
        interval, choice = self._controller.interval, self._controller.choice
        if interval is not None and self.strategy == "log" and has_moved(self._told_interval, interval.value):
            self._told_interval = interval.value
            self._life.emit(Tuned(**asdict(interval)))
        if self._asked == "auto" and choice.strategy != self._told_strategy:
            self._told_strategy = choice.strategy
            self._life.emit(Chose(step=step, **asdict(choice)))

    def _read(self, recorder: Recorder | None, base_write_s: float, record_write_s: float, step: int) -> Measured:
        """What was seen since the last reading."""
        shape = self._capture.shape
        base_bytes = shape.layout.total_bytes if shape is not None else 0
        step_s = median(self._steps)
        on_device = shape is not None and bool(shape.lanes)
        base_stall_s = median(self._bases) if self._bases else -1.0
        record_stall_s = median(self._records) if self._records else -1.0
        if on_device and self._bases:
            base_stall_s = sticking_out(self._capture.copy_s, step_s)
        if on_device and recorder is not None and self._records:
            record_stall_s = sticking_out(recorder.copy_s, step_s)
        measured = Measured(
            step_s=step_s, base_stall_s=base_stall_s, base_write_s=base_write_s, base_bytes=base_bytes,
            record_stall_s=record_stall_s, record_write_s=record_write_s,
            record_bytes=recorder.record_bytes if recorder is not None else self._estimate(base_bytes),
            replay_s=median(self._updates) if self._updates and not on_device else -1.0,
            free_bytes=shutil.disk_usage(self._life.settings.directory).free,
            failures=self._life.failures, trained_s=step * step_s,
            refusal=recorder.impure if recorder is not None else "",
        )  # fmt: skip
        for seen in (self._steps, self._bases, self._records, self._updates):
            seen.clear()
        return measured

    def _estimate(self, base_bytes: int) -> int:
        """A record is about as large as what the optimizers update, or what the compressor makes of it."""
        shape = self._capture.shape
        if shape is None:
            return 0
        packed = self._subjects.compressor.packed if self._subjects.compressor is not None else {}
        if packed:
            return sum(array.nbytes for _, arrays in packed.values() for array in arrays.values())
        updated = sum(
            local_of(p).nbytes for o in self._subjects.optimizers for p in parameters_of(o) if p.requires_grad
        )
        whole = sum(entry.tensor.nbytes for entry in shape.listing.entries)
        return int(base_bytes * updated / max(whole, 1))
