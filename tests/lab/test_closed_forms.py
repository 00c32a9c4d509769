"""The simulator against formulas, and the rules of `tune` against the best that the simulator finds.

All runs of a comparison live through the same failures, so their differences are known better than their values.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from statistics import mean
from typing import Any

import pytest
from tables import table

from everstep import lab
from everstep.lab.failures import draw
from everstep.lab.lifetime import Lifetime
from everstep.lab.rhythm import Log, Rhythm, Way, rhythm_of
from everstep.lab.scenario import Scenario, scenario_of
from everstep.tune.classics import checkfreq, daly, lowdiff, pccheck, waste_of_checkpoints, young
from everstep.tune.levels import LevelCosts, schedule
from everstep.tune.models import Costs, steps_per_base

MTBF_S = 1800.0
AT_ONCE = {"detect": 0, "timeout": 0, "restart": 0, "regroup": 0}


def one_node(**changes: Any) -> dict[str, Any]:
    """State that takes 30 s to write and 30 s to read, and failures of its processes."""
    return table(**{
        "cluster": {"nodes": 1}, "training": {"step": "1s", "state": "30GB"}, "duration": "5d",
        "machine": {"network": "1GB/s", "shared": "1GB/s", "serialize": "1GB/s", "link": "1TB/s"},
        "recovery": {"detect": 0, "timeout": "10s", "restart": "50s", "regroup": 0},
        "failures": [{"kind": "process", "mtbf": f"{MTBF_S:.0f}s"}],
        "strategies": [{"kind": "dcp", "every": 300}], **changes,
    })  # fmt: skip


@pytest.mark.parametrize("every", [100, 300, 1500])
def test_the_waste_of_periodic_checkpoints_is_that_of_the_formula(every: int) -> None:
    found = lab.simulate(one_node(strategies=[{"kind": "dcp", "every": every}]), seeds=10).summaries[0]
    exact = waste_of_checkpoints(every * 1.0, 30.0, MTBF_S, restart_s=10 + 50 + 30)
    assert found.goodput.within is not None and found.goodput.within < 0.025
    assert 1 - found.goodput.mean == pytest.approx(exact, abs=found.goodput.within)


@pytest.mark.soak
def test_it_still_is_when_known_ten_times_better() -> None:
    found = lab.simulate(one_node(duration="200d"), seeds=100).summaries[0]
    exact = waste_of_checkpoints(300.0, 30.0, MTBF_S, restart_s=90)
    assert found.goodput.within is not None and found.goodput.within < 0.001
    assert 1 - found.goodput.mean == pytest.approx(exact, abs=found.goodput.within)


def test_the_interval_of_confidence_holds_the_truth_as_often_as_it_says() -> None:
    exact = 1 - waste_of_checkpoints(300.0, 30.0, MTBF_S, restart_s=90)
    scenario = scenario_of(one_node(duration="1d"))
    goodputs = [one.goodput for one in lab.outcomes(scenario, 200)]
    estimates = [lab.Estimate.of(goodputs[first : first + 5]) for first in range(0, 200, 5)]
    hits = sum(abs(one.mean - exact) <= (one.within or 0) for one in estimates)
    assert 34 <= hits <= 40  # of 40 intervals of 95 %
    assert lab.Estimate.of([0.5]).within is None


# -- rules against the best of a grid


def waste(scenario: Scenario, rhythm: Rhythm, seeds: int = 3) -> float:
    """Of a run in that rhythm."""
    found = []
    for seed in range(seeds):
        run = Lifetime(scenario, scenario.strategies[0], draw(scenario, seed), seed)
        run._rhythms[scenario.cluster.nodes] = rhythm
        found.append(1 - run.run().goodput)
    return mean(found)


def wasted(**strategy: Any) -> float:
    return 1 - lab.simulate(one_node(strategies=[strategy]), seeds=3).summaries[0].goodput.mean


def around(steps: int) -> Iterable[int]:
    return sorted({max(1, round(steps * factor)) for factor in (0.3, 0.6, 1.7, 3.5)})


@pytest.mark.parametrize("rule", [young, daly])
def test_young_and_daly_are_near_the_best_interval(rule: Any) -> None:
    chosen = rule(1.0, 30.0, MTBF_S).value
    best = min(wasted(kind="dcp", every=every) for every in around(chosen))
    assert wasted(kind="dcp", every=rule.__name__) == wasted(kind="dcp", every=chosen) <= best * 1.02


def test_checkfreq_is_the_best_interval_that_keeps_its_bounds() -> None:
    """Nothing sticks out of a step, so the more often the better: as often as the file system takes them."""
    chosen = checkfreq(1.0, 0.03, 30.0, 0.03).value
    assert wasted(kind="checkfreq") == wasted(kind="checkfreq", every=chosen)
    assert wasted(kind="checkfreq", every=chosen) <= min(
        wasted(kind="checkfreq", every=every) for every in around(chosen)
    )
    scenario = scenario_of(one_node(strategies=[{"kind": "checkfreq", "every": 1}]))
    assert rhythm_of(scenario, scenario.strategies[0], 1).ways[0].every == chosen  # nobody can be faster than that


def test_pccheck_is_the_shortest_interval_with_so_many_in_flight() -> None:
    scenario = scenario_of(one_node(recovery=AT_ONCE, strategies=[{"kind": "checkfreq"}]))

    def in_flight(every: int) -> int:
        return sum(cut + 30.0 > 1000 * every for cut in range(0, 1000 * every, every)) + (30.0 > 0)

    def rhythm(every: int) -> Rhythm:
        way = Way(source="shared", every=every, write_s=30.0, bytes=1)
        return Rhythm(step_s=1.0, ways=(way,), log=None, has_replica=False, decisions=())

    for count in (1, 2, 4):
        chosen = pccheck(1.0, 30.0, count, 1.0).value
        assert in_flight(chosen) <= count < in_flight(chosen - 1)
        assert all(waste(scenario, rhythm(chosen)) < waste(scenario, rhythm(more * chosen)) for more in (2, 4))


OFTEN_S = 400.0  # between two failures, in steps of a second


def logged(base: int, batch: int, base_stall_s: float, replay: float) -> tuple[Scenario, Rhythm]:
    """Bases and batches on a disk that outlives what memory does not."""
    often = [{"kind": "cluster", "mtbf": f"{OFTEN_S:.0f}s"}]
    machine = {"disk": "100000GB/s", "shared": "1GB/s", "replay": replay}
    changes = {"recovery": AT_ONCE, "duration": "20h", "failures": often, "machine": machine}
    scenario = scenario_of(one_node(**changes, strategies=[{"kind": "log"}]))
    bases = Way(source="disk", every=base, write_s=0.0, bytes=1, stall_s=base_stall_s)
    log = Log(flush=batch, partner_lag=1, shared_group=10**9, bytes=1, stall_s=0.0)
    return scenario, Rhythm(step_s=1.0, ways=(bases,), log=log, has_replica=False, decisions=())


def test_our_log_has_the_best_interval_between_bases() -> None:
    costs = Costs(
        step_s=1.0, base_stall_s=0.5, base_write_s=0.0, base_bytes=10**12, record_stall_s=0.0, record_write_s=0.0,
        record_bytes=1, replay_s=0.2, free_bytes=10**18, mtbf_s=OFTEN_S,
    )  # fmt: skip
    chosen = steps_per_base(costs, budget=0.5, recovery_s=1e9)
    assert chosen.bound == "the formula"
    found = {base: waste(*logged(base, 1, 0.5, 0.2)) for base in (chosen.value, *around(chosen.value))}
    assert found[chosen.value] <= min(found.values()) * 1.03
    assert max(found.values()) > 1.2 * min(found.values())  # the grid is wide enough to tell


def test_lowdiff_has_the_best_bases_and_batches_where_batches_merge() -> None:
    stall_s, merged_s = 0.5, 2.0
    base, batch = lowdiff(1.0, stall_s * 1e9, 1e9, merged_s, OFTEN_S)
    found = {
        (b, n): waste(*logged(b, n, stall_s, merged_s / n), seeds=2)
        for b, n in product(
            [round(base.value * x) for x in (0.4, 1, 2.5)], [max(1, round(batch.value * x)) for x in (0.4, 1, 2.5)]
        )
    }
    assert found[base.value, batch.value] <= min(found.values()) * 1.05
    assert max(found.values()) > 1.2 * min(found.values())


def test_levels_are_near_the_best_nested_schedule() -> None:
    rates = {"process": 1 / 300, "node": 1 / 1200, "cluster": 1 / 5000}
    changes = {
        "cluster": {"nodes": 4, "spares": 1000, "repair": 0},
        "machine": dict.fromkeys(("link", "network", "shared"), "100000GB/s"),
        "failures": [{"kind": kind, "mtbf": 1 / rate} for kind, rate in rates.items()],
    }
    scenario = scenario_of(table(**changes, recovery=AT_ONCE, duration="1d", strategies=[{"kind": "scr"}]))
    names = ("memory", "parity", "shared")
    stalls = dict(zip(names, (0.1, 0.5, 8.0), strict=True))
    levels = [
        LevelCosts(name=name, stall_s=stalls[name], write_s=0.0, failures_per_s=rate)
        for name, rate in zip(names, rates.values(), strict=True)
    ]
    chosen = tuple(one.value for one in schedule(levels, 1.0))

    def at(steps: tuple[int, ...]) -> float:
        ways = tuple(
            Way(source=name, every=every, write_s=0.0, bytes=1, stall_s=stalls[name])  # type: ignore[arg-type]
            for name, every in zip(names, steps, strict=True)
        )
        rhythm = Rhythm(step_s=1.0, ways=ways, log=None, has_replica=False, decisions=())
        return waste(scenario, rhythm, seeds=1)

    first, second, third = chosen
    grid = [
        (a, a * b, a * b * c)
        for a, b, c in (
            (first // 2, 3, 9),
            (first * 2, 3, 9),
            (first, 1, 9),
            (first, 9, 9),
            (first, 3, 2),
            (first, 3, 30),
        )
    ]
    found = {steps: at(steps) for steps in {chosen, *grid}}
    assert found[chosen] <= min(found.values()) * 1.06
    assert max(found.values()) > 1.2 * min(found.values())
    assert second % first == 0 and third % second == 0
