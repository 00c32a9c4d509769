"""A run is asked to end before its end: it leaves at a step boundary with that step kept, and the next life goes on."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from lives import live, must_finish, run_directory, train_tiny

import everstep
from everstep import Disk
from everstep.errors import Damaged
from everstep.events import Degraded, Halted, read_events
from everstep.halt import due, is_in_force
from everstep.image import FORMAT
from everstep.signals import Signals
from everstep.store import halts
from everstep.types import HaltRecord

STEPS = 400
SELDOM = [Disk(every=1000)]


def asked(**words: Any) -> HaltRecord:
    wish = {"now": False, "after": None, "before": None, "seconds": None, "set_time": 1000.0, **words}
    return HaltRecord(format=FORMAT, **wish)


# -- the decision


@pytest.mark.parametrize(
    ("halt", "known", "is_due"),
    [
        (asked(now=True), {}, True),
        (asked(after=3), {"checkpoints": 2}, False),
        (asked(after=3), {"checkpoints": 3}, True),
        (asked(before=2000.0), {"now": 1999.0}, False),
        (asked(before=2000.0), {"now": 1999.0, "leaving_s": 1.5}, True),
        (asked(before=2000.0), {"now": 2000.0}, True),
        (asked(before=2000.0), {"now": 2100.0, "began": 2050.0}, False),  # whoever starts after it wants it to run
        (asked(seconds=60.0), {"now": 2000.0, "end_time": None}, False),
        (asked(seconds=60.0), {"now": 2000.0, "end_time": 2061.0}, False),
        (asked(seconds=60.0), {"now": 2000.0, "end_time": 2060.0}, True),
        (asked(after=3, before=2000.0), {"now": 2000.0, "checkpoints": 1}, True),
    ],
)
def test_a_halt_is_due_when_its_condition_is_met(halt: HaltRecord, known: dict[str, Any], is_due: bool) -> None:
    situation = {"now": 1500.0, "began": 900.0, "checkpoints": 0, "end_time": None, **known}
    assert bool(due(halt, **situation)) == is_due


def test_a_halt_that_was_obeyed_stops_nobody_but_for_the_end_of_every_allocation() -> None:
    known = {"now": 2000.0, "began": 900.0, "checkpoints": 9, "end_time": 2010.0}
    once = msgspec.structs.replace(asked(now=True, after=1, before=1500.0), obeyed_time=1600.0)
    assert due(once, **known) is None and not is_in_force(once)
    always = msgspec.structs.replace(asked(seconds=60.0), obeyed_time=1600.0)
    assert due(always, **known) == "with 60 seconds of the allocation left" and is_in_force(always)


@pytest.mark.parametrize(("step_s", "last"), [(0.01, 60), (0.2, 13), (5.0, 12)])
def test_the_last_step_is_appointed_so_far_ahead_that_all_ranks_hear_of_it(step_s: float, last: int) -> None:
    told: list[tuple[int, str]] = []
    signals = Signals(lambda: step_s)
    try:
        signals.join(lambda step, halt: told.append((step, halt)), leaves_alone=False)
        assert not signals.is_last(9) and not signals.will_leave(9)
        signals.hear_halt("now")
        assert not signals.is_last(10) and told == [(last, "now")]
        assert not signals.is_last(last - 1) and signals.will_leave(last) and signals.is_last(last)
        signals.stop_at(last - 1, "now")  # another rank was told too
        assert signals.is_last(last - 1) and signals.leave() is None
    finally:
        signals.give_back()


# -- the record


def test_the_last_word_counts_and_damage_is_named(tmp_path: Path) -> None:
    assert halts.read(tmp_path) is None
    halts.write(tmp_path, asked(now=True))
    halts.write(tmp_path, asked(after=2))
    found = halts.read(tmp_path)
    assert found is not None and (found.now, found.after) == (False, 2)
    path = tmp_path / halts.RECORD
    path.write_bytes(path.read_bytes().replace(b'"after":2', b'"after":3'))
    with pytest.raises(Damaged, match=r"does not match its digest .*halt\.json"):
        halts.read(tmp_path)
    halts.clear(tmp_path)
    halts.clear(tmp_path)
    assert list(tmp_path.iterdir()) == []


# -- the run


def slowly(at: int, what: Callable[[everstep.Run], None]) -> Callable[[everstep.Run], None]:
    def step(run: everstep.Run) -> None:
        time.sleep(0.01)
        if run.step == at:
            what(run)

    return step


def halt_at(directory: Path, step: int, **words: Any) -> Callable[[everstep.Run], None]:
    return slowly(step, lambda run: halts.write(directory, asked(**{"set_time": time.time(), **words})))


def halted(directory: Path) -> list[Halted]:
    return [one for one in read_events(directory) if isinstance(one, Halted)]


@pytest.mark.parametrize("keeper", ["inline", "process"])
def test_a_halted_run_exits_with_0_its_last_step_is_durable_and_the_next_life_goes_on(keeper: str) -> None:
    with run_directory() as other:
        undisturbed = must_finish(lambda: train_tiny(other, steps=STEPS))["digest"]
    with run_directory() as directory:
        how: dict[str, Any] = {"steps": STEPS, "keeper": keeper, "tiers": SELDOM, "linger": "1s"}
        outcome = live(lambda: train_tiny(directory, halt_at(directory, 3, now=True), **how))
        assert (outcome.code, outcome.error) == (0, "SystemExit")
        last = halted(directory)[0].step
        assert 3 < last < STEPS
        assert everstep.open(directory).plan(lost={"memory"}).step == last
        record = halts.read(directory)
        assert record is not None and (record.obeyed_step, record.why) == (last, "now")
        ended = must_finish(lambda: train_tiny(directory, **how))
        assert (ended["resumed_from"], ended["digest"]) == (last, undisturbed)


def test_a_loop_that_asks_is_told_in_its_last_step_and_may_leave_in_its_own_way() -> None:
    def ask(run: everstep.Run) -> None:
        time.sleep(0.01)
        if run.step == 3 and not run.should_exit():
            halts.write(directory, asked(now=True, set_time=time.time()))
        if run.should_exit():
            run.close()
            told.write_text(str(run.step))
            raise SystemExit(9)

    with run_directory() as directory:
        told = directory.parent / "told"
        assert live(lambda: train_tiny(directory, ask, steps=STEPS, tiers=SELDOM)).code == 9
        last = int(told.read_text())
        assert halted(directory) == []
        record = halts.read(directory)
        assert record is not None and record.obeyed_step == last
        assert must_finish(lambda: train_tiny(directory, steps=STEPS))["resumed_from"] == last


def test_after_so_many_checkpoints_also_if_the_job_is_started_anew_in_between() -> None:
    with run_directory() as directory:
        how: dict[str, Any] = {"steps": STEPS, "tiers": [Disk(every=20)], "strategy": "snapshot"}

        def die(run: everstep.Run) -> None:
            if run.step == 3:
                halts.write(directory, asked(after=6, set_time=time.time()))
            time.sleep(0.01)
            if run.step == 70:
                run.wait()
                os._exit(1)

        assert live(lambda: train_tiny(directory, die, **how)).code == 1
        assert live(lambda: train_tiny(directory, slowly(-1, lambda run: None), **how)).code == 0
        record = halts.read(directory)
        assert record is not None and record.why == "after 6 checkpoints"
        assert record.obeyed_step is not None and 70 < record.obeyed_step < 200


@pytest.mark.parametrize("variable", ["EVERSTEP_END_TIME", "SLURM_JOB_END_TIME"])
def test_near_the_end_of_every_allocation(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with run_directory() as directory:
        for _ in range(2):
            monkeypatch.setenv(variable, str(time.time() + 3600))
            life = lambda: train_tiny(directory, halt_at(directory, 3, seconds=3601.0), steps=STEPS)  # noqa: E731
            assert live(life).code == 0
        monkeypatch.setenv(variable, str(time.time() + 7200))
        assert must_finish(lambda: train_tiny(directory, steps=STEPS))["step"] == STEPS
        monkeypatch.setenv(variable, "tomorrow")
        outcome = live(lambda: train_tiny(directory))
        assert f"{variable} must be in seconds since the epoch, as `date +%s` says, not 'tomorrow'" in outcome.error


def test_an_allocation_of_which_nobody_knows_the_end_is_an_event_and_so_is_a_damaged_wish() -> None:
    def damage(run: everstep.Run) -> None:
        time.sleep(0.01)
        if run.step == 3:
            halts.write(directory, asked(seconds=60.0))
        if run.step == 100:
            (directory / halts.RECORD).write_bytes(b"{}")

    with run_directory() as directory:
        assert must_finish(lambda: train_tiny(directory, damage, steps=250))["step"] == 250
        said = [one for one in read_events(directory) if isinstance(one, Degraded)]
        assert [one.what for one in said] == ["halt --seconds", "a halt was asked for"]
        assert "set EVERSTEP_END_TIME" in said[0].reason and halts.RECORD in said[1].reason
