"""What is to be done to a run is read strictly, drawn by a seed, and judged by what the run itself has told."""

from __future__ import annotations

import random
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lives import must_finish, run_directory, train_tiny
from made_up import made, played, started, step
from tables import table

from everstep.errors import BadConfig, EverstepError
from everstep.events import AnyEvent, WentOn
from everstep.lab import injector, verdict
from everstep.lab.damage import flip
from everstep.lab.injections import Injection
from everstep.lab.scenario import load_inject, scenario_of
from everstep.lab.watching import Member, Reached

KILL: dict[str, Any] = {"do": "kill", "rank": 1, "step": 40}


def acts(*changed: dict[str, Any], **inject: Any) -> dict[str, Any]:
    return table(inject={"acts": [deepcopy(one) for one in changed], **inject})


@pytest.mark.parametrize(
    ("act", "named"),
    [
        ({"do": "burn", "rank": 1, "step": 3}, "inject.acts[0].do = 'burn' must be one of kill, stop, slow, cut"),
        ({"do": "kill", "step": 3}, "inject.acts[0].rank is missing; it must be a rank or 'any'; or say node"),
        ({**KILL, "node": "a"}, "inject.acts[0].node = 'a' must be left out: rank says already whom"),
        ({**KILL, "rank": -1}, "inject.acts[0].rank = -1 must be a rank from 0, or 'any'"),
        ({**KILL, "rank": "all"}, "inject.acts[0].rank = 'all' must be a rank from 0, or 'any'"),
        ({**KILL, "after": "3s"}, "inject.acts[0].step = 40 must be a step from 1, or after a duration"),
        ({"do": "kill", "rank": 1}, "inject.acts[0].step is missing; it must be a step from 1, or after a"),
        ({**KILL, "step": 0}, "inject.acts[0].step = 0 must be a whole number from 1"),
        ({**KILL, "for": "3s"}, "inject.acts[0].for = '3s' is not known here"),
        ({**KILL, "wipe": ["memory"]}, "inject.acts[0].wipe = ['memory'] is not known here"),
        ({**KILL, "do": "slow", "share": 1.5}, "inject.acts[0].share = 1.5 must be a number from 0.01 to 0.99"),
        ({"do": "wipe", "wipe": ["tape"], "step": 1}, "inject.acts[0].wipe = ['tape'] must be a list out of memory, d"),
        ({"do": "flip", "file": "readme", "step": 1}, "inject.acts[0].file = 'readme' must be one of base, manifest"),
    ],
)
def test_what_is_wrong_in_an_act_is_named(act: dict[str, Any], named: str) -> None:
    with pytest.raises(BadConfig) as caught:
        scenario_of(acts(act), file="s.toml")
    assert str(caught.value).startswith(f"s.toml: {named}")


@pytest.mark.parametrize(
    ("inject", "named"),
    [
        ({}, "s.toml: inject.acts is missing; it must be a list of tables"),
        ({"acts": [KILL], "patience": "0s"}, "s.toml: inject.patience = '0s' must be a duration"),
        ({"acts": [KILL], "speed": 0}, "s.toml: inject.speed = 0 must be a number from 1e-06"),
        ({"acts": [KILL], "sead": 3}, "s.toml: inject.sead = 3 is not known here"),
    ],
)
def test_what_is_wrong_around_them_is_named(inject: dict[str, Any], named: str) -> None:
    with pytest.raises(BadConfig) as caught:
        scenario_of(table(inject=inject), file="s.toml")
    assert str(caught.value).startswith(named)


