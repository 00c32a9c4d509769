"""At which step all ranks take a base, because one of them needs it; and which step a run says that it has kept."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lives import bases_every, live, must_finish, run_directory, train_log, train_tiny, turn_every
from torch import nn

import everstep
from everstep.capture.arena import Arena
from everstep.capture.life import Life
from everstep.keeper.fleet import Fleet
from everstep.keeper.keeper import Keeper
from everstep.keeper.keeping import Keeping
from everstep.keeper.logbook import Logbook
from everstep.keeper.protocol import BaseAt
from everstep.keeper.rounds import NONE

PASSED = (4, 8)
SHORT_S = [0.001] * 8


class Ears:
    """A keeper that hears where bases are wanted, and passes nothing on."""

    def __init__(self, keeper: Any) -> None:
        self._keeper, self.asked = keeper, list[int]()

    def base_at(self, step: int) -> None:
        self.asked.append(step)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._keeper, name)


def be_one_of_two(keeping: Keeping) -> None:
    life = keeping._life
    topology, settings = replace(life.topology, world=2), replace(life.settings, keeper="process")
    keeping._life = replace(life, topology=topology, settings=settings)
    keeping._keeper = Ears(keeping._keeper)  # type: ignore[assignment]


def hears_too_late(directory: Path, *, takes_own: bool) -> dict[str, Any]:
    """A rank of two is told twice of a base at a step that it has passed. `takes_own`: when it has one due itself."""
    bases: list[int] = []
    ahead: list[int] = []

    def at_step(run: everstep.Run) -> None:
        keeping = run._keeping
        if run.step == 2:
            be_one_of_two(keeping)
        keeping._steps_s.extend(SHORT_S)
        bases_every(1000)
        if run.step in PASSED:
            keeping.take_base_at(run.step)
            bases_every(1 if takes_own else 1000)
        if run.step - 1 in PASSED:
            ahead.append(keeping._keeper.asked[-1] - run.step)  # type: ignore[attr-defined]
            keeping._asked_for = run.step  # that step has come and gone
        bases.append(run._capture.base_step)
        if run.step:
            run.wait("durable")  # a ring that is full would ask for a base, too

    train_log(directory, at_step, steps=10, records_a_base=1000)
    return {"ahead": ahead, "bases": bases}


@pytest.mark.parametrize("takes_own", [False, True], ids=["", "and has one due that the others have not"])
def test_a_rank_that_hears_of_a_base_too_late_takes_none_for_it_and_names_another_step_further_ahead(
    takes_own: bool,
) -> None:
    with run_directory() as directory:
        result = must_finish(lambda: hears_too_late(directory, takes_own=takes_own))
        first, second = result["ahead"]
        assert first > 50 and second == 2 * first, "seconds by the shortest of the last steps, and then twice as many"
        assert set(result["bases"][1:]) == {1, *(step + 1 for step in PASSED if takes_own)}


def test_who_asked_and_hears_it_too_late_itself_names_another_step_further_ahead() -> None:
    def life() -> dict[str, Any]:
        take, is_held, ahead = Logbook.take, threading.Event(), list[int]()
        Logbook.take = lambda *ring, **how: 0 if is_held.is_set() else take(*ring, **how)  # type: ignore[method-assign]

        def at_step(run: everstep.Run) -> None:
            keeping = run._keeping
            if run.step == 2:
                be_one_of_two(keeping)
                is_held.set()
            keeping._steps_s.extend(SHORT_S)
            if run.step > 2 and len(keeping._keeper.asked) > len(ahead):  # type: ignore[attr-defined]
                ahead.append(keeping._keeper.asked[-1] - run.step)  # type: ignore[attr-defined]
                keeping._asked_for = run.step  # that step has come and gone,
                keeping.take_base_at(run.step)  # and this is when the word comes

        train_log(directory, at_step, steps=20, records_a_base=1000)
        return {"ahead": ahead}

    with run_directory() as directory:
        first, second, *_ = must_finish(life)["ahead"]
        assert second == 2 * first


def test_who_asked_hears_of_it_when_all_other_nodes_have() -> None:
    told: list[str] = []
    slow, done = threading.Event(), threading.Event()

    def pass_to(node: str, ask: object) -> None:
        slow.wait()
        told.append(node)

    def then() -> None:
        told.append("here")
        done.set()

    fleet: Any = SimpleNamespace(_peers={"a": "a", "b": "b"}, _pass_to=pass_to)
    Fleet.pass_on(fleet, BaseAt(step=7), then)
    assert told == []
    slow.set()
    assert done.wait(60) and sorted(told[:2]) == ["a", "b"] and told[2:] == ["here"]


def test_of_those_who_ask_at_once_for_a_base_the_first_speaks_for_all() -> None:
    told: list[BaseAt] = []
    keeper: Any = SimpleNamespace(_base_at=NONE, _generation="", _fleet=None, _roster=SimpleNamespace(tell=told.append))
    for step in (9, 8, 9, 10):
        Keeper._pass_on_base(keeper, BaseAt(step=step))
    assert [message.step for message in told] == [9, 10]


def test_a_life_does_not_hear_where_the_one_before_wanted_a_base() -> None:
    told: list[BaseAt] = []
    heard: list[Callable[[], None]] = []
    fleet = SimpleNamespace(pass_on=lambda message, then: heard.append(then))
    roster = SimpleNamespace(tell=told.append)
    keeper: Any = SimpleNamespace(_base_at=NONE, _generation="first", _fleet=fleet, _roster=roster)
    for life, step in (("first", 9), ("second", 7)):
        keeper._generation, keeper._base_at = life, NONE
        Keeper._pass_on_base(keeper, BaseAt(step=step))
    for then in heard:
        then()
    assert [message.step for message in told] == [7]


TURN = 4


def test_after_a_turn_to_a_log_no_step_is_called_kept_before_its_base_is_sealed() -> None:
    """Whoever believes it and is killed has it."""

    def life() -> dict[str, Any]:
        seal, may_seal = Life.seal, threading.Event()

        def held_back(life: Life, arena: Arena, slot: int, *, step: int, cut_time: float) -> None:
            if arena.kind == "base" and step == TURN:
                may_seal.wait()
            seal(life, arena, slot, step=step, cut_time=cut_time)

        def at_step(run: everstep.Run) -> None:
            if run.step == TURN:
                assert run._keeping.recorder is not None, "it has not turned"
                (directory.parent / "said").write_text(str(run.status()["sealed_step"]))
                os.kill(os.getpid(), signal.SIGKILL)

        turn_every(TURN)
        Life.seal = held_back  # type: ignore[method-assign]
        return train_tiny(directory, at_step, strategy="auto")

    with run_directory() as directory:
        outcome = live(life)
        assert outcome.killed, outcome.error
        assert everstep.open(directory).plan().step == int((directory.parent / "said").read_text()) == TURN - 1


def test_records_behind_a_gap_are_not_called_kept_before_all_ranks_have_a_base() -> None:
    """The ring of one of two was full, and has room again; nobody has heard yet that it needs a base."""

    def life() -> dict[str, Any]:
        take, is_held = Logbook.take, threading.Event()
        Logbook.take = lambda *ring, **how: 0 if is_held.is_set() else take(*ring, **how)  # type: ignore[method-assign]

        def at_step(run: everstep.Run) -> None:
            keeping, recorder = run._keeping, run._keeping.recorder
            if run.step == 2:
                be_one_of_two(keeping)
                is_held.set()
            if recorder is None or not recorder.ended_full:
                return
            is_held.clear()
            if (recorder.recorded_step or 0) > recorder.whole_since:
                assert not run.wait("sealed") and not run.wait("durable", timeout=60)
                (directory.parent / "said").write_text(str(run.status()["sealed_step"]))
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.05)

        return train_log(directory, at_step, steps=200, records_a_base=1000)

    with run_directory() as directory:
        outcome = live(life)
        assert outcome.killed, outcome.error
        step = everstep.open(directory).plan().step
        assert step == int((directory.parent / "said").read_text()) and step > 2


def test_between_captures_one_waits_for_the_last_that_was_taken() -> None:
    def life() -> dict[str, Any]:
        answers: list[bool] = []
        levels = ("sealed", "durable")
        train_tiny(
            directory, lambda run: answers.extend(run.wait(level, timeout=60) for level in levels),
            strategy="snapshot", lose_at_most=4, steps=10,
        )  # fmt: skip
        return {"answers": answers}

    with run_directory() as directory:
        assert must_finish(life)["answers"] == [True] * 20


def test_sigterm_while_the_records_of_a_rank_have_a_gap_ends_it_with_its_last_step() -> None:
    """Nobody is left to end the gap with a base, and no record leads to that step."""

    def life() -> dict[str, Any]:
        take, is_held = Logbook.take, threading.Event()
        Logbook.take = lambda *ring, **how: 0 if is_held.is_set() else take(*ring, **how)  # type: ignore[method-assign]

        def at_step(run: everstep.Run) -> None:
            if run.step == 2:
                be_one_of_two(run._keeping)
                is_held.set()
            recorder = run._keeping.recorder
            if recorder is not None and recorder.ended_full and not run.should_exit():
                is_held.clear()
                (directory.parent / "left").write_text(str(run.step + 1))
                os.kill(os.getpid(), signal.SIGTERM)

        return train_log(directory, at_step, steps=200, records_a_base=1000)

    with run_directory() as directory:
        outcome = live(life, timeout=60)
        assert outcome.code == 128 + signal.SIGTERM, outcome.error
        assert everstep.open(directory).plan(lost={"memory"}).step == int((directory.parent / "left").read_text())


@pytest.mark.parametrize("end", ["ends", "is stopped"])
@pytest.mark.parametrize("strategy", ["log", "snapshot"])
def test_a_run_whose_state_has_changed_its_shape_since_the_last_base_is_kept_when_it(end: str, strategy: str) -> None:
    """Its last base is skipped at first, and would never become durable. A layer has its first gradient late."""

    def life() -> dict[str, Any]:
        model, late = nn.Linear(8, 3), nn.Linear(8, 3)
        optimizer = torch.optim.AdamW([*model.parameters(), *late.parameters()])
        bases_every(1000)
        run = everstep.guard([model, late], optimizer, dir=directory, keeper="inline", strategy=strategy)
        for step in range(1, 7):
            x = torch.ones(4, 8)
            (model(x) + (late(x) if step == 6 else 0)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 6 and end == "is stopped":
                os.kill(os.getpid(), signal.SIGTERM)
                until(run.should_exit)
            run.done()
        run.close()
        return {}

    with run_directory() as directory:
        outcome = live(life, timeout=60)
        assert outcome.code == (0 if end == "ends" else 128 + signal.SIGTERM), outcome.error
        assert everstep.open(directory).plan(lost={"memory"}).step == 6


def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        time.sleep(0.005)
