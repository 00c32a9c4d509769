"""How often a base or values, how many records with one flush: formulas with names, and what bounds them.

Every result carries its formula as text, its inputs and the constraint that decided it, so that a person can check it
with a pocket calculator. All times are seconds, all sizes bytes, all intervals steps. Touches no clock and no file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import floor, inf, sqrt

MTBF_S = 6 * 3600.0  # assumed while nobody knows better: large jobs on many nodes fail a few times a day
RECOVERY_S = 60.0  # how long the replay of a log may take
LOG_PER_BASE = 16.0  # the log since a base is at most this many times as large as the base,
DISK_SHARE = 0.5  # and takes at most this share of the space that is left
WRITING_SHARE = 0.1  # of its time, that a disk writes bases at most: the log needs it too
REPLAY_SHARE = 0.2  # assumed of a device: repeating an update takes this share of a step
UNBOUNDED = 1_000_000  # steps; where nothing sets a limit, this does
_HIDES = 0.9  # forward and backward, of a step: what copies have before an update waits for them

INTERVAL = "sqrt(2 M C_F / r) / T"
GROUP = "sqrt(2 M C_D) / T"
EQUAL = "V / R"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """A number that was chosen, and why it is this one."""

    what: str
    value: int
    formula: str
    inputs: Mapping[str, float]
    bound: str  # the constraint that decided, or "the formula"
    assumed: tuple[str, ...]  # inputs that nobody has measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What keeping a run costs, as measured in it. A step is the whole of it, with whatever stalls it."""

    step_s: float
    base_stall_s: float  # that a base costs the loop
    base_write_s: float  # until a base is durable
    base_bytes: int
    record_stall_s: float
    record_write_s: float
    record_bytes: int
    replay_s: float | None  # of one record; None: not measured
    free_bytes: int
    mtbf_s: float | None = None  # None: assumed
    failures: int = 0  # that it was seen from, if it was


def mean_between(given_s: float | None, failures: int, trained_s: float) -> float | None:
    """Between two failures: as it was given, or as a run has seen it; None if nobody knows.

    What is assumed before the first failure counts as one that was seen: one alone says little.
    """
    if given_s is not None or not failures:
        return given_s
    return (trained_s + MTBF_S) / (failures + 1)


def steps_per_base(costs: Costs, *, budget: float, recovery_s: float = RECOVERY_S) -> Tuning:
    """The interval between bases with the least expected waste: their stalls against the replay of what follows them.

    A failure finds half an interval of records to replay, each r times as long as its step.
    """
    step_s = max(costs.step_s, 1e-9)
    replay_s = REPLAY_SHARE * step_s if costs.replay_s is None else max(costs.replay_s, 1e-9)
    mtbf_s = MTBF_S if costs.mtbf_s is None else costs.mtbf_s
    r = replay_s / step_s
    wanted = sqrt(2 * mtbf_s * max(costs.base_stall_s, 0.0) / r) / step_s
    at_most = [
        ("recovery time", recovery_s / replay_s),
        ("size of the log", LOG_PER_BASE * costs.base_bytes / max(costs.record_bytes, 1)),
        ("free disk space", DISK_SHARE * costs.free_bytes / max(costs.record_bytes, 1)),
    ]
    at_least = [
        ("time to write a base", costs.base_write_s / (WRITING_SHARE * step_s)),
        ("overhead budget", costs.base_stall_s / (budget * step_s)),
    ]
    value, bound = _clip(wanted, at_most, at_least)
    inputs = {
        "M": mtbf_s, "C_F": costs.base_stall_s, "r": r, "T": costs.step_s, "base_write_s": costs.base_write_s,
        "base_bytes": float(costs.base_bytes), "record_bytes": float(costs.record_bytes), "budget": budget,
        "recovery_s": recovery_s, "free_bytes": float(costs.free_bytes),
    } | ({"failures": float(costs.failures)} if costs.failures else {})  # fmt: skip
    assumed = tuple(name for name, seen in (("M", costs.mtbf_s), ("r", costs.replay_s)) if seen is None)
    return Tuning(
        what="steps per base", value=value, formula=INTERVAL, inputs=inputs, bound=bound, assumed=assumed
    )  # fmt: skip


def steps_per_flush(
    step_s: float,
    flush_s: float,
    *,
    slots: int,
    lose_steps: int | None,
    lose_s: float | None,
    mtbf_s: float | None = None,
) -> Tuning:
    """The group commit: the cost of a flush against the steps that a failure finds unflushed.

    Never more than may be lost, and half of the ring at most, so that the other half takes records while one runs.
    """
    step_s = max(step_s, 1e-9)
    assumed = ("M",) if mtbf_s is None else ()
    mtbf_s = MTBF_S if mtbf_s is None else mtbf_s
    wanted = sqrt(2 * mtbf_s * max(flush_s, 0.0)) / step_s
    at_most = [("half of the ring", slots / 2)]
    inputs = {"M": mtbf_s, "C_D": flush_s, "T": step_s, "slots": float(slots)}
    if lose_steps is not None:
        at_most.append(("lose_at_most", float(lose_steps)))
        inputs["lose_at_most"] = float(lose_steps)
    if lose_s is not None:
        at_most.append(("lose_at_most", max(0.0, lose_s - flush_s) / step_s))
        inputs["lose_at_most_s"] = lose_s
    value, bound = _clip(wanted, at_most, [])
    return Tuning(
        what="records per flush", value=value, formula=GROUP, inputs=inputs, bound=bound, assumed=assumed
    )  # fmt: skip


def steps_per_values(values_bytes: int, record_bytes: int, *, slots: int) -> Tuning:
    """How far apart values are saved that are too large for every record: they cost as much as the gradients between.

    The values of a rank are as large with many ranks as with one, and its part of a packed gradient is not: so they are
    saved less often then, and a step of all ranks costs the same bytes. Never more often than half of the ring fills.
    """
    value, bound = _clip(values_bytes / max(record_bytes, 1), [], [("half of the ring", slots / 2)])
    inputs = {"V": float(values_bytes), "R": float(record_bytes), "slots": float(slots)}
    return Tuning(what="steps per save of values", value=value, formula=EQUAL, inputs=inputs, bound=bound, assumed=())


def _clip(
    wanted: float, at_most: Sequence[tuple[str, float]], at_least: Sequence[tuple[str, float]]
) -> tuple[int, str]:
    """What may not be exceeded, then what cannot be undercut: a base that is not written yet cannot be followed."""
    value, bound = min(wanted, UNBOUNDED), "the formula"
    for name, limit in at_most:
        if limit < value:
            value, bound = limit, name
    for name, limit in at_least:
        if min(limit, UNBOUNDED) > value:
            value, bound = min(limit, UNBOUNDED), name
    return max(1, floor(value) if value < inf else UNBOUNDED), bound


def sticking_out(copy_s: float, step_s: float) -> float:
    """The stall of a copy off a device: what does not hide behind forward and backward."""
    return max(0.0, copy_s - _HIDES * step_s)


def has_moved(before: int | None, now: int) -> bool:
    """Whether a decision has changed by more than a quarter, which is worth telling."""
    return before is None or abs(now - before) > before / 4
