"""When a medium is outpaced by the records, and when it is tried again."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from everstep.capture.arena import Arena
from everstep.events import Degraded, Event, Tuned
from everstep.image import FORMAT, lay_out
from everstep.keeper import pace, record_writer
from everstep.keeper.pace import Pace
from everstep.keeper.record_writer import RecordWriter
from everstep.timeline import unmarked
from everstep.tune.models import MTBF_S
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
        self.asked: list[int | None] = []  # how many it was to take at most

    def take(self, ring: Arena, *, is_urgent: bool, at_most: int | None) -> int:
        self.asked.append(at_most)
        time.sleep(self._record_s)
        return 1


def pace_of(medium: Medium, said: list[Event]) -> Pace:
    return Pace(medium, said.append, unmarked)  # type: ignore[arg-type]


HELLO: Any = SimpleNamespace(rank=0, lose_steps=None, lose_s=None, mtbf_s=None, failures=0)


def take_some(ruler: Pace, ring: Arena) -> None:
    for _ in range(pace._LEAST_TAKES):
        ruler.take(ring, HELLO, is_urgent=True)


def outpaced(ring: Arena, medium: Medium, said: list[Event] | None = None) -> Pace:
    ruler = pace_of(medium, [] if said is None else said)
    fill(ring, SLOTS)
    take_some(ruler, ring)
    assert ruler.is_outpaced([ring])
    return ruler


def test_a_medium_is_outpaced_once_the_ring_is_half_full_of_records_that_take_longer_than_steps(ring: Arena) -> None:
    said: list[Event] = []
    medium = Medium(5 * STEP_S)
    ruler = pace_of(medium, said)
    fill(ring, 2)
    assert not ruler.is_outpaced([ring]), "nothing was ever written"
    take_some(ruler, ring)
    assert not ruler.is_outpaced([ring]), "the ring has room for what comes while they are written"
    fill(ring, SLOTS - 1)
    assert ruler.is_outpaced([ring]) and ruler.is_outpaced([ring])
    assert [type(event) for event in said] == [Degraded], "said once"


@pytest.mark.parametrize(("known", "mtbf_s"), [({"failures": 2}, MTBF_S / 3), ({"mtbf_s": 60.0}, 60.0)])
def test_a_group_counts_with_the_failures_that_a_run_has_seen_or_was_told_of(
    ring: Arena, monkeypatch: pytest.MonkeyPatch, known: dict[str, Any], mtbf_s: float
) -> None:
    monkeypatch.setattr(pace, "LARGE_BYTES", ring.slot_bytes + 1)
    said: list[Event] = []
    ruler = pace_of(Medium(0.001), said)
    fill(ring, SLOTS)
    ruler.take(ring, HELLO, is_urgent=True)
    ruler.take(ring, SimpleNamespace(**{**vars(HELLO), **known}), is_urgent=False)  # type: ignore[arg-type]
    (told,) = [event for event in said if isinstance(event, Tuned)]
    assert told.inputs["M"] == pytest.approx(mtbf_s, rel=1e-3) and told.assumed == ()


def test_one_that_is_fast_enough_never_is(ring: Arena) -> None:
    ruler = pace_of(Medium(0.0), [])
    fill(ring, SLOTS)
    take_some(ruler, ring)
    assert not ruler.is_outpaced([ring])


def test_a_record_that_met_with_something_else_on_the_medium_does_not_count(ring: Arena) -> None:
    medium = Medium(50 * STEP_S)
    ruler = pace_of(medium, [])
    fill(ring, SLOTS)
    ruler.take(ring, HELLO, is_urgent=True)
    medium._record_s = 0.0
    take_some(ruler, ring)
    assert not ruler.is_outpaced([ring])


def test_large_records_are_written_one_by_one_and_small_ones_and_urgent_ones_together(
    ring: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one takes is known before the ring is full, and its slot is free at once."""
    medium = Medium(0.0)
    ruler = pace_of(medium, [])
    fill(ring, 3)
    assert ruler.take(ring, HELLO, is_urgent=False), "there may be more"
    assert not ruler.take(ring, HELLO, is_urgent=True)
    monkeypatch.setattr(pace, "LARGE_BYTES", ring.slot_bytes + 1)
    assert not ruler.take(ring, HELLO, is_urgent=True)
    assert medium.asked == [1, None, None]


def test_large_records_do_not_wait_for_each_other(ring: Arena) -> None:
    ruler = pace_of(Medium(STEP_S), [])
    fill(ring, 3)
    take_some(ruler, ring)
    ring.seal(3, step=4, cut_time=time.time(), generation=LIFE)
    ring.set_taken(3)
    assert ruler.take(ring, HELLO, is_urgent=False)


