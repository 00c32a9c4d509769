"""Who decides what after a loss, on paper: reports that come late, twice, or not at all; and no two that go on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from everstep.events import Called, RanksLost
from everstep.keeper.assembly import Assembly, Call, Report
from everstep.keeper.lines import Gone, Here
from everstep.keeper.protocol import Bye, Enrol, Lost, Seat, Sitting, Stand, View
from everstep.keeper.views import SPARE, Standing, decide, is_quorum, next_seats

DETECT_S = 10.0


def standing(worker: str, rank: int, node: str) -> Standing:
    return Standing(worker=worker, rank=rank, address=f"{node}:1", node=node)


class Cluster:
    """Nodes with a rank or more each, as their keepers would report them."""

    def __init__(
        self,
        nodes: str,
        ranks: int = 1,
        spares: Sequence[str] = (),
        on_loss: Sequence[str] = ("rollback",),
        unit: int = 1,
    ) -> None:
        self.now, self.events, self.unit = 100.0, list[Any](), unit
        self.nodes = list(nodes)
        places = tuple(node for node in nodes for _ in range(ranks))
        self.sitting = Sitting(view=0, seats=tuple(Seat(node=n, address=f"{n}:0") for n in nodes), places=places)
        self.workers: dict[str, dict[str, Here]] = {node: {} for node in [*nodes, *spares]}
        self.gone: dict[str, list[Gone]] = {node: [] for node in self.workers}
        self.calls: dict[str, Call | None] = {}
        self.numbers = dict.fromkeys(self.workers, 0)
        for rank, node in enumerate(places):
            self._enrol(node, f"w{rank}", rank, len(places), on_loss)
        for node in spares:
            self._enrol(node, f"s{node}", SPARE, 0, on_loss)
            self.stand(node)
        self.chairs = {node: Assembly(node, self.events.append, self.now, self.sitting) for node in nodes}

    def _enrol(self, node: str, worker: str, rank: int, world: int, on_loss: Sequence[str]) -> None:
        said = Enrol(
            worker=worker,
            job="j",
            pid=1,
            view=0,
            rank=rank,
            world=world,
            on_loss=tuple(on_loss),
            detect_s=DETECT_S,
            unit=self.unit,
        )  # type: ignore[arg-type]
        self.workers[node][worker] = Here(enrolled=said)

    def report(self, node: str) -> Report:
        self.numbers[node] += 1
        return Report(
            node=node, address=f"{node}:0", life=node, number=self.numbers[node],
            workers=tuple(self.workers[node].values()), gone=tuple(self.gone[node]), call=self.calls.get(node),
        )  # fmt: skip

    def tell(self, chair: str, *nodes: str) -> None:
        """These report to it, take note of what it has decided, and their workers do as they are told."""
        for node in nodes:
            self.chairs[chair].hear(self.report(node), self.now)
            call = self.chairs[chair].call
            if call is not None and (self.calls.get(node) is None or call.number > self.calls[node].number):  # type: ignore[union-attr]
                self.calls[node] = call
            for worker, order in self.chairs[chair].orders(node, "j").items():
                here = self.workers[node][worker]
                if isinstance(order, Lost):
                    self.workers[node][worker] = replace(here, standing=Stand(view=order.view, address=f"{node}:1"))
                elif isinstance(order, View):
                    said = replace(here.enrolled, view=order.number, rank=order.rank, world=order.world)
                    self.workers[node][worker] = Here(enrolled=said)

    def pass_time(self, seconds: float, chair: str, *nodes: str) -> None:
        """While these report to it, now and then."""
        for _ in range(round(seconds)):
            self.now += 1.0
            self.tell(chair, *nodes)
            self.chairs[chair].look(self.now)

    def stand(self, *nodes: str, only: str = "") -> None:
        for node in nodes:
            for worker, here in self.workers[node].items():
                if only in ("", worker):
                    self.workers[node][worker] = replace(
                        here, standing=Stand(view=here.enrolled.view, address=f"{node}:1")
                    )

    def leave(self, node: str, worker: str, rank: int, how: str) -> None:
        del self.workers[node][worker]
        self.gone[node].append(Gone(worker=worker, view=0, rank=rank, how=how))

    def views(self, *nodes: str) -> set[tuple[int, int]]:
        """Number and world of the views that the workers of these nodes are in."""
        return {(here.enrolled.view, here.enrolled.world) for node in nodes for here in self.workers[node].values()}

    def told(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


# -- who takes which place


def test_whoever_stood_by_on_the_node_of_the_lost_takes_its_place_before_others() -> None:
    left = [standing("w0", 0, "a"), standing("w2", 2, "b")]
    spares = [standing("s1", SPARE, "c"), standing("s2", SPARE, "a")]
    made = decide(3, left, spares, ["spare"], {0: "a", 1: "a", 2: "b"})
    assert made.workers == ("w0", "s2", "w2") and made.nodes == ("a", "a", "b")


def test_the_places_of_a_lost_node_are_taken_by_those_of_one_node() -> None:
    left = [standing("w0", 0, "a")]
    spares = [standing("c1", SPARE, "c"), *(standing(f"d{i}", SPARE, "d") for i in range(2))]
    made = decide(3, left, spares, ["spare"], {0: "a", 1: "b", 2: "b"})
    assert made.nodes == ("a", "d", "d")
    assert decide(4, left, spares, ["spare"], dict.fromkeys(range(1, 4), "b")).nodes == ("a", "d", "d", "c")


@pytest.mark.parametrize(
    ("lost", "goes_on", "idle", "reason"),
    [
        ([1], ("w2", "w3", "w4", "w5"), ("w0",), "1 lost, and 0 spares"),
        ([4, 5], ("w0", "w1", "w2", "w3"), (), "2 lost, and 0 spares"),
        ([0, 3], ("w4", "w5"), ("w1", "w2"), "2 lost, and 0 spares"),
        ([0, 3, 4], (), (), "3 lost, and 0 spares; none of the replicas, of 2 ranks each, is whole"),
    ],
)  # fmt: skip
def test_only_whole_replicas_go_on(
    lost: list[int], goes_on: tuple[str, ...], idle: tuple[str, ...], reason: str
) -> None:
    left = [standing(f"w{rank}", rank, "a") for rank in range(6) if rank not in lost]
    made = decide(6, left, [], ["spare", "rollback"], unit=2)
    assert (made.workers, made.idle, made.reason) == (goes_on, idle, reason)
    assert made.policy == ("rollback" if goes_on else "restart")


def test_what_is_left_of_a_replica_stands_by_on_its_node_until_there_are_enough_for_a_whole_one() -> None:
    """Also if the node of the broken replica had the chair."""
    cluster = Cluster("ab", ranks=2, on_loss=["spare", "rollback"], unit=2)
    cluster.tell("a", "a", "b")
    cluster.leave("a", "w1", 1, "its process ended")
    cluster.tell("a", *"abababab")
    assert cluster.views("b") == {(1, 2)}
    (idle,) = cluster.workers["a"].values()
    assert (idle.enrolled.worker, idle.enrolled.rank, idle.enrolled.view) == ("w0", SPARE, 1)
    (called,) = cluster.told(Called)
    assert (called.idle, called.lost, called.lost_nodes) == ((0,), (1,), ())
    assert cluster.chairs["a"].sitting.seats[0].node == "b"
    cluster.stand("a")
    cluster.pass_time(3 * DETECT_S, "b", "a", "b")
    assert len(cluster.told(Called)) == 1  # it is one, and two are needed
    cluster._enrol("a", "fresh", SPARE, 0, ["spare", "rollback"])
    cluster.stand("a", only="fresh")
    cluster.pass_time(DETECT_S, "b", "a", "b")
    assert cluster.views("a", "b") == {(2, 4)}
    assert {here.enrolled.rank for here in cluster.workers["a"].values()} == {2, 3}


@pytest.mark.parametrize(
    ("seats", "present", "may"),
    [("abc", "ab", True), ("abc", "c", False), ("abcd", "ab", True), ("abcd", "cd", False), ("abcd", "bcd", True),
     ("ab", "a", True), ("ab", "b", False), ("a", "a", True), ("abcde", "xyzde", False)],
)  # fmt: skip
def test_more_than_half_may_speak_for_all_and_half_only_with_the_first(seats: str, present: str, may: bool) -> None:
    assert is_quorum(seats, present) is may


def test_of_any_two_parts_of_a_cluster_at_most_one_may_go_on() -> None:
    for count in range(1, 9):
        nodes = [f"n{i}" for i in range(count)]
        for mask in range(2**count):
            part = {node for i, node in enumerate(nodes) if mask >> i & 1}
            assert not (is_quorum(nodes, part) and is_quorum(nodes, set(nodes) - part))


def test_who_has_the_chair_keeps_it_and_newcomers_come_last() -> None:
    assert next_seats(["x", "b", "b", "c"], "b", "abc") == ("b", "c", "x")


# -- a node is lost


def test_a_silent_node_is_lost_with_all_its_ranks_and_the_others_are_called() -> None:
    nodes = Cluster("abc", ranks=2)
    nodes.tell("a", "a", "b", "c")
    nodes.pass_time(16, "a", "a", "b")
    assert nodes.views("a", "b") == {(1, 4)}
    assert [(event.rank, event.node) for event in nodes.told(RanksLost)] == [(4, "c"), (5, "c")]
    assert [event.lost_nodes for event in nodes.told(Called)] == [("c",)]


def test_nobody_is_lost_by_reports_that_come_twice_or_late_or_of_a_keeper_that_is_gone() -> None:
    nodes = Cluster("ab")
    nodes.tell("a", "a", "b")
    late = replace(nodes.report("b"), workers=(), gone=(Gone(worker="w1", view=0, rank=1, how="a rumour"),))
    nodes.tell("a", "b", "b")
    nodes.chairs["a"].hear(late, nodes.now)
    nodes.chairs["a"].hear(replace(nodes.report("b"), life="the next keeper"), nodes.now)
    nodes.chairs["a"].hear(replace(late, number=99), nodes.now)
    nodes.pass_time(30, "a", "a")
    assert [event.how for event in nodes.told(RanksLost)] == ["its node b was not heard of for 10 s"]


def test_a_keeper_that_comes_back_without_its_workers_is_given_time_to_hear_of_them() -> None:
    nodes = Cluster("abc")
    nodes.tell("a", "a", "b", "c")
    workers, nodes.workers["b"] = nodes.workers["b"], {}
    nodes.pass_time(8, "a", "a", "b", "c")
    nodes.workers["b"] = workers
    nodes.pass_time(8, "a", "a", "b", "c")
    assert not nodes.told(RanksLost)
    nodes.workers["b"] = {}
    nodes.pass_time(14, "a", "a", "b", "c")
    assert [event.how for event in nodes.told(RanksLost)] == ["it did not enrol"]


def test_whoever_slept_does_not_take_all_others_for_lost() -> None:
    nodes = Cluster("abc")
    nodes.tell("a", "a", "b", "c")
    nodes.chairs["a"].look(nodes.now)
    nodes.now += 60
    nodes.chairs["a"].look(nodes.now)
    nodes.pass_time(3, "a", "a", "b", "c")
    assert not nodes.told(RanksLost)


def test_when_the_work_is_done_nobody_is_missed_and_spares_are_let_go() -> None:
    nodes = Cluster("ab", spares=["x"], on_loss=["spare"])
    nodes.tell("a", "a", "b", "x")
    nodes.gone["a"].append(Gone(worker="w0", view=0, rank=0, how=""))
    nodes.workers["a"] = {}
    nodes.pass_time(3, "a", "a", "b", "x")
    assert nodes.chairs["a"].orders("x", "j") == {}
    nodes.pass_time(14, "a", "a", "x")  # whoever ends last may do so without a word
    nodes.workers["b"] = {}
    nodes.pass_time(1, "a", "a", "b", "x")
    assert not nodes.told(RanksLost) and not nodes.told(Called)
    assert nodes.chairs["a"].orders("x", "j") == {"sx": Bye(final=True)}


def test_whoever_is_still_at_work_when_another_has_finished_is_told_of_a_loss_and_called() -> None:
    nodes = Cluster("a", ranks=3)
    nodes.tell("a", "a")
    nodes.leave("a", "w0", 0, "")
    nodes.tell("a", "a")
    nodes.leave("a", "w2", 2, "its process ended")
    nodes.chairs["a"].hear(nodes.report("a"), nodes.now)
    assert nodes.chairs["a"].orders("a", "j") == {"w1": Lost(view=0, ranks=(2,), reason="rank 2: its process ended")}
    nodes.pass_time(3, "a", "a")
    assert nodes.views("a") == {(1, 1)}
    assert [event.rank for event in nodes.told(RanksLost)] == [2]
    assert [event.lost for event in nodes.told(Called)] == [(2,)], "whoever has finished is not lost"


def test_whoever_waits_for_one_that_finishes_while_it_stands_is_called_without_it() -> None:
    nodes = Cluster("a", ranks=3)
    nodes.tell("a", "a")
    nodes.leave("a", "w2", 2, "its process ended")
    nodes.chairs["a"].hear(nodes.report("a"), nodes.now)
    nodes.stand("a", only="w1")
    nodes.chairs["a"].hear(nodes.report("a"), nodes.now)
    assert not nodes.told(Called), "rank 0 makes its last step durable"
    nodes.leave("a", "w0", 0, "")
    nodes.pass_time(3, "a", "a")
    assert nodes.views("a") == {(1, 1)}


def test_spares_that_come_grow_the_world_by_as_many_as_there_are_and_that_once() -> None:
    nodes = Cluster("abcde", on_loss=["spare", "rollback"])
    nodes.tell("a", "a", "b", "c", "d", "e")
    nodes.pass_time(16, "a", "a", "b", "c")
    assert nodes.views("a", "b", "c") == {(1, 3)}
    nodes.workers["x"], nodes.gone["x"], nodes.numbers["x"] = {}, [], 0
    nodes._enrol("x", "sx", SPARE, 0, ["spare", "rollback"])
    nodes.stand("x")
    nodes.pass_time(30, "a", "a", "b", "c", "x")
    assert nodes.views("a", "b", "c", "x") == {(2, 4)}
    assert [(event.policy, event.lost) for event in nodes.told(Called)] == [("rollback", (3, 4)), ("spare", ())]


# -- no two go on


@pytest.mark.parametrize(("minority", "majority"), [("ab", "cde"), ("a", "bc"), ("cd", "ab")])
def test_of_a_cut_network_the_greater_part_goes_on_and_the_other_ends(minority: str, majority: str) -> None:
    nodes = Cluster("".join(sorted(minority + majority)))
    first = nodes.nodes[0]
    nodes.tell(first, *nodes.nodes)
    for part in (minority, majority):
        if part[0] != first:
            nodes.chairs[part[0]] = Assembly(part[0], nodes.events.append, nodes.now, nodes.sitting, [first])
    for _ in range(40):
        nodes.pass_time(1, minority[0], *minority)
        nodes.pass_time(1, majority[0], *majority)
    (went,) = nodes.views(*majority)
    assert went[1] == len(majority)
    assert all(world == 0 for _, world in nodes.views(*minority))
    assert any("nodes are heard of" in event.reason for event in nodes.told(Called))


def test_nobody_is_called_before_enough_nodes_have_taken_note_of_the_view() -> None:
    """Nodes that turn to another keeper in the moment in which the first decides take that decision with them."""
    nodes = Cluster("abc")
    nodes.tell("a", "a", "b", "c")
    nodes.gone["b"].append(Gone(worker="w1", view=0, rank=1, how="its process ended"))
    nodes.workers["b"] = {}
    nodes.tell("a", "b", "a")
    nodes.stand("a", "c")
    nodes.chairs["a"].hear(nodes.report("c"), nodes.now)  # c is not heard of any more from here on
    nodes.chairs["a"].hear(nodes.report("a"), nodes.now)
    call = nodes.chairs["a"].call
    assert call is not None and call.workers == ("w0", "w2")
    nodes.tell("a", "a", "a")
    assert nodes.views("a") == {(0, 3)}, "one of three nodes has taken note"
    nodes.tell("a", "b", "b", "a")
    assert nodes.views("a") == {(1, 2)}


def test_a_view_that_one_keeper_decided_is_not_forgotten_by_the_next() -> None:
    """Its own node alone is the new view; another that turns to a third keeper must not let that one go on as well."""
    nodes = Cluster("abc")
    nodes.tell("a", "a", "b", "c")
    nodes.gone["b"].append(Gone(worker="w1", view=0, rank=1, how="its process ended"))
    nodes.workers["b"] = {}
    nodes.pass_time(14, "a", "a", "b")  # c is silent: the view is a's alone
    nodes.tell("a", "b", "a", "a")
    assert nodes.views("a") == {(1, 1)}
    nodes.chairs["c"] = Assembly("c", nodes.events.append, nodes.now, nodes.sitting, ["a"])
    nodes.stand("c")
    nodes.pass_time(40, "c", "c", "b")
    assert not any(view > 0 and world > 0 for view, world in nodes.views("c"))


def test_what_was_decided_and_not_agreed_to_is_nothing_to_go_on_from_without_those_who_did_not_agree() -> None:
    nodes = Cluster("abcdef")
    nodes.tell("a", *"abcdef")
    for rank, node in ((2, "c"), (3, "d"), (4, "e")):
        nodes.gone[node].append(Gone(worker=f"w{rank}", view=0, rank=rank, how="its process ended"))
        nodes.workers[node] = {}
        nodes.tell("a", node)
    nodes.stand("a", "b", "f")
    for node in "bfa":
        nodes.chairs["a"].hear(nodes.report(node), nodes.now)
    call = nodes.chairs["a"].call
    assert call is not None and call.workers == ("w0", "w1", "w5")
    nodes.calls |= {"b": call, "f": call}  # two of six; and then a is gone
    nodes.chairs["b"] = Assembly("b", nodes.events.append, nodes.now, call.sitting, ["a"])
    nodes.pass_time(40, "b", "b", "f")
    assert all(world == 0 for _, world in nodes.views("b", "f"))


def test_who_follows_in_the_chair_finishes_what_was_decided() -> None:
    nodes = Cluster("abcde")
    nodes.tell("a", "a", "b", "c", "d", "e")
    nodes.pass_time(11, "a", "a", "b", "c", "d")
    nodes.stand("a", "b", "c", "d")
    for node in "bcda":
        nodes.chairs["a"].hear(nodes.report(node), nodes.now)
    call = nodes.chairs["a"].call
    assert call is not None
    nodes.calls |= {"b": call}  # and then a is gone
    nodes.chairs["b"] = Assembly("b", nodes.events.append, nodes.now, call.sitting, ["a"])
    nodes.pass_time(5, "b", "b", "c", "d")
    (went,) = nodes.views("b", "c", "d")
    assert went[0] > call.number and went[1] == 3


def test_one_that_was_taken_for_lost_is_told_so_when_it_comes_back() -> None:
    nodes = Cluster("abc")
    nodes.tell("a", "a", "b", "c")
    nodes.pass_time(14, "a", "a", "b")
    nodes.chairs["a"].hear(nodes.report("c"), nodes.now)
    (order,) = nodes.chairs["a"].orders("c", "j").values()
    assert isinstance(order, Lost) and order.ranks == (2,) and "taken for lost" in order.reason


def test_spares_of_other_nodes_are_waited_for_by_who_has_just_taken_the_chair() -> None:
    nodes = Cluster("abc", spares=["x"], on_loss=["spare", "restart"])
    sitting = nodes.sitting
    nodes.chairs["a"] = Assembly("a", nodes.events.append, nodes.now, sitting, follows=True)
    nodes.gone["c"].append(Gone(worker="w2", view=0, rank=2, how="its process ended"))
    nodes.workers["c"] = {}
    nodes.tell("a", "a", "b", "c", "a", "b")
    nodes.pass_time(2, "a", "a", "b", "c")
    assert not nodes.told(Called)
    nodes.pass_time(2, "a", "a", "b", "c", "x")
    assert [event.policy for event in nodes.told(Called)] == ["spare"]
