"""Records on the tiers that outlive all nodes: what came after the newest base there is not lost with them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from cluster import STEPS, die_at, results
from doom import keeper_with

from everstep import Shared
from everstep.keeper import sinking
from everstep.store.disk import DiskTier
from everstep.store.log import log_name, scan, segments, starts, strangers
from everstep.store.manifest import committed_steps, run_name


@pytest.mark.parametrize("ranks", [(1, 1), (2,), (2, 1)], ids=str)
def test_when_all_nodes_are_lost_the_shared_tier_leads_beyond_its_newest_base(
    ranks: tuple[int, ...], cluster: Any, undisturbed: Any
) -> None:
    nodes = cluster(*ranks, strategy="log")
    shared = DiskTier(nodes.root / "lustre")
    nodes.options["tiers"] = [Shared(str(shared.root), every="1h")]
    nodes.live(die_at(6, level="shared"))
    nodes.lose(*nodes.nodes)
    assert committed_steps(shared)[-1] < 6 and segments(shared)
    ended = results(nodes.live())
    assert [one["resumed_from"] for one in ended] == [6] * sum(ranks)
    assert {one["state"] for one in ended} == {undisturbed(*ranks)}
    assert committed_steps(shared)[-1] == STEPS, "a job that ends leaves its newest step on the deepest tier"


def test_when_all_trainers_are_gone_keepers_bring_every_record_to_the_shared_tier(
    cluster: Any, undisturbed: Any
) -> None:
    nodes = cluster(1, 1, strategy="log", linger="1s")
    shared = DiskTier(nodes.root / "lustre")
    nodes.options["tiers"] = [Shared(str(shared.root), every="1h")]

    def slowly() -> None:
        sinking._TICK_S = 3.0  # longer than they linger

    nodes.live(die_at(6), prepare=keeper_with(slowly, *nodes.nodes))
    nodes.wait_for_keepers()
    nodes.lose(*nodes.nodes)
    assert committed_steps(shared)[-1] < 6
    ended = results(nodes.live())
    assert [one["resumed_from"] for one in ended] == [6, 6]
    assert {one["state"] for one in ended} == {undisturbed(1, 1)}


def test_a_life_that_went_on_from_an_earlier_step_leaves_no_record_of_the_one_before(
    cluster: Any, undisturbed: Any
) -> None:
    """The record of step 5 is damaged, so the next life goes on from step 4; then it is lost as well."""
    nodes = cluster(1, 1, strategy="log")
    shared = DiskTier(nodes.root / "lustre")
    nodes.options["tiers"] = [Shared(str(shared.root), every="1h")]
    nodes.live(die_at(6, level="shared"))
    nodes.lose(*nodes.nodes)
    first = strangers(shared, 4, run_name(shared), "")
    assert first == {0, 1}
    for rank in first:
        flip_record(shared, rank, 5)
    ended = nodes.live(die_at(7, level="shared"))
    assert all(one.killed for one in ended)
    nodes.lose(*nodes.nodes)
    ended = results(nodes.live())
    assert [one["resumed_from"] for one in ended] == [7, 7]
    assert {one["state"] for one in ended} == {undisturbed(1, 1)}


def flip_record(tier: DiskTier, rank: int, step: int) -> None:
    """One bit in what a step left."""
    for start in starts(tier, rank):
        for one in scan(tier, start, rank, run_name(tier)).records:
            if one.frame.step == step:
                with (tier.root / log_name(start, rank)).open("r+b") as file:
                    file.seek(one.offset)
                    byte = file.read(1)[0]
                    file.seek(one.offset)
                    file.write(bytes([byte ^ 16]))
