"""A rank that hangs in a step is found by those who wait for it; one that takes its time between two steps is not."""

from __future__ import annotations

import queue
import threading
import time
from pathlib import Path

import pytest
from lives import run_directory
from team import STEPS, Ended, Here, Team, in_forward, own, survivors

from everstep.events import Called, RanksLost, read_events
from everstep.live.watch import Watch

HANG_AT = 9


@pytest.fixture(scope="module")
def undisturbed() -> dict[int, Ended]:
    with run_directory() as made:
        return Team(made, 3, on_loss=["spare"]).start().wait()


def test_a_rank_that_hangs_in_its_step_is_ended_and_the_others_go_on(
    directory: Path, undisturbed: dict[int, Ended]
) -> None:
    def act(here: Here) -> None:
        if here.name == 1 and here.tries == HANG_AT:
            threading.Event().wait()  # for ever

    found = Team(directory, 3, spares=1, on_loss=["spare"], detect_timeout="1s").start(act).wait()
    assert found[1].killed
    assert own(found) == own(undisturbed)
    lost = [event for event in read_events(directory) if isinstance(event, RanksLost)]
    assert [(event.rank, event.how) for event in lost] == [(1, "it did not come to a stop")]


def test_those_who_go_forward_finish_the_step_without_the_one_that_hangs(directory: Path) -> None:
    def act(here: Here) -> None:
        if here.name == 1 and here.tries == HANG_AT:
            threading.Event().wait()

    found = Team(directory, 3, on_loss=["forward"], detect_timeout="0.5s").start(act).wait()
    left = survivors(found)
    assert found[1].killed
    assert [(one["world"], one["tries"]) for one in left] == [(2, STEPS), (2, STEPS)]  # and no step was done again
    assert len({one["state"] for one in left}) == 1


def test_a_program_that_takes_its_time_between_two_steps_is_not_taken_for_hung(
    directory: Path, undisturbed: dict[int, Ended]
) -> None:
    def aside(here: Here) -> None:
        if here.name == 0 and here.tries == HANG_AT:
            time.sleep(5.0)  # the others are alarmed after 1.5, and whoever is in a step may take another half to stop

    found = Team(directory, 3, on_loss=["spare"], detect_timeout="0.5s", aside=aside).start().wait()
    assert not any(ended.killed for ended in found.values())
    assert own(found) == own(undisturbed)
    (called,) = [event for event in read_events(directory) if isinstance(event, Called)]
    assert called.lost == () and "in a step for" in called.reason


def test_a_rank_is_waited_for_that_evaluates_while_another_is_lost(
    directory: Path, undisturbed: dict[int, Ended]
) -> None:
    def aside(here: Here) -> None:
        if here.name == 0 and here.tries == 4:
            deadline = time.monotonic() + 30
            while not any(isinstance(e, RanksLost) for e in read_events(directory)) and time.monotonic() < deadline:
                time.sleep(0.05)
            time.sleep(2.0)  # for longer than one who is in a step may take to stop

    team = Team(directory, 3, spares=1, on_loss=["spare"], detect_timeout="0.5s", aside=aside)
    found = team.start(in_forward(1, 5)).wait()
    assert [name for name, ended in found.items() if ended.killed] == [1]
    assert own(found) == own(undisturbed)


# -- what is long


class Alarms:
    def __init__(self, detect_s: float) -> None:
        self.heard: queue.SimpleQueue[tuple[float, float]] = queue.SimpleQueue()
        self.watch = Watch(detect_s, lambda took, longest: self.heard.put((took, longest)))

    def steps(self, count: int, seconds: float) -> None:
        for _ in range(count):
            self.watch.work()
            time.sleep(seconds)
            self.watch.rest()


def test_a_step_far_longer_than_all_before_raises_one_alarm() -> None:
    alarms = Alarms(0.05)
    alarms.steps(12, 0.001)
    alarms.watch.work()
    took, longest = alarms.heard.get(timeout=10)
    assert took > 0.15 and took > 10 * longest
    with pytest.raises(queue.Empty):
        alarms.heard.get(timeout=0.5)


def test_nothing_is_long_before_enough_was_seen_nor_on_the_programs_own_time_nor_in_recovery() -> None:
    alarms = Alarms(0.02)
    alarms.watch.work()
    time.sleep(0.2)  # a first step, which compiles
    alarms.watch.rest()
    alarms.steps(12, 0.001)
    time.sleep(0.3)  # resting
    alarms.watch.recover()
    time.sleep(0.3)
    assert alarms.heard.empty()


def test_a_step_that_was_only_slow_is_learnt_from() -> None:
    alarms = Alarms(0.02)
    alarms.steps(12, 0.001)
    alarms.watch.work()
    alarms.heard.get(timeout=10)
    time.sleep(0.1)
    alarms.watch.recover()
    alarms.watch.learn()
    alarms.watch.work()
    time.sleep(0.3)  # less than ten times that
    assert alarms.heard.empty()
