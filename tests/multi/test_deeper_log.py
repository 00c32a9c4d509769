"""Records on the tiers that outlive all nodes: what came after the newest base there is not lost with them."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from cluster import STEPS, die_at, results
from doom import dies_before, keeper_with

from everstep import Partner, Shared
from everstep.capture.compress import TopK
from everstep.keeper import sinking
from everstep.store.disk import DiskTier
from everstep.store.log import log_name, ranks_of, scan, segments, starts, strangers
from everstep.store.manifest import committed_steps, run_name, values_steps


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


@pytest.mark.parametrize("ranks", [(1, 1), (2, 1)], ids=str)
def test_after_a_reboot_of_all_nodes_records_with_gaps_are_carried_to_those_that_lack_them(
    ranks: tuple[int, ...], cluster: Any, undisturbed: Any
) -> None:
    """Every rank needs all parts of a compressed gradient, and each node's disk has its own."""
    options = {"strategy": "log", "compress": TopK(0.4)}
    nodes = cluster(*ranks, **options)
    nodes.live(die_at(6, level="durable"))
    nodes.reboot(*nodes.nodes)
    for node in nodes.nodes:
        tier = DiskTier(nodes.directory(node))
        logs = [scan(tier, start, rank, run_name(tier)) for rank in ranks_of(tier) for start in starts(tier, rank)]
        assert any(record.frame.step == 6 and record.frame.gaps for log in logs for record in log.records)
    ended = results(nodes.live())
    assert [one["resumed_from"] for one in ended] == [6] * sum(ranks)
    assert {one["state"] for one in ended} == {undisturbed(*ranks, **options)}


@pytest.mark.soak
def test_partners_take_records_with_gaps_as_they_lie_and_a_lost_node_comes_back_by_them(
    cluster: Any, undisturbed: Any
) -> None:
    """Nobody waited until residuals were with partners, so which step it is depends on who was faster."""
    options = {"strategy": "log", "compress": TopK(0.4), "tiers": [Partner()]}
    nodes = cluster(1, 1, **options)
    nodes.live(die_at(6, level="durable"))
    deadline, held, bases = time.monotonic() + 20, list[tuple[int, bool]](), set[str]()
    while {rank for rank, _ in held} != {0, 1} or len(bases) < 2:
        assert time.monotonic() < deadline, "partners have no records, or no bases"
        guests = [guest for node in nodes.nodes for guest in nodes.memory(node).glob("*/guests/*/*")]
        bases = {guest.name for guest in guests if guest.parent.name.startswith("step-") and guest.suffix == ".json"}
        held = [frame for guest in guests if guest.suffix == ".log" for frame in frames_in(guest)]
    assert all(has_gaps for _, has_gaps in held)
    nodes.lose(nodes.nodes[1])
    ended = results(nodes.live())
    assert len({one["resumed_from"] for one in ended}) == 1 and ended[0]["resumed_from"] is not None
    assert {one["state"] for one in ended} == {undisturbed(1, 1, strategy="log", compress=TopK(0.4))}


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [(1, 1), (2,), (2, 1)], ids=str)
def test_when_all_nodes_are_lost_residuals_on_the_shared_tier_lead_beyond_its_newest_base(
    ranks: tuple[int, ...], cluster: Any, undisturbed: Any
) -> None:
    options = {"strategy": "log", "compress": TopK(0.4)}
    nodes = cluster(*ranks, **options)
    shared = DiskTier(nodes.root / "lustre")
    nodes.options["tiers"] = [Shared(str(shared.root), every="1h")]
    nodes.live(die_at(6, level="shared"))
    nodes.lose(*nodes.nodes)
    assert committed_steps(shared)[-1] < 6 == values_steps(shared)[-1]
    ended = results(nodes.live())
    assert [one["resumed_from"] for one in ended] == [6] * sum(ranks)
    assert {one["state"] for one in ended} == {undisturbed(*ranks, **options)}


@pytest.mark.soak
@pytest.mark.parametrize("after", [2, 3], ids=["residuals", "their manifest"])  # after those on its own disk
def test_a_keeper_killed_while_residuals_go_to_the_shared_tier_is_replaced_and_they_get_there(
    after: int, cluster: Any, undisturbed: Any, tmp_path: Path
) -> None:
    options, marker = {"strategy": "log", "compress": TopK(0.4)}, tmp_path / "died"
    nodes = cluster(1, 1, **options)
    shared = DiskTier(nodes.root / "lustre")
    nodes.options["tiers"] = [Shared(str(shared.root), every="1h")]
    prepare = keeper_with(dies_before("rename values-", marker, after=after), nodes.nodes[1])
    nodes.live(die_at(6, level="shared"), prepare=prepare)
    assert marker.exists()
    nodes.lose(*nodes.nodes)
    ended = results(nodes.live())
    assert [one["resumed_from"] for one in ended] == [6, 6]
    assert {one["state"] for one in ended} == {undisturbed(1, 1, **options)}


def frames_in(path: Path) -> list[tuple[int, bool]]:
    """Whose record each frame of a copy is, and whether it has gaps."""
    tier = DiskTier(path.parents[1])
    log = scan(tier, int(path.parent.name.removeprefix("log-")), int(path.stem[5:]), path.parents[2].name)
    return [(record.frame.rank, bool(record.frame.gaps)) for record in log.records]


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
