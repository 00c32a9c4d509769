"""The rounds that all nodes hold together, played with late, lost and repeated reports, misses and restarts."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.cadence import Every
from everstep.keeper.rounds import AHEAD, NONE, VALUES, Lane, Order, Orders, Report, Rounds, values_of

LANE, LIFE = "protect", "life"


@dataclass
class Node:
    """A node as `lane` plays it: it holds the newest few bases, and does its part of what it was told last."""

    name: str
    newest: int = NONE
    done: int = NONE
    missed: int = NONE
    wanted: int = NONE
    cancels: int = 0
    order: Order = field(default_factory=Order)
    parts: set[int] = field(default_factory=set)  # all that it ever did

    def report(self) -> Report:
        return Report(
            node=self.name, generation=LIFE, newest=self.newest, wanted={LANE: self.wanted},
            lanes={
                LANE: Lane(
                    done=self.done, missed=self.missed, reach=self.done, seconds=0.1, cancels=self.cancels
                )
            },
        )  # fmt: skip

    def hear(self, orders: Orders) -> None:
        if orders.generation == LIFE:
            self.order = orders.lanes[LANE]

    def work(self, skipped: int = 0) -> None:
        """`skipped`: captures that it had no room for."""
        if self.done < self.order.step <= self.newest:
            self.done = min(self.newest, max(self.order.step + skipped, self.newest - 3))  # older ones are overwritten
            self.parts.add(self.done)

    def miss(self) -> None:
        if self.done < self.order.step:
            self.missed = self.order.step

    def restart(self) -> None:
        """Its keeper was killed: another knows nothing of what was done, but what was done is there."""
        self.done = self.missed = NONE
        self.cancels = 0
        self.order = Order()


class Game:
    """Training in lockstep on some nodes, and a network that keeps what was sent for as long as it likes."""

    def __init__(self, count: int, every: Every) -> None:
        self.nodes = [Node(f"n{number}") for number in range(count)]
        self.every, self.now, self.complete = every, 0.0, NONE
        self.sent: list[Report] = []
        self.answers: list[tuple[Node, Orders]] = []
        self.begin()

    def begin(self) -> None:
        """Whoever appoints steps starts anew."""
        self.rounds = Rounds([node.name for node in self.nodes], {LANE: self.every}, LIFE, 0.1)
        self.complete = NONE

    def train(self, which: int) -> None:
        """No rank is more than a step before another."""
        node = self.nodes[which % len(self.nodes)]
        if node.newest <= min(one.newest for one in self.nodes):
            node.newest += 1

    def tell(self, report: Report) -> None:
        self.now += 0.02
        orders = self.rounds.hear(report, self.now)
        order = orders.lanes[LANE]
        assert order.complete >= self.complete, "what is complete went back"
        if order.complete > self.complete:
            assert all(order.complete in node.parts for node in self.nodes), "not all did their part of this step"
        self.complete = order.complete
        node = next(one for one in self.nodes if one.name == report.node)
        self.answers.append((node, orders))

    def play(self, move: str, number: int) -> None:
        node = self.nodes[number % len(self.nodes)]
        match move:
            case "train":
                self.train(number)
            case "work":
                node.work(skipped=number % 7 // 5)
            case "miss":
                node.miss()
            case "want":
                node.wanted = max(node.wanted, node.newest)
            case "cancel":
                node.cancels += 1
            case "send":
                self.sent.append(node.report())
            case "meet":
                self.tell(node.report())
                node.hear(self.answers.pop()[1])
            case "arrive" if self.sent:
                self.tell(self.sent.pop(number % len(self.sent)))
            case "arrive again" if self.sent:
                self.tell(self.sent[number % len(self.sent)])
            case "lose" if self.sent:
                self.sent.pop(number % len(self.sent))
            case "answer" if self.answers:
                who, orders = self.answers.pop(number % len(self.answers))
                who.hear(orders)
            case "restart":
                node.restart()
            case "restart the first":
                self.nodes[0].restart()
                self.begin()

    def go_on_in_peace(self, steps: int) -> bool:
        """Nothing more happens but training, and every report and order arrives; whether a newer step is complete."""
        began = max(node.newest for node in self.nodes)
        for number in range(steps * len(self.nodes)):
            self.train(number)
            for node in self.nodes * 2:
                self.tell(node.report())
                node.hear(self.answers.pop()[1])
                node.work()
        return self.complete > began


MOVES = [
    *["train", "meet", "work"] * 4, "miss", "want", "cancel", "send", "arrive", "arrive again", "lose", "answer",
    "restart", "restart the first",
]  # fmt: skip
moves = st.integers(0, 1 << 30).map(
    lambda seed: [(dice.choice(MOVES), dice.randrange(50)) for dice in [Random(seed)] for _ in range(150)]
)  # long games: short ones end before anything is complete
cadences = st.sampled_from([Every(steps=1), Every(steps=4), Every(seconds=0.5), Every()])


@settings(max_examples=200, derandomize=True)
@given(st.integers(1, 4), cadences, moves)
def test_a_step_is_complete_only_if_all_did_exactly_that_and_complete_never_goes_back(
    count: int, every: Every, played: list[tuple[str, int]]
) -> None:
    game = Game(count, every)
    for move, number in played:
        game.play(move, number)


@settings(max_examples=100, derandomize=True)
@given(st.integers(1, 4), cadences, moves)
def test_when_faults_end_a_newer_step_becomes_complete(count: int, every: Every, played: list[tuple[str, int]]) -> None:
    game = Game(count, every)
    for move, number in played:
        game.play(move, number)
    assert game.go_on_in_peace(steps=40)


@pytest.mark.parametrize("missed", [False, True])
def test_a_step_that_all_wait_at_is_appointed_until_it_is_done_even_if_one_node_had_missed_it(missed: bool) -> None:
    game = Game(3, Every(steps=1))
    for node in game.nodes:
        node.newest = 5
        node.wanted = 5
    for node in game.nodes * 2:
        node.hear(game.rounds.hear(node.report(), game.now))
    assert {node.order.step for node in game.nodes} == {5}
    for node in game.nodes:
        node.miss() if missed and node.name == "n1" else node.work()
    for node in game.nodes * 2:
        node.hear(game.rounds.hear(node.report(), game.now))
    assert {node.order.complete for node in game.nodes} == {NONE if missed else 5}
    game.nodes[1].work()
    for node in game.nodes * 2:
        node.hear(game.rounds.hear(node.report(), game.now))
    assert {node.order.complete for node in game.nodes} == {5}


def test_a_report_of_another_life_or_of_a_stranger_changes_nothing() -> None:
    rounds = Rounds(["n0"], {LANE: Every(steps=1)}, LIFE, 0.1)
    lanes = {LANE: Lane(done=7)}
    for report in (
        Report(node="n0", generation="another", newest=7, lanes=lanes),
        Report(node="stranger", generation=LIFE, newest=7, lanes=lanes),
    ):
        orders = rounds.hear(report, 1.0)
        assert orders.lanes[LANE] == Order() and orders.silent == ("n0",)
        assert not rounds.has_told_all


def test_a_node_that_is_silent_is_named_and_nothing_is_appointed_without_it() -> None:
    rounds = Rounds(["n0", "n1"], {LANE: Every(steps=1)}, LIFE, 0.1)
    orders = rounds.hear(Report(node="n0", generation=LIFE, newest=3, lanes={LANE: Lane()}), 1.0)
    assert orders.silent == ("n1",) and orders.lanes[LANE].step == NONE
    orders = rounds.hear(Report(node="n1", generation=LIFE, newest=2, lanes={LANE: Lane()}), 1.1)
    assert orders.silent == () and orders.lanes[LANE].step == 3 + AHEAD


def test_what_is_called_off_is_not_appointed_again_until_it_is_due_or_somebody_waits() -> None:
    rounds = Rounds(["n0", "n1"], {LANE: Every(seconds=60.0)}, LIFE, 0.1)

    def hear(now: float, *, newest: int, cancels: int = 0, wanted: int = NONE, done: int = NONE) -> Order:
        lanes = {LANE: Lane(done=done, cancels=cancels)}
        for node in ("n0", "n1"):
            report = Report(node=node, generation=LIFE, newest=newest, wanted={LANE: wanted}, lanes=lanes)
            orders = rounds.hear(report, now)
        return orders.lanes[LANE]

    assert hear(0.0, newest=3).step == 5, "appointed"
    assert hear(1.0, newest=4, cancels=1).step == 5, "what is not under way cannot be called off"
    assert hear(2.0, newest=5, cancels=1).step == 5
    assert hear(3.0, newest=5, cancels=2).step == NONE, "called off"
    assert hear(10.0, newest=5, cancels=2).step == NONE, "also while training stands still"
    assert hear(11.0, newest=9, cancels=2).step == NONE, "it is not due yet"
    assert hear(64.0, newest=20, cancels=2).step > 20
    assert hear(65.0, newest=22, cancels=3).step == NONE
    assert hear(66.0, newest=22, cancels=3, wanted=22).step == 22, "somebody waits for it"
    assert hear(67.0, newest=22, cancels=3, wanted=22, done=22).complete == 22


def test_with_a_cadence_of_steps_what_is_called_off_is_followed_by_the_next_multiple() -> None:
    rounds = Rounds(["n0"], {LANE: Every(steps=10)}, LIFE, 0.1)

    def hear(now: float, newest: int, cancels: int) -> int:
        lanes = {LANE: Lane(cancels=cancels)}
        orders = rounds.hear(Report(node="n0", generation=LIFE, newest=newest, lanes=lanes), now)
        return orders.lanes[LANE].step

    assert hear(0.0, 8, 0) == 10
    assert hear(1.0, 12, 0) == 10 and hear(2.0, 12, 1) == 20
    assert hear(9.0, 12, 1) == 20, "also while training stands still"


def test_a_node_that_was_heard_of_long_ago_is_named_too() -> None:
    rounds = Rounds(["n0", "n1"], {LANE: Every(steps=1)}, LIFE, 0.1)
    for node in ("n0", "n1"):
        orders = rounds.hear(Report(node=node, generation=LIFE, newest=1), 0.0)
    assert orders.silent == ()
    assert rounds.hear(Report(node="n0", generation=LIFE, newest=1), 1.0).silent == ()
    assert rounds.hear(Report(node="n0", generation=LIFE, newest=1), 60.0).silent == ("n1",)
    assert rounds.hear(Report(node="n1", generation=LIFE, newest=1), 61.0).silent == ()


class Job:
    """Nodes that train on compressed gradients: each keeps the values of its newest two steps, and those it holds."""

    def __init__(self, count: int, *, apart: int = 50, step_s: float = 0.01) -> None:
        self.names, self.apart, self.step_s = [f"n{number}" for number in range(count)], apart, step_s
        self.lanes = {VALUES: Every(), "disk": Every(seconds=1e9), values_of("shared"): Every()}
        self.rounds = Rounds(self.names, self.lanes, LIFE, 0.1)
        self.now, self.newest, self.orders = 0.0, 0, {name: Orders() for name in self.names}
        self.saved: dict[str, set[int]] = {name: set() for name in self.names}
        self.missed = dict.fromkeys(self.names, NONE)
        self.wanted = NONE
        self.lag: dict[str, float] = {}  # nodes that hear only every so many seconds
        self.heard = dict.fromkeys(self.names, -1e9)
        self.appointed: list[int] = []

    def order(self, name: str, lane: str = VALUES) -> Order:
        return self.orders[name].lanes.get(lane, Order())

    def tell(self, name: str, *, base: int = NONE, sunk: int = NONE, is_alive: bool = True) -> None:
        lanes = {
            VALUES: Lane(done=max(self.saved[name], default=NONE), missed=self.missed[name], apart=self.apart),
            "disk": Lane(done=base, reach=base), values_of("shared"): Lane(done=sunk),
        }  # fmt: skip
        orders = self.rounds.hear(
            Report(
                node=name, generation=LIFE, newest=NONE, newest_values=self.newest, is_alive=is_alive,
                wanted={VALUES: self.wanted}, lanes=lanes,
            ),
            self.now,
        )  # fmt: skip
        if self.now - self.heard[name] >= self.lag.get(name, 0.0):
            self.orders[name], self.heard[name] = orders, self.now

    def turn(self, **said: Any) -> None:
        """All tell and hear, and do what they are told if they still can."""
        for name in self.names:
            self.tell(name, **said)
            step = self.order(name).step
            if step == self.newest or (step == self.newest - 1 and step in self.appointed):
                self.saved[name].add(step)
            elif step < self.newest and step not in self.saved[name]:
                self.missed[name] = max(self.missed[name], step)
            if step not in self.appointed:
                self.appointed.append(step)

    def train(self, steps: int, **said: Any) -> None:
        for _ in range(steps):
            self.newest, self.now = self.newest + 1, self.now + self.step_s
            self.turn(**said)

    @property
    def complete(self) -> int:
        return min(self.order(name).complete for name in self.names)


def test_values_of_one_step_are_saved_by_all_as_far_apart_as_they_say() -> None:
    job = Job(3)
    job.train(1000)
    steps = [step for step in job.appointed if step != NONE]
    assert all(step in saved for saved in job.saved.values() for step in steps if step <= job.newest - 1)
    assert job.complete >= 1000 - 50 - 60 and all(b - a >= 50 for a, b in pairwise(steps))
    assert set(job.missed.values()) == {NONE}


def test_nobody_may_have_passed_a_step_of_values_before_all_have_heard_of_it() -> None:
    job = Job(2, step_s=0.001)
    job.lag["n1"] = 0.4
    job.train(3000)
    assert job.missed["n1"] == NONE and job.complete > 2000
    slow = Job(2, step_s=0.001)
    slow.lag["n1"] = 1.3
    slow.train(9000)
    assert slow.missed["n1"] > NONE, "it could not know"
    assert slow.complete > slow.missed["n1"], "what followed was announced earlier"


def test_whoever_waits_has_the_values_of_that_step_saved_at_once_and_not_those_of_a_later_one() -> None:
    early = Job(2)
    early.train(20)
    early.wanted = early.newest
    for _ in range(3):
        early.turn()
    assert early.complete == early.newest == 20
    job = Job(2)
    job.train(60)
    assert job.order("n0").step > job.newest, "one is appointed"
    job.wanted = job.newest
    for _ in range(3):
        job.turn()
    assert job.complete == job.newest == 60


def test_a_base_takes_the_place_of_values_and_without_values_none_are_appointed() -> None:
    job = Job(2)
    job.train(40)
    job.train(49, base=40)
    assert job.appointed == [NONE]
    job.train(100, base=40)
    assert job.complete > 40
    dense = Job(2)
    dense.newest, dense.wanted = NONE, 5
    dense.turn()
    dense.turn()
    assert dense.appointed == [NONE]


def test_when_all_trainers_are_gone_the_newest_values_of_all_are_saved() -> None:
    job = Job(2)
    job.train(20)
    for _ in range(3):
        job.turn(is_alive=False)
    assert job.complete == 20


def test_deeper_places_get_the_values_that_all_disks_have_one_step_after_the_other() -> None:
    job = Job(2)
    lane = values_of("shared")
    job.train(200)
    first = job.order("n0", lane).step
    assert first in job.saved["n0"] & job.saved["n1"]
    job.train(300)
    assert job.complete > first and job.order("n0", lane).step == first, "it is not there yet"
    job.train(1, sunk=first)
    job.train(1, sunk=first)
    assert job.order("n0", lane).complete == first and job.order("n0", lane).step == job.complete > first
