"""A whole node is lost, and the others go on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from camp import Camp, wait_until
from lives import digest
from msgspec.structs import replace
from team import STEPS, Ended, Here, survivors

from everstep import Partner
from everstep.events import Called, RanksLost, WentOn

QUICK = "3s"  # until a node that is silent is lost


@pytest.fixture
def camp(tmp_path: Path) -> Iterator[Any]:
    made: list[Camp] = []

    def make(*ranks: int, **options: Any) -> Camp:
        root = tmp_path / str(len(made))
        root.mkdir()
        made.append(Camp(root, ranks, **{"detect_timeout": QUICK, "tiers": [Partner()], **options}))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    known: dict[object, dict[int, tuple[str, str]]] = {}

    def ask(world: int, **options: Any) -> dict[int, tuple[str, str]]:
        key = (world, *sorted(options.items()))
        if key not in known:
            alone = Camp(tmp_path_factory.mktemp("u"), [world], on_loss="restart", **options)
            known[key] = own(alone.start().wait())
            alone.close()
        return known[key]

    return ask


def own(found: dict[int, Ended]) -> dict[int, tuple[str, str]]:
    """By rank: the state, and what each rank has for itself."""
    results = [one.result for one in found.values() if one.result is not None]
    return {one["rank"]: (one["state"], one["own"]) for one in results}


def went_on_alike(found: dict[int, Ended], world: int, steps: int = STEPS) -> None:
    """Those who are left have all come to the end, with the same state."""
    left = survivors(found)
    assert [one["world"] for one in left] == [world] * world
    assert len({one["state"] for one in left}) == 1
    assert {one["step"] for one in left} == {steps}


def test_the_others_go_on_without_a_node_and_say_which_one_was_lost(camp: Any) -> None:
    nodes = camp(2, 2, 2, on_loss="rollback")
    went_on_alike(nodes.start(nodes.lose_at(5, 1)).wait(), 4)
    lost = nodes.events(RanksLost)
    assert {(event.rank, event.node) for event in lost} == {(2, nodes.nodes[1]), (3, nodes.nodes[1])}
    assert all(f"its node {nodes.nodes[1]} was not heard of for 3 s" in event.how for event in lost)
    (called,) = nodes.events(Called)
    assert (called.policy, called.world, called.lost_nodes) == ("rollback", 4, (nodes.nodes[1],))


def test_a_node_that_stands_by_takes_the_place_of_a_lost_one_and_not_a_bit_differs(camp: Any, undisturbed: Any) -> None:
    nodes = camp(1, 2, spares=[2, 1], on_loss=["spare"])
    found = nodes.start(nodes.lose_at(5, 1)).wait()
    assert own(found) == undisturbed(3)
    assert found[3].result is not None and found[4].result is not None, "those of one node take the places of one"
    assert found[5].result is None and found[5].code == 0 and not found[5].error
    assert all(event.exact for event in nodes.events(WentOn))


def test_the_first_node_may_be_lost_and_another_takes_the_chair(camp: Any) -> None:
    nodes = camp(1, 1, 1, on_loss="rollback")
    went_on_alike(nodes.start(nodes.lose_at(5, 0)).wait(), 2)
    (called,) = nodes.events(Called)
    assert called.lost_nodes == (nodes.nodes[0],)


@pytest.mark.soak
def test_with_restart_all_leave_and_the_next_start_goes_on(camp: Any, undisturbed: Any) -> None:
    nodes = camp(1, 1, 1, on_loss=["spare", "restart"])
    found = nodes.start(nodes.lose_at(5, 2)).wait()
    assert [found[name].code for name in (0, 1)] == [75, 75]
    again = Camp(nodes.root, [1, 1, 1], on_loss=["spare", "restart"], detect_timeout=QUICK, tiers=[Partner()])
    again.nodes, again.of = nodes.nodes, nodes.of
    assert own(again.start().wait()) == undisturbed(3)


@pytest.mark.parametrize("which", [0, 1], ids=["who has the chair", "another"])
def test_a_keeper_that_alone_dies_is_back_in_time_and_nobody_is_lost(camp: Any, undisturbed: Any, which: int) -> None:
    nodes = camp(1, 1, 1, spares=[1], on_loss=["spare"], detect_timeout="10s")

    def act(here: Here) -> None:
        if here.name == which and here.tries == 4:
            line = here.run._presence._line
            before = line._channel
            os.kill(nodes.keeper(nodes.nodes[which]), signal.SIGKILL)
            wait_until(lambda: line._channel is not before)
        if here.name < 3 and here.tries in (4, 8):
            assert here.run.wait("protected", timeout=20)
            dist.barrier()
        if here.name == 1 and here.tries == 8:
            os.kill(os.getpid(), signal.SIGKILL)  # those who came after still know how to go on

    found = nodes.start(act).wait()
    assert own(found) == undisturbed(3)
    assert [(event.rank, event.how) for event in nodes.events(RanksLost)] == [(1, "its process ended")]


def test_a_node_that_hangs_is_lost_and_does_not_train_on_when_it_comes_back(camp: Any) -> None:
    nodes = camp(1, 1, 1, on_loss="rollback")

    stop = nodes.lose_at(5, 2, number=signal.SIGSTOP)

    def act(here: Here) -> None:
        stop(here)
        if here.name == 0 and dist.get_world_size() == 2:
            nodes.send(nodes.nodes[2], signal.SIGCONT)
            wait_until(lambda: not nodes.is_alive(nodes.nodes[2]))  # the others are still there when it comes back

    found = nodes.start(act).wait()
    assert found[2].code == 75 and "taken for lost" in found[2].error
    assert [found[name].result["world"] for name in (0, 1)] == [2, 2]


def test_of_two_nodes_the_one_without_the_first_does_not_go_on_alone(camp: Any) -> None:
    nodes = camp(1, 1, on_loss="rollback", detect_timeout="2s")
    found = nodes.start(nodes.lose_at(5, 0)).wait()
    assert found[1].code == 75 and "1 of 2 nodes are heard of" in found[1].error


@pytest.mark.soak
def test_two_nodes_of_five_may_be_lost_at_once(camp: Any) -> None:
    nodes = camp(1, 1, 1, 1, 1, on_loss="rollback", tiers=[Partner(copies=2)])
    went_on_alike(nodes.start(nodes.lose_at(5, 0, 1)).wait(90), 3)


@pytest.mark.soak
def test_a_node_lost_while_the_others_recover_is_lived_through_too(
    camp: Any, undisturbed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from everstep.live import presence

    nodes = camp(1, 1, 1, 1, spares=[1, 1], on_loss=["spare"], tiers=[Partner(copies=2)])
    meet = presence.Presence.meet

    def die(self: presence.Presence, called: presence.View) -> None:
        if called.rank == 2 and not (nodes.root / "died").exists():
            (nodes.root / "died").touch()
            nodes.send(nodes.nodes[2], signal.SIGKILL)
        meet(self, called)

    monkeypatch.setattr(presence.Presence, "meet", die)
    found = nodes.start(nodes.lose_at(5, 1)).wait(90)
    assert own(found) == undisturbed(4)


@pytest.mark.soak
def test_a_node_comes_back_to_stand_by_and_another_may_be_lost(camp: Any) -> None:
    """Loss, return, loss again."""
    nodes = camp(1, 1, 1, on_loss=["spare", "rollback"], steps=120)
    lose = nodes.lose_at(5, 1)

    def act(here: Here) -> None:
        lose(here)
        time.sleep(0.05)
        if dist.get_world_size() == 3 and (nodes.root / "back").exists() and here.run.step == 60:
            assert here.run.wait("protected", timeout=20)
            dist.barrier()
            if here.name == 2:
                nodes.send(nodes.nodes[2], signal.SIGKILL)

    nodes.start(act)
    wait_until(lambda: len(nodes.events(Called)) == 1)
    nodes.of.append(nodes.nodes[1])
    (nodes.root / "back").touch()
    nodes.add(3, act, spare=True)
    went_on_alike(nodes.wait(90), 2, 120)
    assert [event.world for event in nodes.events(Called)] == [2, 3, 2]


@pytest.mark.soak
@pytest.mark.parametrize("cut_off", [0, 2], ids=["who has the chair", "another"])
def test_a_node_whose_cable_is_pulled_ends_and_the_others_go_on(camp: Any, network: Any, cut_off: int) -> None:
    """Its processes live, and ranks still reach each other: only keepers do not."""
    from everstep.live import presence

    nodes = camp(1, 1, 1, on_loss="rollback")
    cables, convene = network(nodes), presence.convene

    def prepare(node: str) -> None:
        cables.prepare(node)
        presence.convene = lambda *words: replace(convene(*words), host="127.0.0.1")

    def act(here: Here) -> None:
        if here.tries == 5:
            assert here.run.wait("protected", timeout=20)
            dist.barrier()
            if here.name == 0:
                cables.cut(nodes.nodes[cut_off])
            dist.barrier()
        if here.tries > 5:
            time.sleep(1.0 if dist.get_world_size() == 3 else 0.0)  # training would go on all the while

    nodes.prepare = prepare
    found = nodes.start(act).wait(90)
    others = [name for name in range(3) if name != cut_off]
    assert found[cut_off].code == 75 and "1 of 3 nodes are heard of" in found[cut_off].error, found[cut_off]
    assert [found[name].result["world"] for name in others] == [2, 2]
    assert found[others[0]].result["state"] == found[others[1]].result["state"]


@pytest.mark.soak
def test_twelve_nodes_of_which_four_stand_by_live_through_four_errors_bit_for_bit_and_a_fifth_by_the_next_policy(
    camp: Any, tmp_path: Path
) -> None:
    """An error every six steps: each takes a whole node along, also who has the chair, also one that stood by."""
    errors, compared, steps = {6: 3, 12: 0, 18: 3, 24: 7, 30: 1}, 28, 36  # at a step, the node of a rank

    def recording(folder: Path) -> Any:
        def act(here: Here) -> None:
            if here.run.step == compared:
                state = digest(here.model.module.state_dict(), here.optimizer.state_dict(), torch.get_rng_state())
                (folder / f"at-{dist.get_rank()}").write_text(state)

        return act

    nodes = camp(*[1] * 8, spares=[1] * 4, on_loss=["spare", "rollback"], steps=steps, detect_timeout="8s")
    record = recording(nodes.root)

    def act(here: Here) -> None:
        record(here)
        marker = nodes.root / f"error-{here.run.step}"
        if here.run.step in errors and not marker.exists():
            assert here.run.wait("protected", timeout=60)
            dist.barrier()
            if dist.get_rank() == errors[here.run.step]:
                marker.touch()
                nodes.send(os.environ["EVERSTEP_NODE"], signal.SIGKILL)
            wait_until(marker.exists)

    went_on_alike(nodes.start(act).wait(280), 7, steps)
    called = nodes.events(Called)
    assert [(event.policy, event.world) for event in called] == [("spare", 8)] * 4 + [("rollback", 7)]
    assert called[-1].reason == "1 lost, and 0 spares"
    alone = camp(8, on_loss="restart", steps=compared + 1)
    alone.start(recording(alone.root)).wait(120)
    for rank in range(8):
        assert (nodes.root / f"at-{rank}").read_text() == (alone.root / f"at-{rank}").read_text()
