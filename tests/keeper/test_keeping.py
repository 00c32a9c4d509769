"""At which step all ranks take a base, because one of them needs it."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lives import must_finish, run_directory, train_log

import everstep
from everstep.keeper.fleet import Fleet
from everstep.keeper.keeper import Keeper
from everstep.keeper.protocol import BaseAt
from everstep.keeper.rounds import NONE

PASSED = (4, 8)


class Ears:
    """A keeper that hears where bases are wanted, and passes nothing on."""

    def __init__(self, keeper: Any) -> None:
        self._keeper, self.asked = keeper, list[int]()

    def base_at(self, step: int) -> None:
        self.asked.append(step)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._keeper, name)


def hears_too_late(directory: Path) -> dict[str, Any]:
    """A rank of two is told twice of a base at a step that it has passed."""
    bases: list[int] = []
    ahead: list[int] = []

    def at_step(run: everstep.Run) -> None:
        keeping = run._keeping
        if run.step == 2:
            keeping._life = replace(
                keeping._life, topology=replace(keeping._life.topology, world=2),
                settings=replace(keeping._life.settings, keeper="process"),
            )  # fmt: skip
            keeping._keeper = Ears(keeping._keeper)  # type: ignore[assignment]
        keeping._steps_s.extend([0.001] * 8)
        if run.step in PASSED:
            keeping.take_base_at(run.step)
        if run.step - 1 in PASSED:
            ahead.append(keeping._keeper.asked[-1] - run.step)  # type: ignore[attr-defined]
            keeping._asked_for = run.step  # that step has come and gone
        bases.append(run._capture.base_step)
        if run.step:
            run.wait("durable")  # a ring that is full would ask for a base, too

    train_log(directory, at_step, steps=10, records_a_base=1000)
    return {"ahead": ahead, "bases": bases}


def test_a_rank_that_hears_of_a_base_too_late_takes_none_alone_and_names_another_step_further_ahead() -> None:
    with run_directory() as directory:
        result = must_finish(lambda: hears_too_late(directory))
        first, second = result["ahead"]
        assert first > 50 and second == 2 * first, "seconds by the shortest of the last steps, and then twice as many"
        assert set(result["bases"][1:]) == {1}


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
    keeper: Any = SimpleNamespace(_base_at=NONE, _fleet=None, _roster=SimpleNamespace(tell=told.append))
    for step in (9, 8, 9, 10):
        Keeper._pass_on_base(keeper, BaseAt(step=step))
    assert [message.step for message in told] == [9, 10]
