"""Several nodes whose disks are too slow for the records: what others take from the rings, and need of them."""

from __future__ import annotations

import time
from typing import Any

import pytest
from cluster import Cluster, results
from doom import die, keeper_with

import everstep
from everstep import Disk, Partner
from everstep.capture import room
from everstep.capture.steering import Steering
from everstep.events import ChainEnded, read_events
from everstep.keeper.pace import Pace

SELDOM = Disk(every=10_000)


def small_rings(node: str) -> None:
    room._MAX_SLOTS = 20  # type: ignore[attr-defined]
    Steering.steps_per_base = property(lambda self: 1000)  # type: ignore[assignment,method-assign]


def ended_chains(nodes: Cluster) -> list[str]:
    return [
        f"{event.step}: {event.reason}"
        for node in nodes.nodes
        for event in read_events(nodes.directory(node))
        if isinstance(event, ChainEnded)
    ]


def test_copies_of_the_life_before_hold_no_ring_back(cluster: Any, undisturbed: Any) -> None:
    def dying(run: everstep.Run, rank: int) -> None:
        time.sleep(0.02)
        if run.step == 10 and rank == 0:
            die()

    nodes = cluster(1, 1, tiers=[Partner(), SELDOM], strategy="log")
    nodes.live(dying, prepare=small_rings, steps=40)
    assert all(nodes.keeper(node) for node in nodes.nodes)
    ended = results(nodes.live(lambda run, rank: time.sleep(0.02), prepare=small_rings, steps=40))
    assert {one["resumed_from"] for one in ended} == {10}
    assert {one["state"] for one in ended} == {undisturbed(1, 1, steps=40)}
    assert ended_chains(nodes) == []


def too_slow() -> None:
    Pace.is_outpaced = lambda *_: True  # type: ignore[assignment]


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_node_costs_nothing_that_was_protected_though_disks_are_too_slow(
    lost: int, cluster: Any, undisturbed: Any
) -> None:
    """With several nodes a disk passes nothing over, however slow it is: others may need what is in its rings."""

    def prepare(node: str) -> None:
        small_rings(node)
        room.LARGE_BYTES = 0  # type: ignore[attr-defined]
        keeper_with(too_slow, *nodes.nodes)(node)

    def dying(run: everstep.Run, rank: int) -> None:
        time.sleep(0.02)
        if run.step == 40:
            assert run.wait("protected", timeout=20)
            die()

    nodes = cluster(1, 1, tiers=[Partner(), SELDOM], strategy="log")
    assert all(one.killed for one in nodes.live(dying, prepare=prepare, steps=50))
    nodes.lose(nodes.nodes[lost])
    ended = results(nodes.live(steps=50))
    assert {one["resumed_from"] for one in ended} == {40}
    assert {one["state"] for one in ended} == {undisturbed(1, 1, steps=50)}
