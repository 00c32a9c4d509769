"""Two ranks under one keeper, which does not get to write the records of the first."""

from __future__ import annotations

import time
from typing import Any

import parallel as parallel
from lives import bases_every, fork_keeper

from everstep.capture import room
from everstep.capture.arena import Arena
from everstep.keeper import client
from everstep.keeper.keeping import Keeping
from everstep.keeper.logbook import Logbook

SLOTS = 4
room._MAX_SLOTS = SLOTS  # type: ignore[attr-defined]
bases_every(1000)
written, take = Logbook.take, Keeping.take


def write(logbook: Logbook, ring: Arena, **options: Any) -> int:
    return 0 if ring.rank == 0 and ring.live().step >= SLOTS else written(logbook, ring, **options)


def take_slowly(keeping: Keeping, step: int, **options: Any) -> None:
    take(keeping, step, **options)
    time.sleep(0.06)  # so that the ring of the other rank has room, and words of the keeper come in time


Logbook.take, Keeping.take = write, take_slowly  # type: ignore[method-assign]
client.start = fork_keeper
