"""Failures: their laws have the means that a scenario gives, and a seed always gives the same ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tables import table

from everstep.lab.failures import Failure, draw
from everstep.lab.scenario import scenario_of


@pytest.mark.parametrize(
    "law", [{"law": "exponential"}, {"law": "weibull", "shape": 0.7}, {"law": "gamma", "shape": 2.0}]
)
def test_a_law_has_its_mean(law: dict[str, object]) -> None:
    scenario = scenario_of(table(duration="200d", failures=[{"kind": "node", "mtbf": "1h", **law}]))
    times = [one.time for one in draw(scenario, 0)]
    between = np.diff(times)
    assert between.mean() == pytest.approx(3600, rel=0.05)
    squared_variation = {"exponential": 1.0, "weibull": 2.14, "gamma": 0.5}[str(law["law"])]
    assert between.var() / 3600**2 == pytest.approx(squared_variation, rel=0.15)
    assert times == sorted(times)


def test_units_fail_each_by_itself() -> None:
    sources = [{"kind": "node", "per": "gpu", "mtbf": "100h"}]
    scenario = scenario_of(table(duration="200d", failures=sources))
    failures = draw(scenario, 1)
    assert len(failures) == pytest.approx(200 * 24 * 16 / 100, rel=0.1)
    assert scenario.mtbf_s == pytest.approx(100 * 3600 / 16)
    assert {one.seats for one in failures} == {(seat,) for seat in range(8)}


def test_a_rack_fails_as_a_whole_and_a_cluster_too() -> None:
    scenario = scenario_of(table(cluster={"nodes": 7, "nodes_per_rack": 3}, duration="9d", failures=[
        {"kind": "rack", "mtbf": "5h"}, {"kind": "cluster", "mtbf": "9h"},
        {"kind": "rack", "per": "rack", "mtbf": "20h"},
    ]))  # fmt: skip
    found = draw(scenario, 0)
    assert {one.seats for one in found if one.kind == "rack"} == {(0, 1, 2), (3, 4, 5), (6,)}
    assert {one.seats for one in found if one.kind == "cluster"} == {tuple(range(7))}


def test_a_seed_is_its_failures_and_another_is_not() -> None:
    scenario = scenario_of(table())
    assert draw(scenario, 3) == draw(scenario, 3) != draw(scenario, 4)


def test_ties_are_in_the_order_of_causes_and_seats() -> None:
    periodic = {"law": "periodic", "mtbf": "1h"}
    sources = [{"kind": "process", "per": "node", **periodic}, {"kind": "node", "per": "node", **periodic}]
    found = draw(scenario_of(table(failures=sources)), 0)
    assert len(found) == 3 * 16
    assert [(one.time, one.cause, one.seats) for one in found] == [
        (3600.0 * hour, cause, (seat,)) for hour in (1, 2, 3) for cause in (0, 1) for seat in range(8)
    ]


def test_a_trace_is_played_as_it_was_recorded(tmp_path: Path) -> None:
    rows = [f"{seat},add,n{seat}" for seat in range(8)] + ["60,remove,n3", "90,add,n9", "100000,remove,n9"]
    (tmp_path / "t.csv").write_text("\n".join(rows))
    scenario = scenario_of(table(failures=[{"law": "trace", "file": "t.csv"}]), folder=tmp_path)
    assert draw(scenario, 0) == draw(scenario, 1) == [Failure(53.0, 0, (3,), "node", 83.0)]
