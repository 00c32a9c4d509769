"""What became of simulated runs: goodput, what was wasted and why, and how sure that is over several seeds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import mean, stdev

from everstep.tune.models import Tuning

CAUSES = ("stall", "lost work", "detection", "waiting", "restart", "load", "replay", "fewer nodes")
_STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 7: 2.365, 9: 2.262, 14: 2.145, 19: 2.093, 29: 2.045}
_NORMAL = 1.96  # beyond the table of Student's distribution, both for 95 %


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One strategy in one run. Useful and wasted time are all of it."""

    strategy: str
    nodes: int
    gpus: int
    seed: int
    elapsed_s: float
    useful_s: float
    wasted_s: dict[str, float]  # by cause
    steps: int
    steps_lost: int
    failures: int
    recoveries: dict[str, int]  # by policy
    restored_from: dict[str, int]
    bytes: dict[str, int]  # written, by tier
    series: tuple[tuple[float, float], ...]  # time, and useful time until then
    decisions: tuple[Tuning, ...]  # at the full size

    @property
    def goodput(self) -> float:
        return self.useful_s / self.elapsed_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean, and how far it may be off: 95 % of such intervals hold what infinitely many seeds would give."""

    mean: float
    within: float | None  # None: one seed says nothing of that

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        if len(values) < 2:
            return cls(mean=mean(values), within=None)
        freedom = len(values) - 1
        known = [bound for bound in _STUDENT if bound <= freedom]
        quantile = _STUDENT[max(known)] if freedom < 30 else _NORMAL
        return cls(mean=mean(values), within=quantile * stdev(values) / sqrt(len(values)))

    def percent(self, sign: str = "") -> str:
        """As a share of the whole."""
        return f"{self.mean:{sign}.2%}" + ("" if self.within is None else f" ± {self.within:.2%}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One strategy over its seeds. Shares are of the elapsed time."""

    strategy: str
    nodes: int
    gpus: int
    seeds: int
    goodput: Estimate
    wasted: dict[str, Estimate]
    steps: Estimate
    steps_lost: Estimate
    failures: Estimate
    recoveries: dict[str, float]
    restored_from: dict[str, float]
    bytes: dict[str, float]
    decisions: tuple[Tuning, ...]


def summarize(outcomes: Iterable[Outcome]) -> list[Summary]:
    """In the order in which they came."""
    groups: dict[tuple[int, str], list[Outcome]] = {}
    for one in outcomes:
        groups.setdefault((one.nodes, one.strategy), []).append(one)
    return [_summary(group) for group in groups.values()]


def _summary(group: list[Outcome]) -> Summary:
    first = group[0]
    return Summary(
        strategy=first.strategy, nodes=first.nodes, gpus=first.gpus, seeds=len(group),
        goodput=Estimate.of([one.goodput for one in group]),
        wasted={cause: Estimate.of([one.wasted_s[cause] / one.elapsed_s for one in group]) for cause in CAUSES},
        steps=Estimate.of([one.steps for one in group]),
        steps_lost=Estimate.of([one.steps_lost for one in group]),
        failures=Estimate.of([one.failures for one in group]),
        recoveries=_means([one.recoveries for one in group]),
        restored_from=_means([one.restored_from for one in group]),
        bytes=_means([one.bytes for one in group]),
        decisions=first.decisions,
    )  # fmt: skip


def _means(counts: Sequence[dict[str, int]]) -> dict[str, float]:
    names = dict.fromkeys(name for one in counts for name in one)
    return {name: mean(one.get(name, 0) for one in counts) for name in names}
