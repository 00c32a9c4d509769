"""Whether a run is to end before its end: what was asked for, and when that is due.

Pure. A halt is obeyed once: whoever starts the job again has decided that it goes on. Only "when the allocation has so
many seconds left" stands until it is cleared, because every allocation has an end of its own.
"""

from __future__ import annotations

from everstep.types import HaltRecord


def due(
    halt: HaltRecord, *, now: float, began: float, checkpoints: int, end_time: float | None, leaving_s: float = 0.0
) -> str | None:
    """Why the run is to end now, or None if it is not.

    `began`: when this life of the run did. `checkpoints`: how many became durable since the halt was asked for.
    `end_time`: of the allocation, if anybody knows. `leaving_s`: what it takes to leave.
    """
    if halt.obeyed_time is None:
        if halt.now:
            return "now"
        if halt.after is not None and checkpoints >= halt.after:
            return f"after {halt.after} checkpoints"
        if halt.before is not None and began < halt.before <= now + leaving_s:
            return "before the time that was given"
    if halt.seconds is not None and end_time is not None and end_time - now <= halt.seconds + leaving_s:
        return f"with {halt.seconds:g} seconds of the allocation left"
    return None


def is_in_force(halt: HaltRecord) -> bool:
    """Whether it can still end a run."""
    return halt.seconds is not None or halt.obeyed_time is None