@pytest.mark.parametrize(("times", "again"), [(0.4, False), (0.6, True)], ids=["far too slow", "nearly fast enough"])
def test_records_are_tried_again_once_a_base_was_written_nearly_as_fast_as_they_come(
    ring: Arena, times: float, again: bool
) -> None:
    medium = Medium(5 * STEP_S)
    ruler = outpaced(ring, medium)
    medium.base, medium.base_bytes_s = 7, times * ring.slot_bytes / STEP_S
    assert ruler.is_outpaced([ring]) is not again


def test_it_is_said_once_however_often_records_are_tried_and_again_after_it_was_over(ring: Arena) -> None:
    said: list[Event] = []
    medium = Medium(5 * STEP_S)
    ruler = outpaced(ring, medium, said)
    for base in (7, 8):
        medium.base, medium.base_bytes_s = base, ring.slot_bytes / STEP_S
        assert not ruler.is_outpaced([ring])
        take_some(ruler, ring)
        assert ruler.is_outpaced([ring])
    assert len(said) == 1
    for medium.base in (9, 10):
        assert not ruler.is_outpaced([ring])
    take_some(ruler, ring)
    assert ruler.is_outpaced([ring])
    assert len(said) == 2


def test_small_records_are_written_together_and_those_with_values_are_not_let_go(
    ring: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    medium = Medium(5 * STEP_S)
    ruler = pace_of(medium, [])
    fill(ring, SLOTS)
    take_some(ruler, ring)
    medium.with_values.add(0)
    assert not ruler.is_outpaced([ring])
    medium.with_values.clear()
    monkeypatch.setattr(pace, "LARGE_BYTES", ring.slot_bytes + 1)
    assert not ruler.is_outpaced([ring])


def test_a_pause_is_not_taken_for_slower_steps(ring: Arena) -> None:
    ruler = pace_of(Medium(5 * STEP_S), [])
    for step in range(1, SLOTS + 1):
        pause_s = 100 * STEP_S if step > SLOTS // 2 else 0.0
        ring.seal(step - 1, step=step, cut_time=step * STEP_S + pause_s, generation=LIFE)
    take_some(ruler, ring)
    assert ruler.is_outpaced([ring])


@pytest.mark.parametrize(
    ("cuts", "step_s"),
    [
        ([], 0.0),
        ([(1, 10.0)], 0.0),
        ([(1, 10.0), (2, 12.0)], 2.0),
        ([(1, 10.0), (2, 12.0), (3, 99.0), (4, 101.0)], 2.0),
        ([(1, 10.0), (2, 12.0), (7, 22.0), (8, 99.0)], 2.0),  # five of these steps have no record
        ([(1, 10.0), (2, 99.0), (3, 101.0), (4, 201.0)], 91 / 2),  # twice: this is how they come
    ],
)
def test_the_time_of_a_step_is_that_between_cuts_without_the_longest(
    cuts: list[tuple[int, float]], step_s: float
) -> None:
    assert pace.seconds_per_step(cuts) == pytest.approx(step_s)


def test_what_was_let_go_leads_nowhere_so_slower_steps_end_it_with_the_next_base_on_the_medium(ring: Arena) -> None:
    medium = Medium(5 * STEP_S)
    ruler = outpaced(ring, medium)
    medium.base_bytes_s = ring.slot_bytes / (100 * STEP_S)
    for slot in range(SLOTS):
        ring.seal(slot, step=slot + 1, cut_time=100.0 * slot, generation=LIFE)
    assert ruler.is_outpaced([ring])
    medium.base = 7
    assert not ruler.is_outpaced([ring])


class Looks:
    """Counts how long a writer rests between its looks at the rings, and ends it after some."""

    def __init__(self, ending: threading.Event, looks: int) -> None:
        self.rests: list[float] = []
        self._ending, self._looks = ending, looks

    def wait(self, rest_s: float) -> None:
        self.rests.append(rest_s)
        if len(self.rests) > self._looks:
            self._ending.set()

    def clear(self) -> None: ...


@pytest.mark.parametrize(
    ("takes_s", "more", "rests"),
    [(0.0, False, True), (0.0, True, False), (1.2 * record_writer._LOG_TICK_S, False, False)],
    ids=["nothing more", "more", "it took long"],
)
def test_nobody_rests_while_records_come_faster_than_they_are_written(takes_s: float, more: bool, rests: bool) -> None:
    writer = RecordWriter(Medium(0.0), None, print, print, unmarked)  # type: ignore[arg-type]
    writer._take = lambda: bool(time.sleep(takes_s)) or more  # type: ignore[method-assign]
    ending = threading.Event()
    looks = writer.asked = Looks(ending, 4)  # type: ignore[assignment]
    writer.work(ending)
    assert any(rest_s > record_writer._BREATH_S for rest_s in looks.rests[1:]) is rests
