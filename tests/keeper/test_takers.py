"""Who takes records from a ring, and what the trainer may overwrite: nothing that anybody still needs, and for good."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.capture.arena import Arena
from everstep.image import FORMAT, lay_out
from everstep.keeper.copies import Takers
from everstep.keeper.logbook import Logbook
from everstep.store.disk import DiskTier
from everstep.types import ImageInfo

LIFE, RUN = "1" * 32, "2" * 32


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[Arena]:
    layout = lay_out([], ImageInfo(format=FORMAT, run=RUN, rank=0, world=1), 4096)
    made = Arena.create(tmp_path / "memory", kind="log", run=RUN, rank=0, world=1, layout=layout, slots=8)
    yield made
    made.close()


def test_one_that_has_joined_is_waited_for_before_it_has_taken_anything(ring: Arena) -> None:
    takers = Takers()
    takers.join("disk", ring)
    takers.has_taken("copy", ring, 5)
    assert ring.taken() == 0
    takers.has_taken("disk", ring, 3)
    assert ring.taken() == 3


def test_what_may_be_overwritten_stays_so_whoever_comes_later(ring: Arena) -> None:
    takers = Takers()
    takers.has_taken("disk", ring, 8)
    takers.has_taken("copy", ring, 5)
    assert ring.taken() == 8


def test_a_keeper_that_writes_what_another_had_let_go_takes_nothing_back(ring: Arena, tmp_path: Path) -> None:
    """Steps 3 to 6 were let go, and 5 is being overwritten while it looks; if 6 counted as needed from now on, it would
    read it where it lies."""
    takers = Takers()
    logbook = Logbook(DiskTier(tmp_path), lambda event: None, lambda one, step: takers.has_taken("disk", one, step))
    logbook.go_on(0, RUN)
    for slot, step in enumerate((3, 4, 6, 7)):
        ring.seal(slot, step=step, cut_time=1.0, generation=LIFE)
    ring.set_taken(6)
    taken = []
    while logbook.take(ring):
        taken.append((logbook.last(0), ring.taken()))
    assert taken == [(4, 6), (7, 7)]
