"""The published rules: each is its closed form, and the closed form is where its objective is least."""

from __future__ import annotations

from itertools import pairwise, product
from math import cbrt, exp, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.tune.classics import (
    checkfreq,
    daly,
    lowdiff,
    pccheck,
    waste_of_checkpoints,
    waste_of_log,
    waste_of_merged_log,
    young,
)
from everstep.tune.levels import LevelCosts, schedule, waste_of_levels

HOUR = 3600.0


def test_young_is_the_square_root() -> None:
    found = young(0.1, 2.0, 6 * HOUR)
    assert found.value == round(sqrt(2 * 2.0 * 6 * HOUR) / 0.1) == 2939
    assert (found.bound, found.inputs) == ("the formula", {"C": 2.0, "M": 6 * HOUR, "T": 0.1})


def test_daly_is_its_series() -> None:
    # C = 60 s, M = 1800 s: sqrt(2 C M) = 464.76; times 1 + sqrt(1/60)/3 + 1/540 = 1.044884; less C
    assert daly(1.0, 60.0, 1800.0).value == round(464.758 * (1 + sqrt(1 / 60) / 3 + 1 / 540) - 60) == 426
    beyond = daly(1.0, 4000.0, 1800.0)
    assert (beyond.value, beyond.bound) == (1800, "C is at least 2 M: M / T")


@pytest.mark.parametrize(("stall_s", "mtbf_s"), [*product((1.0, 20.0, 120.0), (1800.0, 6 * HOUR))])
def test_daly_is_where_the_exact_waste_is_least(stall_s: float, mtbf_s: float) -> None:
    grid = np.arange(1, 20_000)
    best = min(waste_of_checkpoints(float(one), stall_s, mtbf_s) for one in grid)
    chosen, first_order = (rule(1.0, stall_s, mtbf_s).value for rule in (daly, young))
    assert waste_of_checkpoints(float(chosen), stall_s, mtbf_s) <= best * 1.001
    assert waste_of_checkpoints(float(first_order), stall_s, mtbf_s) >= best * (1 - 1e-12)


def test_the_exact_waste_is_that_of_trials() -> None:
    """One piece of work after the other, tried until it gets through: the sum of what it took."""
    rng = np.random.default_rng(0)
    interval_s, stall_s, restart_s, mtbf_s, spent = 300.0, 30.0, 60.0, 900.0, []
    for _ in range(20_000):
        took, left = 0.0, interval_s + stall_s
        while (until := rng.exponential(mtbf_s)) < left:
            took, left = took + until, interval_s + stall_s + restart_s
        spent.append(took + left)
    found = 1 - interval_s / np.mean(spent)
    assert waste_of_checkpoints(interval_s, stall_s, mtbf_s, restart_s=restart_s) == pytest.approx(found, abs=0.01)


@pytest.mark.parametrize(
    ("copy_s", "write_s", "steps", "bound"),
    [
        (0.05, 2.0, 21, "one checkpoint in flight"),  # hidden: (0.05 + 2.0) / 0.1
        (0.29, 0.0, 67, "overhead bound"),  # 0.2 sticks out of nine tenths of a step, 0.2 / (0.03 * 0.1)
    ],
)
def test_checkfreq_keeps_one_in_flight_and_its_bound(copy_s: float, write_s: float, steps: int, bound: str) -> None:
    found = checkfreq(0.1, copy_s, write_s, 0.03)
    assert (found.value, found.bound) == (steps, bound)
    stall_s = found.inputs["To"]
    assert stall_s <= 0.03 * found.value * 0.1 + 1e-9
    assert copy_s + write_s - stall_s <= found.value * 0.1 + 1e-9


@given(st.floats(0.01, 10), st.floats(0.1, 1000), st.integers(1, 8), st.floats(1, 1.2))
def test_pccheck_takes_the_shortest_interval_in_which_all_in_flight_are_written(
    step_s: float, write_s: float, in_flight: int, slowdown: float
) -> None:
    steps = pccheck(step_s, write_s, in_flight, slowdown).value
    assert in_flight * slowdown * steps * step_s >= write_s * (1 - 1e-9)
    assert steps == 1 or in_flight * slowdown * (steps - 1) * step_s < write_s * (1 + 1e-9)


def test_lowdiff_is_its_closed_form_and_where_its_objective_is_least() -> None:
    size, rate, replay_s, mtbf_s = 1.5e9, 2e9, 0.5, HOUR
    base, batch = lowdiff(0.01, size, rate, replay_s, mtbf_s)
    assert base.value == round(1 / cbrt(replay_s * rate**2 / (4 * size**2 * mtbf_s**2)) / 0.01)
    assert batch.value == round(cbrt(2 * size * replay_s * mtbf_s / rate) / 0.01)

    def waste(base_s: float, batch_s: float) -> float:
        return waste_of_merged_log(base_s, batch_s, size, rate, replay_s, mtbf_s)

    grid = np.geomspace(0.5, 2, 61)
    best = min(waste(base.value * 0.01 * x, batch.value * 0.01 * y) for x in grid for y in grid)
    assert waste(base.value * 0.01, batch.value * 0.01) <= best * 1.0001


