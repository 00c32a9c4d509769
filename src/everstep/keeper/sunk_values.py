"""Values from a disk to a tier that outlives all nodes: with them there, the records beside them can be stopped at.

Where there are several nodes, all bring those of the same step, which all disks have. The disk keeps them meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from everstep.errors import Damaged, EverstepError
from everstep.keeper.logbook import Logbook
from everstep.keeper.protocol import Hello
from everstep.keeper.rounds import NONE, Lane, Order
from everstep.keeper.transit import CalledOff, Transit
from everstep.store.manifest import (
    data_name,
    part_name,
    put_record,
    read_data,
    read_single_part,
    values_folder,
    values_steps,
)
from everstep.store.tier import Tier
from everstep.types import Part


class SunkValues:
    def __init__(
        self, tier: Tier, disk: Logbook, hello: Hello, rate: float | None, appointed: Callable[[], Order] | None
    ) -> None:  # fmt: skip
        """`rate`: bytes a second. `appointed`: of which step all nodes bring values next, where there are several."""
        self._tier, self._disk, self._hello, self._rate, self._appointed = tier, disk, hello, rate, appointed
        self._there: list[int] | None = None  # the steps of which this node's values are there, once it has looked
        self._bringing = self._missed = self._forgot = NONE
        self._seconds = 0.0
        self.base = NONE  # the newest there

    @property
    def complete(self) -> int:
        """The newest step of which all nodes have brought their values, if this one's are still there."""
        there = self._there or [NONE]
        step = max(there) if self._appointed is None else self._appointed().complete
        return step if step in there else NONE

    @property
    def due(self) -> int:
        """The step whose values are to be brought next; -1: there is none."""
        known = max([self._missed, *(self._there or [])])
        if self._appointed is not None:
            return step if (step := self._appointed().step) > known else NONE
        return step if (step := self._disk.values_step) > max(known, self.base) else NONE

    def pinned(self) -> int | None:
        """The step whose values the disk is to keep."""
        step = self._bringing if self._bringing != NONE else self.due
        return None if step == NONE else step

    def status(self) -> Lane:
        """How far this node is, for the others."""
        done = max(self._there or [NONE])
        return Lane(done=done, missed=self._missed, seconds=self._seconds)

    def forget(self) -> None:
        """Whoever lets go what nobody needs: what is older than values that all have brought."""
        complete = self.complete
        if complete > self._forgot:
            for step in (one for one in values_steps(self._tier) if one < complete):
                self._tier.delete_folder(values_folder(step))
            self._there = [step for step in self._there or () if step >= complete]
            self._forgot = complete

    def bring(self, ending: threading.Event) -> None:
        if self._there is None:
            self._there = [step for step in values_steps(self._tier) if self._is_there(step)]
        self._bringing = self.due
        try:
            if self._bringing != NONE:
                self._bring(self._bringing, ending)
        except CalledOff:
            return
        finally:
            self._bringing = NONE

    def _bring(self, step: int, ending: threading.Event) -> None:
        began = time.monotonic()
        for rank in self._hello.local_ranks:
            try:
                part = read_single_part(self._disk.tier, step, rank, self._hello.run, values_folder)
                data = read_data(self._disk.tier, part, values_folder)
            except (FileNotFoundError, Damaged):
                self._missed = step  # the next one will do
                return
            self._put(part, data, ending)
        self._there, self._seconds = [*(self._there or ()), step], time.monotonic() - began

    def _put(self, part: Part, data: memoryview, ending: threading.Event) -> None:
        names = [name(part.step, part.rank, values_folder) for name in (part_name, data_name)]
        for leftover in names:
            self._tier.delete(leftover)
        end = "the keeper ends, or a new life of the run begins"
        transit = Transit(self._tier.name, part.step, len(data), self._rate, lambda _: end if ending.is_set() else "")
        self._tier.put(names[1], data, transit.passing)
        put_record(self._tier, names[0], part)

    def _is_there(self, step: int) -> bool:
        hello = self._hello
        try:
            parts = [read_single_part(self._tier, step, rank, hello.run, values_folder) for rank in hello.local_ranks]
        except (EverstepError, FileNotFoundError):
            return False
        return all((part.generation, part.world) == (hello.generation, hello.world) for part in parts)
