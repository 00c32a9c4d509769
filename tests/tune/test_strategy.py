"""Which strategy: by the costs alone, both ways, without fluttering, and the same on every rank."""

from __future__ import annotations

from dataclasses import replace

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from everstep.cadence import Every
from everstep.tune.controller import Controller, Measured, merge
from everstep.tune.models import Costs
from everstep.tune.strategy import Way, Wish, choose

CHEAP = Costs(
    step_s=0.1, base_stall_s=0.001, base_write_s=1.0, base_bytes=3000, record_stall_s=0.0003, record_write_s=0.01,
    record_bytes=1000, replay_s=0.01, free_bytes=10**12,
)  # fmt: skip
DEAR = replace(CHEAP, base_stall_s=0.05)
EVERY_STEP = Wish(budget=0.03, capture_steps=1, durable_steps=None)


def chosen(costs: Costs, wish: Wish = EVERY_STEP, now: Way = "snapshot", refusal: str = "") -> Way:
    return choose(now, costs, wish, steps_per_base=100, refusal=refusal).strategy


def test_bases_are_kept_while_they_fit_the_budget() -> None:
    assert chosen(CHEAP) == "snapshot"
    assert chosen(DEAR, replace(EVERY_STEP, capture_steps=20)) == "snapshot"


def test_a_log_takes_over_where_bases_cost_more_than_the_budget_and_records_less() -> None:
    found = choose("snapshot", DEAR, EVERY_STEP, steps_per_base=100)
    assert found.strategy == "log"
    assert found.reason == "bases cost 50.0% of the time, the budget is 3.0%; the log costs 0.8%"
    assert found.inputs["overhead_of_bases"] == 0.5


def test_records_that_cost_as_much_as_bases_are_not_taken() -> None:
    assert chosen(replace(DEAR, record_stall_s=0.05)) == "snapshot"


def test_a_disk_that_cannot_take_bases_so_often_gets_records() -> None:
    wish = replace(EVERY_STEP, durable_steps=1)
    assert chosen(CHEAP, wish) == "log"
    assert chosen(replace(CHEAP, base_write_s=0.05), wish) == "snapshot"
    assert chosen(replace(CHEAP, record_write_s=0.2), wish) == "snapshot"  # nor records: then the simpler thing
    assert chosen(CHEAP, replace(wish, durable_steps=50)) == "snapshot"


def test_where_no_step_can_be_repeated_there_is_no_log() -> None:
    found = choose("log", DEAR, EVERY_STEP, steps_per_base=100, refusal="Odd draws random numbers")
    assert (found.strategy, found.reason) == ("snapshot", "there can be no log: Odd draws random numbers")


@given(st.floats(1e-6, 1), st.floats(1e-6, 1), st.floats(0.01, 10), st.one_of(st.none(), st.floats(1, 100)))
def test_the_choice_does_not_flutter(base: float, record: float, write: float, durable: float | None) -> None:
    """What is chosen while the costs stay is chosen again, whatever came before."""
    costs = replace(CHEAP, base_stall_s=base, record_stall_s=record, base_write_s=write)
    wish = replace(EVERY_STEP, durable_steps=durable)
    for start in ("snapshot", "log"):
        once = chosen(costs, wish, start)  # type: ignore[arg-type]
        assert chosen(costs, wish, once) == once


@given(st.floats(1e-6, 1), st.floats(1e-6, 1))
def test_dearer_bases_never_turn_a_log_back(base: float, more: float) -> None:
    if chosen(replace(CHEAP, base_stall_s=base)) == "log":
        assert chosen(replace(CHEAP, base_stall_s=base + more)) == "log"


SEEN = Measured(
    step_s=0.1, base_stall_s=0.05, base_write_s=1.0, base_bytes=3000, record_stall_s=-1.0, record_write_s=-1.0,
    record_bytes=1000, replay_s=-1.0, free_bytes=10**12,
)  # fmt: skip


def controller(*, may_choose: bool = True) -> Controller:
    return Controller(now="snapshot", may_choose=may_choose, capture=Every(steps=1), durable=Every(), budget=0.03)


def test_a_cost_that_was_seen_takes_the_place_of_the_estimate_and_is_remembered() -> None:
    one = controller()
    one.decide(SEEN)
    assert one.strategy == "log"
    one.decide(msgspec.structs.replace(SEEN, base_stall_s=-1.0, record_stall_s=0.06))
    assert one.strategy == "snapshot"
    one.decide(SEEN)
    assert one.strategy == "snapshot", "the estimate is taken again, though it was found to be wrong"


def test_what_was_refused_once_is_not_tried_again() -> None:
    one = controller()
    one.decide(msgspec.structs.replace(SEEN, refusal="Odd is odd"))
    one.decide(SEEN)
    assert (one.strategy, one.choice.reason) == ("snapshot", "there can be no log: Odd is odd")


def test_a_strategy_that_was_asked_for_is_kept() -> None:
    one = controller(may_choose=False)
    one.decide(SEEN)
    assert (one.strategy, one.choice.reason) == ("snapshot", "as told")
    assert one.interval is not None


def test_ranks_that_have_measured_different_things_decide_the_same() -> None:
    said = [
        SEEN,
        msgspec.structs.replace(SEEN, base_stall_s=0.001, free_bytes=5),
        msgspec.structs.replace(SEEN, refusal="x"),
    ]
    found = merge(said)
    assert found == merge(said[::-1])
    assert (found.base_stall_s, found.free_bytes, found.refusal) == (0.05, 5, "x")
