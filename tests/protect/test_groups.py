"""Who protects whom: never two of a failure domain together, nobody forgotten, and the same answer everywhere."""

from __future__ import annotations

import random
from collections import Counter
from itertools import combinations, product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from everstep.errors import BadConfig
from everstep.protect.groups import NodePlace, parity_groups, partners


def cluster(*domain_sizes: int) -> list[NodePlace]:
    """Nodes n00, n01, ... in racks of these sizes."""
    racks = [rack for rack, size in enumerate(domain_sizes) for _ in range(size)]
    return [NodePlace(node=f"n{number:02}", domain=f"rack{rack}") for number, rack in enumerate(racks)]


clusters = st.lists(st.integers(1, 6), max_size=12).map(lambda sizes: cluster(*sizes))
losses = st.integers(1, 3)


# -- parity groups


@given(places=clusters, size=st.integers(1, 9), losses=losses, seed=st.integers(0, 9))
@example(places=cluster(8, *[1] * 7), size=8, losses=1, seed=0)
def test_every_node_is_in_one_group_or_reported_and_no_group_has_two_of_a_domain(
    places: list[NodePlace], size: int, losses: int, seed: int
) -> None:
    found = parity_groups(places, size=size, losses=losses)
    members = [node for group in found.groups for node in group]
    assert sorted([*members, *found.unprotected]) == sorted(place.node for place in places)
    domain = {place.node: place.domain for place in places}
    sizes = [len(group) for group in found.groups]
    for group in found.groups:
        assert len({domain[node] for node in group}) == len(group) > losses
    assert max(sizes, default=0) - min(sizes, default=0) <= 1
    said = " ".join(found.warnings)
    assert all(node in said for node in found.unprotected[:8])
    assert bool(found.warnings) == bool(found.unprotected or set(sizes) - {size})
    shuffled = random.Random(seed).sample(places, len(places))
    assert parity_groups(shuffled, size=size, losses=losses) == found


