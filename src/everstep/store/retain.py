"""Which checkpoints may go. A pure function: it sees step numbers and a policy, and touches nothing."""

from __future__ import annotations

from collections.abc import Collection

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
