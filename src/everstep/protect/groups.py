"""Who protects whom: parity groups and partners, chosen from nodes and their failure domains alone.

The same set of nodes gives the same answer in whatever order they come, so that every node can compute it for itself.
Clusters that are small or uneven get what is possible, and a sentence for everything that is not.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from everstep.errors import BadConfig
from everstep.types import Noun

_NAMES_SHOWN = 8


class NodePlace(Noun, frozen=True, kw_only=True):
    """A node, and what it shares with others that fail at the same time: a rack, a switch; by default nothing."""

    node: str
    domain: str = ""

    def __post_init__(self) -> None:
        if not self.domain:
            msgspec.structs.force_setattr(self, "domain", self.node)


class Division(Noun, frozen=True, kw_only=True):
    """Nodes in parity groups: every node is in one group, or unprotected."""

    groups: tuple[tuple[str, ...], ...]
    unprotected: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


class Partners(Noun, frozen=True, kw_only=True):
    """Who holds copies of each node's data."""

    of: dict[str, tuple[str, ...]]
    warnings: tuple[str, ...] = ()


def parity_groups(places: Iterable[NodePlace], *, size: int, losses: int) -> Division:
    """Groups of about `size` members that each survive `losses` of them, no two of one domain in a group.

    As many nodes as possible are protected; of the ways to do that, one with groups as near to `size` as can be is
    taken. They are larger only where fewer members would not survive the losses.
    """
    domains = _domains(places)
    count = sum(map(len, domains.values()))
    largest = max(map(len, domains.values()), default=0)
    sizes = Counter(map(len, domains.values()))

    def placed(groups: int) -> int:
        return sum(min(nodes, groups) * times for nodes, times in sizes.items())

    # Dealt one after the other, the nodes of a domain come into as many groups as there are of them, so any number of
    # groups will do that leaves enough members for each. More groups than wanted are made only to keep a domain apart.
    wanted = -(-count // max(size, losses + 1))
    possible = [number for number in range(1, max(wanted, largest) + 1) if placed(number) >= number * (losses + 1)]
    if not possible:
        everybody = tuple(sorted(node for nodes in domains.values() for node in nodes))
        return Division(groups=(), unprotected=everybody, warnings=_too_few(everybody, len(domains), losses))
    number = max(possible)
    dealt = [node for nodes in domains.values() for node in nodes[:number]]
    groups = tuple(sorted(tuple(sorted(dealt[first::number])) for first in range(number)))
    return Division(
        groups=groups,
        unprotected=tuple(sorted(node for nodes in domains.values() for node in nodes[number:])),
        warnings=(*_other_sizes(groups, count, size), *_crowded(domains, number)),
    )


def partners(places: Iterable[NodePlace], *, copies: int) -> Partners:
    """`copies` other nodes for every node, in other domains than its own.

    Every node holds as many copies as every other, where the domains leave room for it. Beyond that, copies of one in
    different domains are preferred; where some are not, a warning says so.
    """
    domains = _domains(places)
    ring = _Ring(domains)
    for _ in range(copies):
        ring.one_more()
    of = {
        node: tuple(ring.nodes[holder] for holder in held) for node, held in zip(ring.nodes, ring.holders, strict=True)
    }
    domain = dict(zip(ring.nodes, ring.domain, strict=True))
    return Partners(of=dict(sorted(of.items())), warnings=tuple(_shortcomings(of, domain, copies)))


def _domains(places: Iterable[NodePlace]) -> dict[str, list[str]]:
    """Sorted nodes by domain, the largest domain first."""
    found: dict[str, str] = {}
    for place in places:
        if found.setdefault(place.node, place.domain) != place.domain:
            raise BadConfig(f"node {place.node} cannot be in two domains, {found[place.node]} and {place.domain}")
    domains: dict[str, list[str]] = {}
    for node, domain in sorted(found.items()):
        domains.setdefault(domain, []).append(node)
    return dict(sorted(domains.items(), key=lambda item: (-len(item[1]), item[0])))


# -- partners


class _Ring:
    """All nodes in a circle, those of a domain side by side, and who holds copies of each so far.

    The node as many places on as the largest domain has nodes is in another domain, and if everybody takes that one
    everybody holds one. Only where a domain has about half of all nodes must some move on to make room for others.
    """

    def __init__(self, domains: dict[str, list[str]]) -> None:
        self.nodes = [node for nodes in domains.values() for node in nodes]
        self.domain = [domain for domain, nodes in domains.items() for _ in nodes]
        self.largest = max(map(len, domains.values()), default=0)
        self.holders: list[list[int]] = [[] for _ in self.nodes]

    def one_more(self) -> None:
        """Give every node another holder, so that every node holds one more copy if that can be."""
        chosen: dict[int, int] = {}
        taken: dict[int, int] = {}
        load = Counter(holder for held in self.holders for holder in held)
        # With more than half of the nodes in a domain it cannot be: no need to try every way.
        fair = 2 * self.largest <= len(self.nodes)
        fresh = True  # until one finds nobody: a search that fails looks at everybody
        for node in range(len(self.nodes)):
            fresh = fresh and fair and self._match(node, chosen, taken, fresh=True)
            if fresh or (fair and self._match(node, chosen, taken, fresh=False)):
                continue
            by_load = sorted(self._candidates(node), key=lambda holder: load[holder] + (holder in taken))
            for holder in by_load[:1]:
                chosen[node] = holder
                load[holder] += 1
        for node, holder in chosen.items():
            self.holders[node].append(holder)

    def _match(self, node: int, chosen: dict[int, int], taken: dict[int, int], fresh: bool) -> bool:
        """Choose a holder that nobody has taken, even if others must change theirs for it."""
        asked_by: dict[int, int] = {}
        queue = deque([node])
        while queue:
            asking = queue.popleft()
            for holder in self._candidates(asking, fresh):
                if holder in asked_by:
                    continue
                asked_by[holder] = asking
                if holder in taken:
                    queue.append(taken[holder])
                    continue
                left: int | None = holder
                while left is not None:
                    mover = asked_by[left]
                    taken[left] = mover
                    chosen[mover], left = left, chosen.get(mover)
                return True
        return False

    def _candidates(self, node: int, fresh: bool = False) -> Iterator[int]:
        """Who may hold another copy of a node; first, or with `fresh` only, those whose domains hold none of it."""
        used = {self.domain[holder] for holder in self.holders[node]}

        def around() -> Iterator[int]:
            others = ((node + self.largest + step) % len(self.nodes) for step in range(len(self.nodes)))
            return (one for one in others if self.domain[one] != self.domain[node] and one not in self.holders[node])

        yield from (one for one in around() if self.domain[one] not in used)
        if not fresh:
            yield from (one for one in around() if self.domain[one] in used)


# -- sentences


def _names(nodes: Sequence[str]) -> str:
    shown = list(nodes[:_NAMES_SHOWN])
    if len(nodes) > len(shown):
        shown.append(f"{len(nodes) - len(shown)} more")
    return " and ".join(", ".join(part) for part in (shown[:-1], shown[-1:]) if part)


def _are(nodes: Sequence[str]) -> str:
    return f"{_names(nodes)} {'is' if len(nodes) == 1 else 'are'}"


def _too_few(nodes: Sequence[str], domains: int, losses: int) -> tuple[str, ...]:
    if not nodes:
        return ()
    if len(nodes) == 1:
        return (f"{nodes[0]} is the only node: it is not protected",)
    have = f"{len(nodes)} nodes in {domains} failure domain{'s' * (domains > 1)}"
    return (f"{have} cannot make up for {losses} lost, which takes {losses + 1}: {_are(nodes)} not protected",)


def _other_sizes(groups: Sequence[Sequence[str]], count: int, size: int) -> tuple[str, ...]:
    sizes = Counter(map(len, groups))
    if set(sizes) == {size}:
        return ()
    parts = [
        f"{'one group' if number == 1 else f'{number} groups'} of {members}"
        for members, number in sorted(sizes.items(), reverse=True)
    ]
    return (f"{count} nodes cannot make groups of {size}: {' and '.join(parts)}",)


def _crowded(domains: dict[str, list[str]], number: int) -> Iterator[str]:
    for domain, nodes in domains.items():
        if len(nodes) > number:
            yield (
                f"nodes {_names(nodes)} share the domain {domain} and no other group is free; "
                f"{_are(nodes[number:])} not protected"
            )


def _shortcomings(of: dict[str, tuple[str, ...]], domain: dict[str, str], copies: int) -> Iterator[str]:
    for have in range(copies):
        short = sorted(node for node, held in of.items() if len(held) == have)
        if short:
            verb = "has" if len(short) == 1 else "have"
            yield f"{_names(short)} {verb} {have} of {copies} copies: no other domain has a node left"
    together = sorted(node for node, held in of.items() if len({domain[holder] for holder in held}) < len(held))
    if together:
        yield f"copies of {_names(together)} share a failure domain: there are too few"
    load = Counter(holder for held in of.values() for holder in held)
    held_least, held_most = min((load[node] for node in of), default=0), max(load.values(), default=0)
    if held_least < held_most:
        yield f"the domains are uneven: nodes hold from {held_least} to {held_most} copies of others"