@given(nodes=st.integers(1, 100), size=st.integers(1, 12), losses=losses)
def test_without_shared_domains_all_are_protected_in_groups_of_at_most_the_size(
    nodes: int, size: int, losses: int
) -> None:
    found = parity_groups([NodePlace(node=f"n{number}") for number in range(nodes)], size=size, losses=losses)
    if nodes <= losses:
        assert not found.groups
        return
    assert not found.unprotected
    number = len(found.groups)
    if -(-nodes // size) * (losses + 1) <= nodes:
        assert number == -(-nodes // size)
    else:  # groups of that size would be too small to survive
        assert max(map(len, found.groups)) <= 2 * max(size, losses + 1)


@given(places=clusters, size=st.integers(2, 9), losses=losses)
@settings(max_examples=50)
def test_no_number_of_groups_would_protect_more(places: list[NodePlace], size: int, losses: int) -> None:
    """Against the bound that any division obeys: a group holds one of a domain, and more than `losses` in all."""
    found = parity_groups(places, size=size, losses=losses)
    sizes = Counter(place.domain for place in places).values()
    bound = 0
    for number in range(1, len(places) + 1):
        placed = sum(min(nodes, number) for nodes in sizes)
        if placed >= number * (losses + 1):
            bound = max(bound, placed)
    assert sum(map(len, found.groups)) == bound


@pytest.mark.parametrize(
    ("places", "size", "losses", "groups", "sentence"),
    [
        ([], 8, 1, 0, None),
        (cluster(1), 8, 1, 0, "n00 is the only node: it is not protected"),
        (cluster(1, 1), 8, 2, 0, "2 nodes in 2 failure domains cannot make up for 2 lost, which takes 3"),
        (cluster(3), 8, 1, 0, "3 nodes in 1 failure domain cannot make up for 1 lost, which takes 2"),
        (cluster(1, 1, 1), 8, 1, 1, "3 nodes cannot make groups of 8: one group of 3"),
        (cluster(*[1] * 9), 8, 1, 2, "9 nodes cannot make groups of 8: one group of 5 and one group of 4"),
        (cluster(*[1] * 16), 8, 1, 2, None),
        (cluster(2, 1), 2, 1, 1, "nodes n00 and n01 share the domain rack0 and no other group is free; n01 is not"),
        (cluster(1, 1, 1, 1), 3, 2, 1, "4 nodes cannot make groups of 3: one group of 4"),
        (cluster(4, 4, 4), 8, 1, 4, "12 nodes cannot make groups of 8: 4 groups of 3"),
    ],
)
def test_what_a_cluster_cannot_give_is_said_in_a_sentence(
    places: list[NodePlace], size: int, losses: int, groups: int, sentence: str | None
) -> None:
    found = parity_groups(places, size=size, losses=losses)
    assert len(found.groups) == groups
    assert any(sentence in one for one in found.warnings) if sentence else not found.warnings


def test_a_node_is_its_own_domain_unless_told_and_never_in_two() -> None:
    assert NodePlace(node="n1").domain == "n1"
    twice = [NodePlace(node="n1", domain="a"), NodePlace(node="n1", domain="b")]
    with pytest.raises(BadConfig, match="n1 cannot be in two domains, a and b"):
        parity_groups(twice, size=2, losses=1)
    assert not parity_groups([NodePlace(node="n1"), NodePlace(node="n1")], size=2, losses=1).groups


# -- partners


def held(of: dict[str, tuple[str, ...]]) -> Counter[str]:
    return Counter(holder for holders in of.values() for holder in holders)


@given(places=clusters, copies=st.integers(1, 4), seed=st.integers(0, 9))
def test_copies_are_in_other_domains_and_whoever_has_too_few_is_named(
    places: list[NodePlace], copies: int, seed: int
) -> None:
    found = partners(places, copies=copies)
    domain = {place.node: place.domain for place in places}
    said = " ".join(found.warnings)
    assert list(found.of) == sorted(domain)
    for node, holders in found.of.items():
        others = sum(other != domain[node] for other in domain.values())
        assert domain[node] not in {domain[holder] for holder in holders}
        assert len(set(holders)) == len(holders) == min(copies, others)
        assert len(holders) == copies or f"{len(holders)} of {copies} copies" in said
    assert partners(random.Random(seed).sample(places, len(places)), copies=copies) == found


@given(places=clusters.filter(bool), copies=st.integers(1, 4))
def test_every_node_holds_as_many_copies_as_every_other_where_no_domain_is_too_large(
    places: list[NodePlace], copies: int
) -> None:
    found = partners(places, copies=copies)
    largest = max(Counter(place.domain for place in places).values())
    if copies <= len(places) - 2 * largest + 1:
        assert set(held(found.of).values()) == {copies}
        assert not any("uneven" in one for one in found.warnings)


def fair_is_possible(places: list[NodePlace], copies: int) -> bool:
    """By trying everything."""
    options = [
        [one for one in combinations(places, copies) if all(holder.domain != place.domain for holder in one)]
        for place in places
    ]
    for choice in product(*options):
        load = Counter(holder.node for holders in choice for holder in holders)
        if all(load[place.node] == copies for place in places):
            return True
    return False


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize(
    "sizes", [(1, 1), (2, 1), (2, 2), (1, 1, 1), (2, 1, 1), (3, 1), (2, 2, 1), (3, 2), (1, 1, 1, 1)]
)
def test_it_is_fair_wherever_any_choice_is(sizes: tuple[int, ...], copies: int) -> None:
    places = cluster(*sizes)
    load = held(partners(places, copies=copies).of)
    assert ({load[place.node] for place in places} == {copies}) == fair_is_possible(places, copies)


@pytest.mark.parametrize(
    ("sizes", "copies"), [((4, 4, 4), 2), ((2, 2, 2, 2), 3), ((1,) * 7, 3), ((3, 3, 3, 3), 2), ((2, 1, 1, 1, 1), 2)]
)
def test_copies_of_a_node_are_in_different_domains_where_there_are_enough(sizes: tuple[int, ...], copies: int) -> None:
    places = cluster(*sizes)
    found = partners(places, copies=copies)
    domain = {place.node: place.domain for place in places}
    assert not found.warnings
    for holders in found.of.values():
        assert len({domain[holder] for holder in holders}) == copies


@pytest.mark.parametrize(
    ("places", "copies", "sentence"),
    [
        (cluster(1), 1, "n00 has 0 of 1 copies: no other domain has a node left"),
        (cluster(1, 1), 2, "n00 and n01 have 1 of 2 copies: no other domain has a node left"),
        (cluster(2, 2), 2, "copies of n00, n01, n02 and n03 share a failure domain: there are too few"),
        (cluster(4, 2), 1, "the domains are uneven: nodes hold from 0 to 2 copies of others"),
        (cluster(*[1] * 8), 3, None),
        ([], 2, None),
    ],
)
def test_what_partners_cannot_give_is_said_in_a_sentence(
    places: list[NodePlace], copies: int, sentence: str | None
) -> None:
    warnings = partners(places, copies=copies).warnings
    assert sentence in warnings if sentence else not warnings