def test_a_file_with_acts_alone_is_enough_and_without_failures_none_are_drawn(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text("title = 'x'\n[inject]\nseed = 4\n[[inject.acts]]\ndo = 'kill'\nkeeper = 'any'\nafter = '2s'")
    found, scenario = load_inject(path)
    assert scenario is None and found.seed == 4
    assert found.acts == (Injection(do="kill", target="keeper", after_s=2.0),)
    path.write_text("[inject]\nspeed = 60")
    with pytest.raises(BadConfig, match="no failures that could be drawn"):
        load_inject(path)
    path.write_text(
        "duration = '1h'\n[cluster]\nnodes = 1\n[training]\nstep = 1\nstate = '1GB'\n[[strategies]]\nkind = 'log'"
    )
    with pytest.raises(BadConfig, match="inject is missing"):
        load_inject(path)


def test_acts_read_as_what_they_do() -> None:
    said = [
        Injection(do="kill", target="node", who="a", step=1, wipe=("memory", "disk")),
        Injection(do="wipe", target="node", who="a", step=1, wipe=("memory",)),
        Injection(do="flip", target="rank", who="2", step=1, file="log", bits=2),
        Injection(do="stop", target="rank", who="any", step=1, for_s=2.5),
        Injection(do="fill", target="node", who="a", step=1),
        Injection(do="cut", target="keeper", who="a", step=1, for_s=3.0),
    ]
    assert [str(one) for one in said] == [
        "kill node a, wipe its memory and disk",
        "wipe node a: memory",
        "flip 2 bits of a log of rank 2",
        "stop rank any for 2.5 s",
        "fill the disk of node a",
        "cut keeper a off for 3 s",
    ]


class Pretended:
    """Of a run: who is there, and where they are."""

    def __init__(self, nodes: dict[int, str]) -> None:
        self.ranks = {rank: Member(1000 + rank, node, {}, Path(), 0.0, 0, len(nodes)) for rank, node in nodes.items()}
        self.keepers: dict[str, Member] = {}

    def reached(self) -> Reached:
        return Reached(0, 0.0)


def drawn(values: dict[str, Any], nodes: dict[int, str], monkeypatch: pytest.MonkeyPatch) -> list[Injection]:
    scenario = scenario_of(values)
    assert scenario.inject is not None
    monkeypatch.setattr(injector, "Tree", lambda *_, **__: None)
    made = injector.Injector([], scenario.inject, scenario, [])
    made._watched = Pretended(nodes)  # type: ignore[assignment]
    made._draw()
    return made._waiting


def test_failures_are_drawn_by_the_seed_and_are_what_the_simulator_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    from everstep.lab.failures import draw

    nodes = {rank: f"node{rank // 2}" for rank in range(16)}
    values = table(inject={"speed": 3600, "seed": 5})
    found = drawn(values, nodes, monkeypatch)
    assert found == drawn(values, nodes, monkeypatch)
    assert found != drawn(table(inject={"speed": 3600, "seed": 6}), nodes, monkeypatch)
    wanted = draw(scenario_of(values), 5)
    assert [one.after_s for one in found] == [failure.time / 3600 for failure in wanted]
    for act, failure in zip(found, wanted, strict=True):
        (seat,) = failure.seats
        if failure.kind == "process":
            assert act.target == "rank" and nodes[int(act.who)] == f"node{seat}" and not act.wipe
        else:
            assert (act.target, act.who, act.wipe) == ("node", f"node{seat}", ("memory", "disk"))
    with pytest.raises(BadConfig, match=r"cluster.nodes = 8, and the command runs on 1: a"):
        drawn(values, {0: "a"}, monkeypatch)


# -- the verdict


def test_a_life_is_over_when_a_rank_begins_again_and_says_how_it_began() -> None:
    events: list[AnyEvent] = [
        started(1.0, 0, 0, "nothing"), started(1.2, 1, 0, "nothing"), started(5.0, 1, 7), started(5.1, 0, 7),
        started(9.0, 0, 11), started(9.1, 1, 11, pid=99),
        WentOn(time=9.2, view=1, rank=0, world=2, policy="spare", step=11, left_at=11, exact=True, stopped_s=0.0,
               met_s=0.0, restored_s=0.0),
    ]  # fmt: skip
    lives = verdict.lives_of(events)
    assert [(one.began, one.step) for one in lives] == [(1.0, 0), (5.0, 7), (9.0, 11)]
    assert [one.how for one in lives] == [
        "restart, from nothing, at step 0", "restart, from memory, at step 7", "spare, without a restart, at step 11",
    ]  # fmt: skip
    assert lives[2].pids == {0: 10, 1: 99}


def test_steps_lost_and_the_next_step_are_counted_from_the_act() -> None:
    kill = Injection(do="kill", target="rank", who="1", step=9)
    events: list[AnyEvent] = [
        started(1.0, 0, 0),
        started(1.0, 1, 0),
        started(15.0, 0, 7, pid=20),
        started(15.5, 1, 7, pid=21),
    ]
    steps = [step(0, 10, 9, 9.5), step(1, 11, 9, 9.6), step(0, 10, 10, 10.2),  # this one was finished all the same
             step(0, 20, 8, 16.0), step(1, 21, 8, 16.5), step(0, 20, 9, 17.0)]  # fmt: skip
    stop = Injection(do="stop", target="rank", who="0", step=8, for_s=1.0)
    found = verdict.judge(played(events, steps, made(stop, 9.0, 8), made(kill, 10.0, 9), made(kill, 10.1, 9)))
    stopped, killed, again = found.fates
    assert (stopped.steps_lost, stopped.went_on) == (0, "training stayed")
    assert stopped.next_step_s == pytest.approx(0.6)
    assert (killed.steps_lost, killed.went_on) == (2, "restart, from memory, at step 7")
    assert killed.next_step_s == pytest.approx(6.5)
    assert again.steps_lost == 2 and found.steps_lost == 2  # one way back, counted once
    assert found.is_well and found.steps == 10


def test_a_life_answers_the_last_act_that_training_did_not_go_on_after() -> None:
    events: list[AnyEvent] = [started(1.0, 0, 0), started(15.0, 0, 9, pid=20)]
    steps = [step(0, 10, 9, 9.5), step(0, 20, 10, 16.0)]
    stop = Injection(do="stop", target="rank", who="0", step=8, for_s=0.1)
    cut = Injection(do="cut", target="rank", who="0", step=9)
    found = verdict.judge(played(events, steps, made(stop, 9.0, 8), replace(made(cut, 10.0, 9), met="2 connections")))
    assert [one.went_on for one in found.fates] == ["training stayed", "restart, from memory, at step 9"]
    assert [one.what for one in found.fates] == ["stop rank 0 for 0.1 s", "cut rank 0 off: 2 connections"]
    hung = verdict.judge(played(events, steps[1:], made(stop, 9.0, 8), made(cut, 10.0, 8)))
    assert [one.went_on for one in hung.fates] == ["restart, from memory, at step 9"] * 2
    failed = verdict.judge(played(events[:1], steps[:1], made(cut, 10.0, 9), code=1))
    assert failed.fates[0].went_on == "nobody went on"


def test_nobody_going_on_is_said_and_is_not_well() -> None:
    kill = Injection(do="kill", target="node", who="a", step=9)
    events: list[AnyEvent] = [started(1.0, 0, 0), started(1.0, 1, 0)]
    found = verdict.judge(played(events, [step(0, 10, 9, 10.5)], made(kill, 10.0, 9), code=1))
    assert (found.fates[0].went_on, found.fates[0].next_step_s) == ("nobody went on", None)
    assert not found.is_well and found.command == "ended with exit code 1"


def test_one_bit_in_one_tensor_or_one_value_is_not_exact() -> None:
    with run_directory() as one, run_directory() as same, run_directory() as longer:
        for directory, steps in ((one, 4), (same, 4), (longer, 5)):
            must_finish(lambda directory=directory, steps=steps: train_tiny(directory, steps=steps))  # type: ignore[misc]
        exact, said = verdict.compare(one, same)
        assert exact is True and "bit for bit" in said, said
        exact, said = verdict.compare(one, longer)
        assert exact is False and "differ from" in said
        assert verdict.compare(one, one.parent / "none")[0] is None
    zero, minus = torch.zeros(2), torch.tensor([0.0, -0.0])
    assert not verdict._same({"a": [zero]}, {"a": [minus]})
    assert verdict._same(float("nan"), float("nan")) and not verdict._same(1, 1.0)


# -- bits


def test_as_many_bits_turn_as_are_asked_for_and_no_more_than_there_are(tmp_path: Path) -> None:
    path = tmp_path / "commit"
    path.write_bytes(bytes(2))
    flip([path], 16, random.Random(0))
    assert path.read_bytes() == b"\xff\xff"
    with pytest.raises(EverstepError, match="17 bits cannot turn in 2 bytes"):
        flip([path], 17, random.Random(0))
