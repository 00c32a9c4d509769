"""When a medium is outpaced by the records, and when it is tried again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from everstep.capture.arena import Arena
from everstep.events import Degraded, Event
from everstep.image import FORMAT, lay_out
from everstep.keeper import pace
from everstep.keeper.pace import Pace
from everstep.timeline import unmarked
from everstep.types import ImageInfo

LIFE, RUN = "1" * 32, "2" * 32
SLOTS, STEP_S = 8, 0.01


@pytest.fixture
def ring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Arena]:
    monkeypatch.setattr(pace, "LARGE_BYTES", 0)
    layout = lay_out([], ImageInfo(format=FORMAT, run=RUN, rank=0, world=1), 4096)
    made = Arena.create(tmp_path, kind="log", run=RUN, rank=0, world=1, layout=layout, slots=SLOTS)
    yield made
    made.close()


def fill(ring: Arena, records: int) -> None:
    for step in range(1, records + 1):
        ring.seal(step - 1, step=step, cut_time=step * STEP_S, generation=LIFE)


class Medium:
    """Takes one record at a time, and so long for it."""

    def __init__(self, record_s: float) -> None:
        self.base, self.base_bytes_s, self._record_s = 0, 0.0, record_s
        self.with_values: set[int] = set()

    def take(self, ring: Arena, *, is_urgent: bool) -> int:
        time.sleep(self._record_s)
        return 1


def pace_of(medium: Medium, said: list[Event]) -> Pace:
    return Pace(medium, said.append, unmarked)  # type: ignore[arg-type]


HELLO: Any = SimpleNamespace(rank=0, lose_steps=None, lose_s=None)


def take_twice(ruler: Pace, ring: Arena) -> None:
    for _ in range(2):
        ruler.take(ring, HELLO, is_urgent=True)


def test_a_medium_is_outpaced_once_the_ring_is_half_full_of_records_that_take_longer_than_steps(ring: Arena) -> None:
    said: list[Event] = []
    medium = Medium(5 * STEP_S)
    ruler = pace_of(medium, said)
    fill(ring, 2)
    assert not ruler.is_outpaced([ring]), "nothing was ever written"
    take_twice(ruler, ring)
    assert not ruler.is_outpaced([ring]), "they may still be written together"
    fill(ring, SLOTS - 1)
    assert ruler.is_outpaced([ring]) and ruler.is_outpaced([ring])
    assert [type(event) for event in said] == [Degraded], "said once"


def test_one_that_is_fast_enough_never_is(ring: Arena) -> None:
    ruler = pace_of(Medium(0.0), [])
    fill(ring, SLOTS)
    take_twice(ruler, ring)
    assert not ruler.is_outpaced([ring])


@pytest.mark.parametrize(("times", "again"), [(1.5, False), (2.5, True)], ids=["too slow", "fast enough"])
def test_a_base_that_was_written_fast_lets_records_be_tried_again(ring: Arena, times: float, again: bool) -> None:
    medium = Medium(5 * STEP_S)
    ruler = pace_of(medium, [])
    fill(ring, SLOTS)
    take_twice(ruler, ring)
    assert ruler.is_outpaced([ring])
    medium.base, medium.base_bytes_s = 7, times * ring.slot_bytes / STEP_S
    assert ruler.is_outpaced([ring]) is not again


def test_small_records_are_written_together_and_those_with_values_are_not_let_go(
    ring: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    medium = Medium(5 * STEP_S)
    ruler = pace_of(medium, [])
    fill(ring, SLOTS)
    take_twice(ruler, ring)
    medium.with_values.add(0)
    assert not ruler.is_outpaced([ring])
    medium.with_values.clear()
    monkeypatch.setattr(pace, "LARGE_BYTES", ring.slot_bytes + 1)
    assert not ruler.is_outpaced([ring])


def test_slower_steps_end_it(ring: Arena) -> None:
    ruler = pace_of(Medium(5 * STEP_S), [])
    fill(ring, SLOTS)
    take_twice(ruler, ring)
    assert ruler.is_outpaced([ring])
    for slot in range(SLOTS):
        ring.seal(slot, step=slot + 1, cut_time=100.0 * slot, generation=LIFE)
    assert not ruler.is_outpaced([ring])
