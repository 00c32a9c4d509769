"""How many records one flush takes: the group commit, measured and chosen anew as it goes.

While a flush runs the next records gather by themselves; beyond that they wait for each other only as far as the run
may lose them. Whoever waits for a record, and whoever is gone, is not kept waiting.

A medium that takes longer for large records than the steps take is outpaced: whatever is written, the ring is full in
the end. Then records stay in memory, where bases take their place, and only bases become durable. (Small ones are
written together until it keeps up.) Large ones are written one by one: that each is flushed costs little beside its
bytes, its slot is free as soon as it is written, and what the medium takes is known before the ring is full.

Once outpaced it stays so until the next base is on it: a log with a gap leads nowhere before. Unless that base took far
too long, records are tried again: those that follow it are durable while the ring has room for more. Of a medium that
is only a little too slow this is all that can be had; every step survives the trainer meanwhile.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from statistics import median_low

from everstep.capture.arena import Arena
from everstep.capture.room import LARGE_BYTES
from everstep.events import Degraded, Sink, Tuned
from everstep.keeper.logbook import Logbook
from everstep.keeper.protocol import Hello
from everstep.timeline import Kind, Mark
from everstep.tune.models import Tuning, has_moved, mean_between, steps_per_flush

OUTPACED = "records stay in memory, and only bases become durable"
_WEIGHT = 0.2  # of the newest flush in the running mean
_NEARLY = 0.5  # as fast as records come: bases are written, so that records are tried again
_TAKES = 6  # from a ring that are looked at,
_LEAST_TAKES = 3  # if there are so many: some may have met with something else on the medium


class Pace:
    def __init__(self, logbook: Logbook, emit: Sink, mark: Mark) -> None:
        self._logbook, self._emit, self._mark = logbook, emit, mark
        self._step_s: dict[int, float] = {}  # by rank
        self._record_s: dict[int, deque[float]] = {}  # that the medium took for a record, by rank
        self._base, self._is_outpaced = logbook.base, False
        self._is_said = False  # since the medium was last seen to keep up from one base to the next
        self._told: int | None = None
        self.flush_s = -1.0  # that an append and its flush take; -1: not known yet

    def take(self, ring: Arena, hello: Hello, *, is_urgent: bool) -> bool:
        """Write what has gathered if it is time to, or urgent; whether there may be more, that was not taken."""
        if not is_urgent and not self._is_due(ring, hello):
            return False
        began = time.monotonic()
        at_most = 1 if self._is_large(ring) and not is_urgent else None
        count = self._logbook.take(ring, is_urgent=is_urgent, at_most=at_most)
        if count:
            ended = time.monotonic()
            took = ended - began
            self._mark(Kind.APPEND, ring.taken(), began, ended, hello.rank)
            self.flush_s = took if self.flush_s < 0 else (1 - _WEIGHT) * self.flush_s + _WEIGHT * took
            self._record_s.setdefault(hello.rank, deque(maxlen=_TAKES)).append(took / count)
        return count == at_most

    def is_outpaced(self, rings: Sequence[Arena]) -> bool:
        """Whether the medium takes longer for the records of a step than training takes for it."""
        step_s = max(map(self._step_seconds, rings), default=0.0)
        if self._logbook.base != self._base:
            self._base = self._logbook.base
            self._is_said &= self._is_outpaced
            if self._logbook.base_bytes_s * step_s > _NEARLY * sum(ring.slot_bytes for ring in rings):
                self._record_s.clear()
        is_known = step_s > 0 and all(len(self._record_s.get(ring.rank, ())) >= _LEAST_TAKES for ring in rings)
        takes_s = sum(median_low(self._record_s[ring.rank]) for ring in rings) if is_known else 0.0
        is_slow = self._is_outpaced or (step_s < takes_s and any(map(_is_crowded, rings)))
        self._is_outpaced = is_known and is_slow and all(map(self._is_large, rings))
        if self._is_outpaced and not self._is_said:
            self._is_said = True
            self._emit(
                Degraded(
                    what=OUTPACED,
                    reason=f"the records of a step take {takes_s:.2g} s on the disk, and a step {step_s:.2g} s",
                    tier="disk",
                )
            )
        return self._is_outpaced

    def _is_large(self, ring: Arena) -> bool:
        """Whether its records may be too much for a medium, and are of use one by one."""
        return ring.slot_bytes >= LARGE_BYTES and ring.rank not in self._logbook.with_values

    def _step_seconds(self, ring: Arena) -> float:
        """From one cut to the next, as the seals of a ring have it; 0: not known yet."""
        cuts = sorted((seal.step, seal.cut_time) for seal in ring.seals().values())
        if step_s := seconds_per_step(cuts):
            self._step_s[ring.rank] = step_s
        return self._step_s.get(ring.rank, 0.0)

    def _is_due(self, ring: Arena, hello: Hello) -> bool:
        waiting = [seal.cut_time for seal in ring.seals().values() if seal.step > ring.taken()]
        if not waiting:
            return False
        step_s = self._step_seconds(ring)
        if self.flush_s < 0 or not step_s or self._is_large(ring):
            return True
        tuning = steps_per_flush(
            step_s, self.flush_s, slots=len(ring.slots), lose_steps=hello.lose_steps, lose_s=hello.lose_s,
            mtbf_s=mean_between(hello.mtbf_s, hello.failures, ring.live().step * step_s),
        )  # fmt: skip
        self._tell(tuning)
        return len(waiting) >= tuning.value or time.time() - min(waiting) >= tuning.value * step_s

    def _tell(self, tuning: Tuning) -> None:
        if has_moved(self._told, tuning.value):
            self._told = tuning.value
            self._emit(Tuned(**asdict(tuning)))


def seconds_per_step(cuts: Sequence[tuple[int, float]]) -> float:
    """Between cuts, each a step and its time, in order; 0: there are not two. The longest time may be a pause."""
    spans = [(until - since, last - first) for (first, since), (last, until) in pairwise(cuts) if last > first]
    if len(spans) > 1:
        spans.remove(max(spans, key=lambda span: span[0] / span[1]))
    return max(1e-6, sum(time for time, _ in spans) / sum(steps for _, steps in spans)) if spans else 0.0


def _is_crowded(ring: Arena) -> bool:
    """Whether more records wait than one flush is meant to take."""
    return sum(seal.step > ring.taken() for seal in ring.seals().values()) > len(ring.slots) // 2
