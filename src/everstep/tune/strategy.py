"""Bases only, or a base and a log: which costs less of what the run was asked for.

A base per `lose_at_most` is the simplest thing, and kept while it fits. A log takes its place where bases cost the loop
more than the budget and records cost less, or where the disk cannot take bases as often as it was asked to but can
take records. What was left is taken up again only when it costs half, so that the choice does not flutter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from everstep.tune.models import Costs

Way = Literal["snapshot", "log"]
_AGAIN = 0.5  # what was given up must cost at most this share of its limit to be taken up again


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What was asked for. Steps may be fractions: durations over the time of a step."""

    budget: float
    capture_steps: float  # a checkpoint in memory at least this often,
    durable_steps: float | None  # and on the disk; None: as the disk likes


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    strategy: Way
    reason: str
    inputs: Mapping[str, float]


def choose(now: Way, costs: Costs, wish: Wish, *, steps_per_base: int, refusal: str = "") -> Choice:
    """`steps_per_base`: what the log would do with. `refusal`: why there can be no log, if so."""
    step_s = max(costs.step_s, 1e-9)
    base = costs.base_stall_s / (max(wish.capture_steps, 1.0) * step_s)
    log = costs.record_stall_s / step_s + costs.base_stall_s / (max(steps_per_base, 1) * step_s)
    inputs = {
        "step_s": costs.step_s, "base_stall_s": costs.base_stall_s, "record_stall_s": costs.record_stall_s,
        "base_write_s": costs.base_write_s, "record_write_s": costs.record_write_s, "overhead_of_bases": base,
        "overhead_of_log": log, "budget": wish.budget, "steps_per_base": float(steps_per_base),
    }  # fmt: skip

    def chosen(strategy: Way, reason: str) -> Choice:
        return Choice(strategy=strategy, reason=reason, inputs=inputs)

    if refusal:
        return chosen("snapshot", f"there can be no log: {refusal}")
    ease = _AGAIN if now == "log" else 1.0
    if wish.durable_steps is not None:
        interval_s = max(wish.durable_steps, 1.0) * step_s
        if costs.base_write_s > ease * interval_s and costs.record_write_s <= interval_s:
            return chosen(
                "log",
                f"the disk is to have a checkpoint every {interval_s:.3g} s; a base takes {costs.base_write_s:.3g} s,"
                f" a record {costs.record_write_s:.3g} s",
            )
    if base <= ease * wish.budget:
        return chosen("snapshot", f"bases cost {base:.1%} of the time, within the budget of {wish.budget:.1%}")
    if log <= wish.budget or log <= _AGAIN * base:
        return chosen(
            "log", f"bases cost {base:.1%} of the time, the budget is {wish.budget:.1%}; the log costs {log:.1%}"
        )
    if now == "log" and log < base:
        return chosen("log", f"the log costs {log:.1%} of the time, bases would cost {base:.1%}")
    return chosen("snapshot", f"bases cost {base:.1%} of the time, and a log would cost {log:.1%}")