def test_ours_is_where_its_objective_is_least_and_merging_would_promise_too_much() -> None:
    stall_s, flush_s, replay, mtbf_s = 0.02, 0.005, 0.2, HOUR
    base_s, batch_s = sqrt(2 * mtbf_s * stall_s / replay), sqrt(2 * mtbf_s * flush_s)
    grid = np.geomspace(0.5, 2, 61)
    found = [waste_of_log(base_s * x, batch_s * y, stall_s, flush_s, replay, mtbf_s) for x in grid for y in grid]
    assert waste_of_log(base_s, batch_s, stall_s, flush_s, replay, mtbf_s) <= min(found) * 1.0001
    # What LowDiff promises where a batch merges, against what it costs to replay each of its steps.
    merged, batch = lowdiff(0.01, stall_s * 2e9, 2e9, replay, mtbf_s)
    base_s, batch_s = merged.value * 0.01, batch.value * 0.01
    promised = waste_of_merged_log(base_s, batch_s, stall_s * 2e9, 2e9, replay, mtbf_s)
    assert waste_of_log(base_s, batch_s, stall_s, 0.0, replay, mtbf_s) > 1.5 * promised


# -- levels

THREE = [
    LevelCosts(name="memory", stall_s=0.05, write_s=0.0, failures_per_s=4 / (24 * HOUR)),
    LevelCosts(name="partner", stall_s=0.5, write_s=0.0, failures_per_s=3 / (24 * HOUR)),
    LevelCosts(name="shared", stall_s=60.0, write_s=0.0, failures_per_s=0.5 / (24 * HOUR)),
]


def test_a_level_has_youngs_interval_as_a_multiple_of_the_level_before() -> None:
    memory, partner, shared = (one.value for one in schedule(THREE, 0.5))
    assert memory == pytest.approx(sqrt(2 * 0.05 / THREE[0].failures_per_s) / 0.5, abs=1)
    assert partner % memory == 0 and shared % partner == 0
    assert shared * 0.5 == pytest.approx(sqrt(2 * 60 / THREE[2].failures_per_s), rel=0.1)


def test_no_nested_schedule_is_much_better() -> None:
    found = waste_of_levels(THREE, [one.value * 0.5 for one in schedule(THREE, 0.5)])
    best = min(
        waste_of_levels(THREE, [0.5 * first, 0.5 * first * second, 0.5 * first * second * third])
        for first in range(40, 200)
        for second in range(1, 12)
        for third in range(1, 60)
    )
    assert found <= best * 1.02


def test_a_level_that_a_dearer_one_makes_needless_goes_together_with_it() -> None:
    often = LevelCosts(name="partner", stall_s=0.5, write_s=0.0, failures_per_s=400 / (24 * HOUR))
    memory, partner, shared = schedule([THREE[0], often, THREE[2]], 0.5)
    assert memory.value == partner.value < shared.value
    assert memory.bound == "the formula; together with partner"
    together = sqrt(2 * 0.55 / (THREE[0].failures_per_s + often.failures_per_s)) / 0.5
    assert memory.value == pytest.approx(together, abs=1)


def nothing_or(most: float) -> st.SearchStrategy[float]:
    return st.just(0.0) | st.floats(most / 1e6, most)


@given(st.lists(st.tuples(nothing_or(100), nothing_or(1000), nothing_or(1e-3)), min_size=1, max_size=5))
def test_levels_nest_and_leave_time_to_write(costs: list[tuple[float, float, float]]) -> None:
    levels = [LevelCosts(name=str(n), stall_s=a, write_s=b, failures_per_s=c) for n, (a, b, c) in enumerate(costs)]
    steps = [one.value for one in schedule(levels, 0.7)]
    assert all(deeper % cheaper == 0 for cheaper, deeper in pairwise(steps))
    assert all(every * 0.7 >= level.write_s * (1 - 1e-9) for every, level in zip(steps, levels, strict=True))


def test_a_failure_that_never_lets_a_piece_through_wastes_all() -> None:
    assert waste_of_checkpoints(1e6, 1.0, 10.0) == 1.0
    assert waste_of_checkpoints(100.0, 0.0, 1e9) == pytest.approx(100 / 1e9 / 2, rel=1e-3)
    assert 1 - exp(-1) > waste_of_checkpoints(1.0, 0.0, 1.0) > 0.4
