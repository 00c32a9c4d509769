"""How many records one flush takes: the group commit, measured and chosen anew as it goes.

While a flush runs the next records gather by themselves; beyond that they wait for each other only as far as the run
may lose them. Whoever waits for a record, and whoever is gone, is not kept waiting.
"""

from __future__ import annotations

import time
from dataclasses import asdict

from everstep.capture.arena import Arena
from everstep.events import Sink, Tuned
from everstep.keeper.logbook import Logbook
from everstep.keeper.protocol import Hello
from everstep.timeline import Kind, Mark
from everstep.tune.models import Tuning, has_moved, steps_per_flush

_WEIGHT = 0.2  # of the newest flush in the running mean


class Pace:
    def __init__(self, logbook: Logbook, emit: Sink, mark: Mark) -> None:
        self._logbook, self._emit, self._mark = logbook, emit, mark
        self._step_s: dict[int, float] = {}  # by rank
        self._told: int | None = None
        self.flush_s = -1.0  # that an append and its flush take; -1: not known yet

    def take(self, ring: Arena, hello: Hello, *, is_urgent: bool) -> int:
        """Write what has gathered if it is time to, or urgent; returns how many records that were."""
        if not is_urgent and not self._is_due(ring, hello):
            return 0
        began = time.monotonic()
        count = self._logbook.take(ring, is_urgent=is_urgent)
        if count:
            ended = time.monotonic()
            took = ended - began
            self._mark(Kind.APPEND, ring.taken(), began, ended, hello.rank)
            self.flush_s = took if self.flush_s < 0 else (1 - _WEIGHT) * self.flush_s + _WEIGHT * took
        return count

    def _is_due(self, ring: Arena, hello: Hello) -> bool:
        cuts = sorted((seal.step, seal.cut_time) for seal in ring.seals().values())
        waiting = [when for step, when in cuts if step > ring.taken()]
        if not waiting:
            return False
        (first, since), (last, until) = cuts[0], cuts[-1]
        if last > first:
            self._step_s[hello.rank] = max(1e-6, (until - since) / (last - first))
        step_s = self._step_s.get(hello.rank)
        if self.flush_s < 0 or step_s is None:
            return True
        tuning = steps_per_flush(
            step_s, self.flush_s, slots=len(ring.slots), lose_steps=hello.lose_steps, lose_s=hello.lose_s
        )
        self._tell(tuning)
        return len(waiting) >= tuning.value or time.time() - waiting[0] >= tuning.value * step_s

    def _tell(self, tuning: Tuning) -> None:
        if has_moved(self._told, tuning.value):
            self._told = tuning.value
            self._emit(Tuned(**asdict(tuning)))
