"""Every scheme, every pattern of lost nodes: what the scheme covers is exact, and all else is refused by all alike."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
from cluster import STEPS, Cluster, die_at, results
from situation import flip, guests, refusal, step_files

from everstep import Parity, Partner
from everstep.events import Rejected, read_events
from everstep.protect.groups import NodePlace, partners

AT = 5
SCHEMES: dict[str, list[Any]] = {
    "single": [],
    "partner": [Partner()],
    "two partners": [Partner(copies=2)],
    "xor": [Parity("xor")],
    "rs": [Parity("rs", losses=2)],
}


def after(situation: Any, scheme: str, ranks: tuple[int, ...]) -> Cluster:
    """All trainers died when the fifth step was as safe as the scheme makes it."""
    level = "protected" if SCHEMES[scheme] else "durable"
    return situation(ranks, scheme, die_at(AT, level=level), tiers=SCHEMES[scheme])


def is_covered(scheme: str, nodes: list[str], lost: set[str], spoilt: set[str]) -> bool:
    """Whether step AT can be had. `spoilt`: nodes whose copies for others, or parity, are damaged."""
    tier = (SCHEMES[scheme] or [None])[0]
    if not lost:
        return True
    if isinstance(tier, Partner):
        holders = partners([NodePlace(node=node) for node in nodes], copies=tier.copies).of
        return all(set(holders[node]) - lost - spoilt for node in lost)
    return tier is not None and len(lost | spoilt) <= tier.covers


def check(cluster: Cluster, scheme: str, lost: set[str], spoilt: set[str], wanted: str) -> None:
    """One start after a loss: exact, or refused by all with one voice, or exact from an earlier step."""
    for node in spoilt:
        flip(step_files(guests(cluster, node), AT, "s") + step_files(guests(cluster, node), AT, ".parity"))
    cluster.lose(*lost)
    ended = cluster.live()
    if is_covered(scheme, cluster.nodes, lost, spoilt):
        found = results(ended)
        assert {one["resumed_from"] for one in found} == {AT}
    elif len(lost) == len(cluster.nodes):
        found = results(ended)
        assert {one["resumed_from"] for one in found} == {None}, "nothing was left, not even a name"
    elif ended[0].result is not None:
        found = results(ended)
        assert {one["resumed_from"] < AT for one in found} == {True}
    else:
        said = refusal(ended)
        assert said.startswith("Damaged: this run has checkpoints, but none can be restored")
        assert f"step {AT} (any): no readable part of rank" in said
        return
    assert {(one["state"], one["step"]) for one in found} == {(wanted, STEPS)}


FEW = [
    ("single", (1, 1), (0,)),
    ("partner", (1, 1, 1, 1), (1, 3)),
    pytest.param("partner", (1, 1, 1, 1), (1, 2), marks=pytest.mark.soak),
    pytest.param("two partners", (1, 1, 1, 1), (1, 2), marks=pytest.mark.soak),
    ("xor", (2, 1, 1), (0,)),
    ("xor", (2, 1, 1), (0, 1)),
    ("rs", (2, 1, 1, 1), (0, 3)),
]


@pytest.mark.parametrize(("scheme", "ranks", "lost"), FEW)
def test_a_loss_that_the_scheme_covers_is_exact_and_any_other_is_refused_by_all_alike(
    scheme: str, ranks: tuple[int, ...], lost: tuple[int, ...], situation: Any, undisturbed: Any
) -> None:
    cluster = after(situation, scheme, ranks)
    check(cluster, scheme, {cluster.nodes[one] for one in lost}, set(), undisturbed(*ranks))


@pytest.mark.parametrize(("scheme", "ranks"), [("two partners", (1, 1, 1, 1)), ("rs", (2, 1, 1, 1))])
def test_a_damaged_copy_or_parity_is_made_up_for_by_another(
    scheme: str, ranks: tuple[int, ...], situation: Any, undisturbed: Any
) -> None:
    cluster = after(situation, scheme, ranks)
    lost, spoilt = cluster.nodes[1], cluster.nodes[2]
    check(cluster, scheme, {lost}, {spoilt}, undisturbed(*ranks))
    told = [e.reason for e in read_events(cluster.directory(cluster.nodes[0])) if isinstance(e, Rejected)]
    assert any("checksum" in reason and spoilt in reason for reason in told), told


def test_without_protection_or_a_disk_a_lost_node_means_to_begin_anew_and_the_reason_is_told(
    cluster: Any, undisturbed: Any
) -> None:
    nodes = cluster(1, 1)
    nodes.live(die_at(2))
    for node in nodes.nodes:
        nodes.kill_keeper(node)
        for path in nodes.directory(node).glob("step-*.json"):
            path.unlink()  # nothing had reached a disk
    nodes.reboot(nodes.nodes[1])
    assert [one["resumed_from"] for one in results(nodes.live())] == [None, None]
    told = [e.reason for e in read_events(nodes.directory(nodes.nodes[0])) if isinstance(e, Rejected)]
    assert any("no readable part of rank 1" in reason for reason in told)


MATRIX = [(1, 1, 1, 1), (2, 1, 1, 1), (1, 1, 1, 1, 1), (1, 2, 1, 1, 1, 1)]


@pytest.mark.soak
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("ranks", MATRIX, ids=lambda ranks: "-".join(map(str, ranks)))
@pytest.mark.parametrize("spoils", [False, True], ids=["sound", "spoilt"])
@pytest.mark.parametrize("count", range(7))
def test_every_pattern_of_lost_nodes(
    scheme: str, ranks: tuple[int, ...], spoils: bool, count: int, situation: Any, undisturbed: Any
) -> None:
    nodes = range(len(ranks))
    if count > len(ranks) or (spoils and (count in (0, len(ranks)) or scheme == "single")):
        pytest.skip("there are not so many nodes, or nothing that could be spoilt")
    for lost in combinations(nodes, count):
        survivors = [node for node in nodes if node not in lost]
        for spoilt in [(survivors[0],), (survivors[-1],)] if spoils else [()]:
            cluster = after(situation, scheme, ranks)
            names = cluster.nodes
            check(cluster, scheme, {names[n] for n in lost}, {names[n] for n in spoilt}, undisturbed(*ranks))
