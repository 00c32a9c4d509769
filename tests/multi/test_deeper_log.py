"""Records on the tiers that outlive all nodes: what came after the newest base there is not lost with them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from cluster import STEPS, die_at, results

from everstep import Shared
from everstep.store.disk import DiskTier
from everstep.store.log import segments
from everstep.store.manifest import committed_steps


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
