"""The formulas: they move the right way, their units agree, and no constraint is overstepped."""

from __future__ import annotations

from dataclasses import replace
from math import floor, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.tune.models import (
    DISK_SHARE,
    LOG_PER_BASE,
    MTBF_S,
    Costs,
    has_moved,
    steps_per_base,
    steps_per_flush,
    steps_per_values,
)

PLENTY = 10**18
FREE = Costs(
    step_s=0.1, base_stall_s=0.02, base_write_s=0.0, base_bytes=PLENTY, record_stall_s=0.0, record_write_s=0.0,
    record_bytes=1, replay_s=0.02, free_bytes=PLENTY, mtbf_s=3600.0,
)  # fmt: skip
seconds = st.floats(1e-4, 1e4)
costs = st.builds(
    Costs, step_s=seconds, base_stall_s=seconds, base_write_s=seconds, base_bytes=st.integers(1, 10**12),
    record_stall_s=seconds, record_write_s=seconds, record_bytes=st.integers(1, 10**12),
    replay_s=st.one_of(st.none(), seconds), free_bytes=st.integers(0, 10**14),
    mtbf_s=st.one_of(st.none(), st.floats(60, 1e8)),
)  # fmt: skip


def test_an_interval_is_the_formula_where_nothing_bounds_it() -> None:
    found = steps_per_base(FREE, budget=0.5, recovery_s=1e9)
    assert found.value == floor(sqrt(2 * 3600 * 0.02 / (0.02 / 0.1)) / 0.1) == 268
    assert (found.bound, found.assumed) == ("the formula", ())
    inputs = found.inputs
    assert sqrt(2 * inputs["M"] * inputs["C_F"] / inputs["r"]) / inputs["T"] == pytest.approx(268, abs=1)


def test_a_group_is_the_formula_where_nothing_bounds_it() -> None:
    found = steps_per_flush(0.1, 0.005, slots=10_000, lose_steps=None, lose_s=None, mtbf_s=3600.0)
    assert (found.value, found.bound) == (floor(sqrt(2 * 3600 * 0.005) / 0.1), "the formula")


def test_values_cost_as_much_as_the_records_between_them_with_any_number_of_ranks() -> None:
    gradient, values = 1_000_000, 80_000_000  # of a step, over all ranks; of each rank
    for world in (1, 2, 4, 64):
        found = steps_per_values(world * values, gradient, slots=100)
        assert (found.value, found.bound) == (80 * world, "the formula")
        assert world * values / found.value == gradient


def test_values_that_are_small_are_not_saved_more_often_than_the_ring_fills() -> None:
    found = steps_per_values(4, 1, slots=15)
    assert (found.value, found.bound) == (7, "half of the ring")


@pytest.mark.parametrize(
    ("bound", "change", "limit"),
    [
        ("recovery time", {"replay_s": 1.0, "base_stall_s": 0.1}, 60),
        ("size of the log", {"base_bytes": 10, "record_bytes": 5}, LOG_PER_BASE * 2),
        ("free disk space", {"free_bytes": 100}, 100 * DISK_SHARE),
        ("time to write a base", {"base_write_s": 10.0}, 1000),
        ("overhead budget", {"base_stall_s": 30.0, "replay_s": 10.0}, 30 / 0.05 / 0.1),
    ],
)
def test_the_constraint_that_decides_is_named(bound: str, change: dict[str, float], limit: float) -> None:
    found = steps_per_base(replace(FREE, **change), budget=0.05)
    assert found.bound == bound
    assert found.value == pytest.approx(limit, abs=1)


@given(costs)
def test_an_interval_keeps_its_constraints(one: Costs) -> None:
    found = steps_per_base(one, budget=0.03)
    replay_s = 0.2 * one.step_s if one.replay_s is None else one.replay_s
    assert 1 <= found.value <= 1_000_000
    if found.bound in ("the formula", "recovery time", "size of the log", "free disk space") and found.value > 1:
        assert found.value * replay_s <= 60 * 1.001
        assert found.value * one.record_bytes <= LOG_PER_BASE * one.base_bytes * 1.001
        assert found.value * one.record_bytes <= DISK_SHARE * one.free_bytes * 1.001
    if found.value < 1_000_000:
        assert (found.value + 1) * one.step_s >= one.base_write_s
        assert (found.value + 1) * one.step_s * 0.03 >= one.base_stall_s * 0.999
    assert found.assumed == tuple(n for n, seen in (("M", one.mtbf_s), ("r", one.replay_s)) if seen is None)


@given(costs, st.floats(1, 100))
def test_rarer_failures_and_dearer_bases_never_shorten_the_interval(one: Costs, more: float) -> None:
    now = steps_per_base(one, budget=0.03).value
    assert steps_per_base(replace(one, mtbf_s=(one.mtbf_s or MTBF_S) * more), budget=0.03).value >= now
    assert steps_per_base(replace(one, base_stall_s=one.base_stall_s * more), budget=0.03).value >= now


@given(seconds, seconds, st.integers(4, 28), st.floats(1, 100))
def test_rarer_failures_and_dearer_flushes_never_make_groups_smaller(
    step_s: float, flush_s: float, slots: int, more: float
) -> None:
    now = steps_per_flush(step_s, flush_s, slots=slots, lose_steps=None, lose_s=None).value
    assert steps_per_flush(step_s, flush_s * more, slots=slots, lose_steps=None, lose_s=None).value >= now
    rarer = steps_per_flush(step_s, flush_s, slots=slots, lose_steps=None, lose_s=None, mtbf_s=MTBF_S * more)
    assert rarer.value >= now
    assert now <= slots / 2


@given(seconds, seconds, st.integers(4, 28), st.integers(1, 50), st.floats(0.01, 100))
def test_no_more_waits_for_a_flush_than_may_be_lost(
    step_s: float, flush_s: float, slots: int, steps: int, lose_s: float
) -> None:
    assert steps_per_flush(step_s, flush_s, slots=slots, lose_steps=steps, lose_s=None).value <= steps
    found = steps_per_flush(step_s, flush_s, slots=slots, lose_steps=None, lose_s=lose_s)
    assert found.value == 1 or found.value * step_s + flush_s <= lose_s * 1.001


@given(costs, st.floats(0.001, 1000))
def test_the_unit_of_time_does_not_matter(one: Costs, unit: float) -> None:
    """A run on a clock that is `unit` times as fast keeps its steps."""
    timed = ("step_s", "base_stall_s", "base_write_s")
    scaled = replace(one, **{name: getattr(one, name) * unit for name in timed})
    scaled = replace(scaled, mtbf_s=(one.mtbf_s or MTBF_S) * unit, replay_s=one.replay_s and one.replay_s * unit)
    found, again = (steps_per_base(c, budget=0.03, recovery_s=s) for c, s in ((one, 60.0), (scaled, 60.0 * unit)))
    assert again.value == pytest.approx(found.value, abs=1, rel=1e-6)


def test_only_what_moves_by_more_than_a_quarter_is_told() -> None:
    assert has_moved(None, 1)
    assert [n for n in range(1, 200) if not has_moved(100, n)] == list(range(75, 126))
