"""Which step to restore, and from where: a pure function of what is left.

The newest step wins that is whole: every old rank's part, of one generation, readable on every node that needs it.
Memory is taken before disk. A step whose readers failed is offered last. Whatever is passed over is explained.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

from everstep.types import Attempt, Holding, Plan, Rejection, Survey

_TRIES = 2  # a reader may be killed by chance once; a step that ends two readers in a row is suspect
_COST = {"memory": 0, "disk": 1}


def merge(surveys: Collection[Survey]) -> Survey:
    """One survey out of many; what several have seen counts once."""
    return Survey(
        holdings=tuple(dict.fromkeys(h for survey in surveys for h in survey.holdings)),
        rejections=tuple(dict.fromkeys(r for survey in surveys for r in survey.rejections)),
        attempts=tuple(dict.fromkeys(a for survey in surveys for a in survey.attempts)),
    )


def make_plan(survey: Survey, nodes: Collection[str]) -> Plan:
    """`nodes`: where the readers are; each of them needs every part."""
    groups: dict[tuple[int, str, int], list[Holding]] = defaultdict(list)
    for holding in survey.holdings:
        groups[holding.step, holding.generation, holding.world].append(holding)
    suspects = {attempt.step: attempt for attempt in survey.attempts if _is_suspect(attempt)}
    rejections = list(survey.rejections)
    order = sorted(groups, key=lambda key: (key[0] not in suspects, key[0], len(groups[key])), reverse=True)
    for step in sorted(suspects.keys() & {key[0] for key in order}, reverse=True):
        rejections.append(Rejection(step=step, source="any", reason=_suspicion(suspects[step])))
    chosen: Plan | None = None
    for step, generation, world in order:
        if chosen is not None:
            break
        parts, reason = _parts(groups[step, generation, world], world, nodes)
        if reason is None:
            chosen = Plan(step=step, world=world, parts=parts, rejections=())
        else:
            rejections.append(Rejection(step=step, source="any", reason=reason))
    rejections.sort(key=lambda rejection: -rejection.step)
    if chosen is None:
        return Plan(step=None, world=0, parts=(), rejections=tuple(rejections))
    return Plan(step=chosen.step, world=chosen.world, parts=chosen.parts, rejections=tuple(rejections))


def _is_suspect(attempt: Attempt) -> bool:
    return bool(attempt.error) or attempt.count >= _TRIES


def _suspicion(attempt: Attempt) -> str:
    if attempt.error:
        return f"its last reader failed: {attempt.error}"
    return f"{attempt.count} readers in a row died while loading it"


def _parts(held: list[Holding], world: int, nodes: Collection[str]) -> tuple[tuple[Holding, ...], str | None]:
    chosen, missing = [], []
    for rank in range(world):
        readable = [h for h in held if h.rank == rank and (h.source == "disk" or set(nodes) <= {h.node})]
        if readable:
            chosen.append(min(readable, key=lambda h: _COST[h.source]))
        else:
            missing.append(rank)
    if missing:
        have = sorted({h.rank for h in held})
        return (), f"no readable part of rank {', '.join(map(str, missing))} (of {world}; there are parts of {have})"
    return tuple(chosen), None


def without(survey: Survey, bad: Holding, reason: str) -> Survey:
    """The survey after a part turned out to be damaged."""
    return Survey(
        holdings=tuple(
            h
            for h in survey.holdings
            if (h.source, h.node, h.step, h.rank, h.generation)
            != (bad.source, bad.node, bad.step, bad.rank, bad.generation)
        ),
        rejections=(*survey.rejections, Rejection(step=bad.step, source=bad.source, reason=reason)),
        attempts=survey.attempts,
    )
