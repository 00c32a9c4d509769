"""Which checkpoints may go. Pure functions: they see step numbers and a policy, and touch nothing."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

from everstep.config import Keep


def to_retire(
    committed: Collection[int], keep: Keep, *, damaged: Collection[int] = (), everywhere: Collection[int] | None = None
) -> list[int]:
    """The committed steps that the policy lets go, oldest first.

    Damaged steps do not count among the last ones, so the newest `keep.last` sound steps always stay; a damaged step
    that is newer than a sound one goes only once enough newer sound ones exist, like any other.

    `everywhere`: those that all nodes have, where each has its own parts only. The milestones among them stay, too, so
    that all nodes keep the same ones whatever else each of them has.
    """
    sound = sorted(set(committed) - set(damaged))
    kept = set(sound[-keep.last :])
    if keep.every is not None:
        kept |= milestones(sound, keep.every)
        kept |= milestones(set(sound).intersection(everywhere or ()), keep.every)
    if not sound:
        return []  # all are damaged: each may still be of use to somebody
    return [step for step in sorted(set(committed)) if step not in kept and step < max(sound)]


def milestones(steps: Collection[int], every: int) -> set[int]:
    """The first step at or after each multiple of `every`, from `every` itself on; of `every=1` all.

    It stays the first when those after it go, so the answer is the same however often it was acted upon.
    """
    first: dict[int, int] = {}
    for step in sorted(steps):
        if step >= every or every == 1:
            first.setdefault(step // every, step)
    return set(first.values())


def spent_segments(starts: Sequence[int], oldest_base: int) -> list[int]:
    """The segments of a log that lie before the oldest base that it is to follow, oldest first.

    A segment holds the steps after its start up to the start of the next one. The last one is never spent: it is being
    written.
    """
    ordered = sorted(set(starts))
    return [start for start, following in pairwise(ordered) if following <= oldest_base]
