"""Which checkpoints may go. A pure function: it sees step numbers and a policy, and touches nothing."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

from everstep.config import Keep


def to_retire(committed: Collection[int], keep: Keep, *, damaged: Collection[int] = ()) -> list[int]:
    """The committed steps that the policy lets go, oldest first.

    Damaged steps do not count among the last ones, so the newest `keep.last` sound steps always stay; a damaged step
    that is newer than a sound one goes only once enough newer sound ones exist, like any other.
    """
    sound = sorted(set(committed) - set(damaged))
    kept = set(sound[-keep.last :])
    if keep.every is not None:
        kept |= {step for step in sound if step % keep.every == 0}
    if not sound:
        return []  # all are damaged: each may still be of use to somebody
    return [step for step in sorted(set(committed)) if step not in kept and step < max(sound)]


def spent_segments(starts: Sequence[int], oldest_base: int) -> list[int]:
    """The segments of a log that no kept base needs, oldest first.

    A segment holds the steps after its start up to the start of the next one, so it is spent when a base is kept there
    or beyond, and no older one is. The last segment is never spent: it is being written.
    """
    ordered = sorted(set(starts))
    return [start for start, following in pairwise(ordered) if following <= oldest_base]
