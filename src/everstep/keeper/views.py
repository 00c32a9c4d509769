"""Who goes on after a loss, and as what: decided once everybody who is left stands still.

A view is the list of those who train together, each under a rank, with a number that only grows. A loss ends a view.
Whoever is left of it comes to a stop and says so, and spares stand by all the time. The next view is a function of who
stands there and of the policies that were chosen, in their order:

    spare      the places of the lost are taken by those who stood by; ranks stay as they were
    forward    those who are left go on alone, under ranks without gaps, and finish the step by themselves
    rollback   the same, and they go back to the newest step that all can have
    restart    nobody goes on here: all end, and whoever started them starts them again

Pure: touches no clock, process or socket.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from everstep.config import Policy
from everstep.types import Noun

SPARE = -1  # the rank of one who has none


class Standing(Noun, frozen=True, kw_only=True):
    """Somebody who waits for the next view."""

    worker: str  # a name that no other process has
    rank: int  # in the view that has ended, or SPARE
    address: str  # where the others would meet, if it were the first of the next view


class Decision(Noun, frozen=True, kw_only=True):
    """`workers`: who has each rank; nobody if it is over here."""

    policy: Policy
    workers: tuple[str, ...]
    address: str
    lost: tuple[int, ...]
    reason: str = ""  # why it is not what was wished for first


def decide(world: int, left: Sequence[Standing], spares: Sequence[Standing], policies: Sequence[Policy]) -> Decision:
    """`left`: all who are left of a view of `world` ranks."""
    by_rank = {one.rank: one for one in left}
    lost = tuple(rank for rank in range(world) if rank not in by_rank)
    reasons: list[str] = []
    for policy in policies:
        places = dict(by_rank)
        if policy == "spare":
            if len(spares) < len(lost):
                reasons.append(f"{len(lost)} lost, and {len(spares)} spares")
                continue
            places |= dict(zip(lost, spares, strict=False))
        if policy == "restart" or not by_rank:
            break
        going = [places[rank] for rank in sorted(places)]
        return Decision(
            policy=policy, workers=tuple(one.worker for one in going), address=_meeting_place(going, by_rank.values()),
            lost=lost, reason="; ".join(reasons),
        )  # fmt: skip
    return Decision(policy="restart", workers=(), address="", lost=lost, reason="; ".join(reasons))


def _meeting_place(going: Sequence[Standing], left: Collection[Standing]) -> str:
    """With the first of those who have been there before: a spare that is lost while it joins takes nothing along."""
    return next(one.address for one in going if one in left)
