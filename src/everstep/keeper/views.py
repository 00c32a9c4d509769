"""Who goes on after a loss, and as what: decided once everybody who is left stands still.

A view is the list of those who train together, each under a rank, with a number that only grows. A loss ends a view.
Whoever is left of it comes to a stop and says so, and spares stand by all the time. The next view is a function of who
stands there and of the policies that were chosen, in their order:

    spare      the places of the lost are taken by those who stood by; ranks stay as they were
    forward    those who are left go on alone, under ranks without gaps, and finish the step by themselves
    rollback   the same, and they go back to the newest step that all can have
    restart    nobody goes on here: all end, and whoever started them starts them again

Where several ranks have the state together, these are a unit: without one of them the others of it have no work. They
stand by, and their places are free for as many as make a unit again.

On several nodes a view may only be followed by what more than half of its nodes agree to, so that of two parts of a cut
network never both go on.

Pure: touches no clock, process or socket.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from everstep.config import Policy
from everstep.types import Noun

SPARE = -1  # the rank of one who has none


class Standing(Noun, frozen=True, kw_only=True):
    """Somebody who waits for the next view."""

    worker: str  # a name that no other process has
    rank: int  # in the view that has ended, or SPARE
    address: str  # where the others would meet, if it were the first of the next view
    node: str = ""


class Decision(Noun, frozen=True, kw_only=True):
    """`workers`: who has each rank, and `nodes`: where; nobody if it is over here."""

    policy: Policy
    workers: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    address: str = ""
    lost: tuple[int, ...]
    idle: tuple[str, ...] = ()  # workers that are left, and stand by from now on
    reason: str = ""  # why it is not what was wished for first


def decide(
    world: int, left: Sequence[Standing], spares: Sequence[Standing], policies: Sequence[Policy],
    places: Mapping[int, str] | None = None, unit: int = 1,
) -> Decision:  # fmt: skip
    """`left`: all who are left of a view of `world` ranks. `places`: the nodes that its ranks were on.

    `unit`: how many ranks, one after the other, have the state together.
    """
    by_rank = {one.rank: one for one in left}
    lost = tuple(rank for rank in range(world) if rank not in by_rank)
    reasons: list[str] = []
    for policy in policies:
        going = dict(by_rank)
        if policy == "spare":
            if len(spares) < len(lost):
                reasons.append(f"{len(lost)} lost, and {len(spares)} spares")
                continue
            going |= _seat(lost, spares, places or {})
        if policy == "restart" or not by_rank:
            break
        ranks = [going[rank] for rank in sorted(going) if _is_whole(rank, going, unit)]
        if not ranks:
            reasons.append(f"none of the replicas, of {unit} ranks each, is whole")
            continue
        return Decision(
            policy=policy, workers=tuple(one.worker for one in ranks), nodes=tuple(one.node for one in ranks),
            address=_meeting_place(ranks, by_rank.values()), lost=lost, reason="; ".join(reasons),
            idle=tuple(one.worker for one in left if one not in ranks),
        )  # fmt: skip
    return Decision(policy="restart", lost=lost, reason="; ".join(reasons))


def _is_whole(rank: int, going: Collection[int], unit: int) -> bool:
    """Whether all of a rank's unit are there."""
    first = rank - rank % unit
    return all(other in going for other in range(first, first + unit))


def _seat(lost: Sequence[int], spares: Sequence[Standing], places: Mapping[int, str]) -> dict[int, Standing]:
    """Whoever stood by on the node of the lost comes first; then those of one node together take the places of one."""
    free: dict[str, list[Standing]] = defaultdict(list)
    for spare in spares:
        free[spare.node].append(spare)
    seated, homeless = dict[int, Standing](), defaultdict[str, list[int]](list)
    for rank in lost:
        node = places.get(rank, "")
        if free.get(node):
            seated[rank] = free[node].pop(0)
        else:
            homeless[node].append(rank)
    for ranks in sorted(homeless.values(), key=len, reverse=True):
        while ranks:
            count = len(ranks)
            fitting = [node for node in free if len(free[node]) >= count]
            node = min(fitting, key=lambda one: len(free[one])) if fitting else max(free, key=lambda n: len(free[n]))
            for spare in free[node][:count]:
                seated[ranks.pop(0)] = spare
            free[node] = free[node][count:]
    return seated


def _meeting_place(going: Sequence[Standing], left: Collection[Standing]) -> str:
    """With the first of those who have been there before: a spare that is lost while it joins takes nothing along."""
    return next(one.address for one in going if one in left)


def is_quorum(seats: Sequence[str], present: Collection[str]) -> bool:
    """Whether these nodes may speak for a view: more than half of its nodes, or half of them with the first."""
    count = sum(node in present for node in seats)
    return 2 * count > len(seats) or (2 * count == len(seats) and seats[0] in present)


def next_seats(nodes: Sequence[str], chair: str, before: Sequence[str]) -> tuple[str, ...]:
    """Who has the chair of the next view, and who follows: whoever has it now, those who were there, and the new."""
    return tuple(sorted(dict.fromkeys(nodes), key=lambda node: (node != chair, node not in before)))
