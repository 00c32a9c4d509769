"""When what fails: drawn once for a seed, so that all strategies live through the same failures.

A renewal process for every unit (a GPU, a node, a rack, or the job as a whole), with the law that the scenario names;
a trace as it was recorded. Ties are in a fixed order: by time, then by the cause's place in the scenario, then by seat.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import gamma

import numpy as np

from everstep.lab.scenario import Kind, Scenario, Source, units


@dataclass(frozen=True, slots=True, order=True)
class Failure:
    time: float
    cause: int  # place in the scenario
    seats: tuple[int, ...]
    kind: Kind
    back_s: float | None = None  # when the seats are filled again, if a trace says it


def draw(scenario: Scenario, seed: int) -> list[Failure]:
    """All failures of the scenario's duration, the earliest first."""
    found: list[Failure] = []
    for cause, source in enumerate(scenario.failures):
        if source.law == "trace":
            found += [
                Failure(visit.lost_s, cause, (visit.seat,), "node", visit.back_s)
                for visit in source.visits
                if visit.lost_s < scenario.duration_s
            ]
            continue
        rng = np.random.default_rng([seed, cause])
        for time, unit in _renewals(source, units(source, scenario.cluster), scenario.duration_s, rng):
            found.append(Failure(time, cause, _seats(source, unit, scenario, rng), source.kind))
    return sorted(found)


def _renewals(source: Source, count: int, until: float, rng: np.random.Generator) -> list[tuple[float, int]]:
    sample = _sampler(source, rng)
    alive = np.arange(count)
    at = sample(count)
    found: list[tuple[float, int]] = []
    while True:
        alive, at = alive[at < until], at[at < until]
        if not len(alive):
            return sorted(found)
        found += zip(at.tolist(), alive.tolist(), strict=True)
        at = at + sample(len(alive))


def _sampler(source: Source, rng: np.random.Generator) -> Callable[[int], np.ndarray]:
    mean, shape = source.mtbf_s, source.shape
    if source.law == "weibull":
        return lambda count: rng.weibull(shape, count) * (mean / gamma(1 + 1 / shape))
    if source.law == "gamma":
        return lambda count: rng.gamma(shape, mean / shape, count)
    if source.law == "periodic":
        return lambda count: np.full(count, mean)
    return lambda count: rng.exponential(mean, count)


def _seats(source: Source, unit: int, scenario: Scenario, rng: np.random.Generator) -> tuple[int, ...]:
    """Who is struck when a unit fails; if the job as a whole does, somebody of it."""
    cluster = scenario.cluster
    seat = {
        "job": lambda: int(rng.integers(cluster.nodes)), "rack": lambda: unit * cluster.nodes_per_rack,
        "node": lambda: unit, "gpu": lambda: unit // cluster.gpus_per_node,
    }[source.per]()  # fmt: skip
    if source.kind == "cluster":
        return tuple(range(cluster.nodes))
    if source.kind == "rack":
        first = cluster.rack(seat) * cluster.nodes_per_rack
        return tuple(range(first, min(first + cluster.nodes_per_rack, cluster.nodes)))
    return (seat,)
