"""What is decided anew every so many steps, and told when it has changed.

Every rank says what it has measured; all of them merge what all have said and come to the same decisions, because a
base that only some ranks take is none. Fed with numbers; knows no clock, no tensor and no neighbour.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from everstep.cadence import Every
from everstep.tune.models import Costs, Tuning, mean_between, steps_per_base
from everstep.tune.strategy import Choice, Way, Wish, choose

REBASE = 4  # a replica needs true bases only to be compared with: so many times more rarely than a log does
_FIRST = 32  # steps per base before anything is measured


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank has seen since the last decision. A cost that it has not seen is -1."""

    step_s: float
    base_stall_s: float
    base_write_s: float
    base_bytes: int
    record_stall_s: float
    record_write_s: float
    record_bytes: int
    replay_s: float
    free_bytes: int
    failures: int = 0  # that ended earlier lives of the run,
    trained_s: float = 0.0  # which has trained for so long
    refusal: str = ""
    needs_base: bool = False  # its records lead nowhere before all ranks have one


def merge(said: Collection[Measured]) -> Measured:
    """All ranks as one: the slowest of them is the one that the others wait for."""
    worst = {name: max(getattr(one, name) for one in said) for name in Measured.__struct_fields__}
    return Measured(**{**worst, "free_bytes": min(one.free_bytes for one in said)})


class Controller:
    def __init__(
        self, *, now: Way, may_choose: bool, capture: Every, durable: Every, budget: float, mtbf_s: float | None = None
    ) -> None:
        """`may_choose`: whether the strategy is ours to choose. `mtbf_s`: what the user knows."""
        self._may_choose, self._capture, self._durable, self._budget = may_choose, capture, durable, budget
        self._mtbf_s = mtbf_s
        self._known: Measured | None = None
        self._refusal = ""
        self.interval: Tuning | None = None  # between bases, while there is a log
        self.choice = Choice(strategy=now, reason="nothing is measured yet" if may_choose else "as told", inputs={})

    @property
    def steps_per_base(self) -> int:
        """How many records follow a base; a guess before anything is measured."""
        return self.interval.value if self.interval is not None else _FIRST

    @property
    def strategy(self) -> Way:
        return self.choice.strategy

    def decide(self, measured: Measured) -> None:
        """Look at the latest costs; what was not seen lately is as it was when it was seen last, or estimated."""
        self._refusal = self._refusal or measured.refusal
        known = self._known = _remember(self._known, measured)
        costs = _costs(known, self._mtbf_s)
        self.interval = steps_per_base(costs, budget=self._budget)
        if not self._may_choose or known.base_stall_s < 0:
            return
        step_s = max(costs.step_s, 1e-9)
        wish = Wish(
            budget=self._budget,
            capture_steps=_steps(self._capture, step_s) or 1.0,
            durable_steps=_steps(self._durable, step_s),
        )
        self.choice = choose(
            self.strategy, costs, wish, steps_per_base=self.interval.value, refusal=self._refusal
        )  # fmt: skip


def _steps(every: Every, step_s: float) -> float | None:
    if every.steps is not None:
        return float(every.steps)
    return None if every.seconds is None else every.seconds / step_s


def _remember(before: Measured | None, now: Measured) -> Measured:
    if before is None:
        return now
    unseen = {
        name: getattr(before, name)
        for name in Measured.__struct_fields__
        if name != "refusal" and getattr(now, name) < 0
    }
    return msgspec.structs.replace(now, **unseen)


def _costs(known: Measured, mtbf_s: float | None) -> Costs:
    """A record costs what its share of a base's bytes would, until it is seen."""
    share = known.record_bytes / max(known.base_bytes, 1)
    base_stall_s, base_write_s = max(known.base_stall_s, 0.0), max(known.base_write_s, 0.0)
    return Costs(
        step_s=known.step_s, base_stall_s=base_stall_s, base_write_s=base_write_s, base_bytes=known.base_bytes,
        record_stall_s=known.record_stall_s if known.record_stall_s >= 0 else share * base_stall_s,
        record_write_s=known.record_write_s if known.record_write_s >= 0 else share * base_write_s,
        record_bytes=known.record_bytes, free_bytes=known.free_bytes,
        replay_s=known.replay_s if known.replay_s >= 0 else None,
        mtbf_s=mean_between(mtbf_s, known.failures, known.trained_s), failures=known.failures,
    )  # fmt: skip
