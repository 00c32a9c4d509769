"""A disk that is too slow for the records, whatever is done: each step survives the process all the same."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep import Disk
from everstep.capture import room
from everstep.capture.gradients import Recorder
from everstep.capture.snapshot import Capture
from everstep.events import ChainEnded, Degraded, RingMade
from everstep.keeper import pace
from everstep.keeper.book import Book
from everstep.keeper.pace import OUTPACED, Pace
from tests.lives import forget_memory, live, must_finish, run_directory, told, train_log, undisturbed

STEPS = 70
SELDOM = [Disk(every=10_000)]


def outpaced_life(
    directory: Path, at: int = 60, end: Callable[[everstep.Run], Any] = lambda run: None
) -> dict[str, Any]:
    """The disk is known to be too slow. `end`: at this step, or a later one whose newest base is some steps older."""
    Pace.is_outpaced = lambda *_: True  # type: ignore[assignment]
    room.LARGE_BYTES = 0  # type: ignore[attr-defined]
    bases: list[int] = []
    cut = Capture.cut

    def counting(capture: Capture, step: int, extras: bytes) -> None:
        bases.append(step)
        cut(capture, step, extras)

    Capture.cut = counting  # type: ignore[method-assign]

    def at_step(run: everstep.Run) -> None:
        time.sleep(0.03)  # so that the keeper gets to see every base
        if run.step >= at and run._capture.base_step < run.step - 1:
            run.wait("sealed")
            end(run)

    result = train_log(directory, at_step, steps=STEPS, records_a_base=1000, tiers=SELDOM)
    return {**result, "bases": bases}


def die(run: everstep.Run) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_bases_in_memory_make_room_in_a_ring_that_was_full_once() -> None:
    with run_directory() as directory:
        result = must_finish(lambda: outpaced_life(directory))
        assert result["digest"] == undisturbed(STEPS)
        assert [event.reason.split(":")[0] for event in told(directory, ChainEnded)] == ["the ring is full"]
        assert [event.slots for event in told(directory, RingMade)] == [12]
        assert len(result["bases"]) < STEPS / 2, f"bases took the place of records: {result['bases']}"


RECORD_S, STEP_S, LONG = 0.3, 0.01, 400


def over_a_slow_disk(directory: Path) -> dict[str, Any]:
    """Nobody knows yet that every record takes this disk thirty times as long as a step; in the middle is a pause."""
    room.LARGE_BYTES = pace.LARGE_BYTES = 0  # type: ignore[attr-defined]
    write, cut = Book.write, Recorder.cut
    missed: list[int] = []
    said: list[int] = []

    def slowly(book: Book, header: bytes, layout: int, records: Any) -> bool:
        time.sleep(RECORD_S * len(records))
        return write(book, header, layout, records)

    def counting(recorder: Recorder, step: int, tree: dict[str, Any]) -> bool:
        is_recorded = cut(recorder, step, tree)
        missed.extend([] if is_recorded else [step])
        return is_recorded

    def at_step(run: everstep.Run) -> None:
        time.sleep(STEP_S if run.step != LONG * 3 // 4 else 2.0)
        if not said and run.step % 20 == 0 and any(event.what == OUTPACED for event in told(directory, Degraded)):
            said.append(run.step)

    Book.write, Recorder.cut = slowly, counting  # type: ignore[method-assign]
    train_log(directory, at_step, steps=LONG, records_a_base=1000, tiers=SELDOM)
    return {"missed": missed, "said": said}


def test_that_a_disk_is_too_slow_is_known_after_a_few_records_and_from_then_on_each_step_has_one() -> None:
    with run_directory() as directory:
        result = must_finish(lambda: over_a_slow_disk(directory))
        assert [event.what for event in told(directory, Degraded)] == [OUTPACED], "said once, a pause or not"
        (said,) = result["said"]
        assert said <= LONG // 2
        assert max(result["missed"]) < said + 20, "a step fell out of the chain after it was known"


@pytest.mark.parametrize("step", [20, 37, 50])
def test_killed_it_goes_on_from_its_last_step_by_a_base_and_records_that_no_disk_has(step: int) -> None:
    with run_directory() as directory:
        assert live(lambda: outpaced_life(directory, step, die)).killed
        archive = everstep.open(directory)
        plan = archive.plan()
        assert plan.step is not None and plan.step >= step
        assert plan.base is not None and plan.base < plan.step - 1
        assert {entry.source for entry in archive.log()[0] if entry.step > plan.base} == {"memory"}
        result = must_finish(lambda: train_log(directory, steps=STEPS, tiers=SELDOM))
        assert (result["resumed_from"], result["digest"]) == (plan.step, undisturbed(STEPS))


def test_whoever_waits_for_the_disk_finds_the_step_there_after_a_reboot() -> None:
    def wait(run: everstep.Run) -> None:
        run.wait("durable")
        (directory.parent / "durable").write_text(str(run.step))
        die(run)

    with run_directory() as directory:
        assert live(lambda: outpaced_life(directory, 40, wait)).killed
        forget_memory(directory)
        step = int((directory.parent / "durable").read_text())
        result = must_finish(lambda: train_log(directory, steps=STEPS, tiers=SELDOM))
        assert (result["resumed_from"], result["digest"]) == (step, undisturbed(STEPS))
