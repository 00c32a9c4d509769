"""The plan: a pure function, so every promise of it is tried on surveys that nobody would think of."""

from __future__ import annotations

from itertools import product

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.recover.plan import make_plan, merge, without
from everstep.types import Attempt, Holding, Plan, Records, Rejection, Survey

STEPS, GENERATIONS, WORLDS, NODES = range(1, 4), ("aa", "bb"), (1, 2, 3), ("n1", "n2")


def held(
    *, source: str, step: int, rank: int, world: int, generation: str = "aa", node: str = "n1", everywhere: bool = False
) -> Holding:
    return Holding(
        source=source, node=node, step=step, rank=rank, world=world, generation=generation, bytes=1, cut_time=0.0,
        everywhere=everywhere,
    )  # type: ignore[arg-type]  # fmt: skip


places = st.frozensets(st.tuples(st.sampled_from(["memory", "disk"]), st.sampled_from(NODES)), max_size=4)


@st.composite
def one_life_of_a_step(draw: st.DrawFn) -> list[Holding]:
    """Some parts of one step, each in any number of places; disks are common to all nodes, or each has its own."""
    is_common = draw(st.booleans())
    step, generation, world = (draw(st.sampled_from(of)) for of in (STEPS, GENERATIONS, WORLDS))
    return [
        held(
            source=source,
            node=node,
            step=step,
            rank=rank,
            world=world,
            generation=generation,
            everywhere=is_common and source == "disk",
        )
        for rank in range(world)
        for source, node in sorted(draw(places))
    ]


attempts = st.builds(
    Attempt, format=st.just(1), step=st.sampled_from(STEPS), count=st.integers(1, 2), error=st.sampled_from(["", "no"])
)
rejections = st.builds(Rejection, step=st.integers(0, 9), source=st.just("disk"), reason=st.just("bits flipped"))
surveys = st.builds(
    Survey,
    holdings=st.lists(one_life_of_a_step(), max_size=5).map(
        lambda lives: tuple({h: 0 for life in lives for h in life})
    ),
    rejections=st.lists(rejections, max_size=2).map(tuple),
    attempts=st.lists(attempts, max_size=3, unique_by=lambda a: a.step).map(tuple),
)
readers = st.sampled_from([{"n1"}, {"n2"}, {"n1", "n2"}])
many = settings(max_examples=250, derandomize=True)


def readable(holding: Holding, nodes: set[str]) -> bool:
    return holding.everywhere or holding.node in nodes


def whole_steps(survey: Survey, nodes: set[str]) -> set[int]:
    """By trying everything: the steps of which one generation of one world has a readable part of every rank."""
    return {
        step
        for step, generation, world in product(STEPS, GENERATIONS, WORLDS)
        if all(
            any(
                (h.step, h.generation, h.world, h.rank) == (step, generation, world, rank) and readable(h, nodes)
                for h in survey.holdings
            )
            for rank in range(world)
        )
    }


def suspects(survey: Survey) -> set[int]:
    return {attempt.step for attempt in survey.attempts if attempt.error or attempt.count >= 2}


@many
@given(surveys, readers)
def test_the_newest_whole_step_is_chosen_and_suspects_only_when_nothing_else_is_left(
    survey: Survey, nodes: set[str]
) -> None:
    whole = whole_steps(survey, nodes)
    trusted = whole - suspects(survey)
    assert make_plan(survey, nodes).step == max(trusted or whole, default=None)


@many
@given(surveys, readers)
def test_a_plan_takes_one_part_of_every_rank_and_never_mixes_generations(survey: Survey, nodes: set[str]) -> None:
    plan = make_plan(survey, nodes)
    if plan.step is None:
        assert plan.parts == ()
        return
    assert [part.rank for part in plan.parts] == list(range(plan.world))
    assert {(part.step, part.world) for part in plan.parts} == {(plan.step, plan.world)}
    assert len({part.generation for part in plan.parts}) == 1
    assert all(part in survey.holdings and readable(part, nodes) for part in plan.parts)


@many
@given(surveys, readers)
def test_memory_is_taken_before_disk_for_every_part_by_itself(survey: Survey, nodes: set[str]) -> None:
    for part in make_plan(survey, nodes).parts:
        same = [
            h
            for h in survey.holdings
            if (h.step, h.generation, h.world, h.rank) == (part.step, part.generation, part.world, part.rank)
        ]
        has_memory = any(h.source == "memory" and readable(h, nodes) for h in same)
        assert part.source == ("memory" if has_memory else "disk")


@many
@given(surveys, readers)
def test_every_newer_step_that_was_passed_over_is_explained(survey: Survey, nodes: set[str]) -> None:
    plan = make_plan(survey, nodes)
    explained = {rejection.step for rejection in plan.rejections}
    newer = {h.step for h in survey.holdings if plan.step is None or h.step > plan.step}
    assert newer <= explained
    assert all(rejection.reason for rejection in plan.rejections)
    assert set(survey.rejections) <= set(plan.rejections)
    assert [r.step for r in plan.rejections] == sorted((r.step for r in plan.rejections), reverse=True)


@many
@given(surveys, readers, st.randoms(use_true_random=False))
def test_the_order_in_which_parts_were_found_does_not_change_the_step(survey: Survey, nodes: set[str], dice) -> None:  # type: ignore[no-untyped-def]
    shuffled = list(survey.holdings)
    dice.shuffle(shuffled)
    other = Survey(holdings=tuple(shuffled), rejections=survey.rejections, attempts=survey.attempts)
    assert make_plan(other, nodes).step == make_plan(survey, nodes).step


@many
@given(surveys, readers)
def test_striking_out_parts_never_brings_back_what_was_struck_out_and_ends(survey: Survey, nodes: set[str]) -> None:
    struck: list[Holding] = []
    plan = make_plan(survey, nodes)
    while plan.parts:
        assert not set(struck) & set(plan.parts)
        struck.append(plan.parts[-1])
        survey = without(survey, plan.parts[-1], "it fails its check")
        plan = make_plan(survey, nodes)
    assert not whole_steps(survey, nodes)
    assert {h.step for h in struck} <= {r.step for r in plan.rejections}


@many
@given(st.lists(surveys, min_size=1, max_size=2))
def test_what_several_ranks_have_seen_counts_once(found: list[Survey]) -> None:
    merged = merge(found)
    assert merge([*found, *found]) == merged
    assert len(set(merged.holdings)) == len(merged.holdings)
    assert set(merged.holdings) == {h for survey in found for h in survey.holdings}


# -- the same, as stories


def plan_of(*parts: Holding, attempts: tuple[Attempt, ...] = ()) -> Plan:
    return make_plan(Survey(holdings=parts, attempts=attempts), {"n1"})


def test_one_rank_from_memory_and_another_from_disk_make_a_whole_step() -> None:
    plan = plan_of(held(source="memory", step=7, rank=0, world=2), held(source="disk", step=7, rank=1, world=2))
    assert plan.step == 7
    assert [part.source for part in plan.parts] == ["memory", "disk"]


def test_parts_of_two_lives_are_not_one_checkpoint() -> None:
    plan = plan_of(
        held(source="memory", step=7, rank=0, world=2, generation="aa"),
        held(source="memory", step=7, rank=1, world=2, generation="bb"),
        held(source="disk", step=5, rank=0, world=1),
    )
    assert plan.step == 5
    assert [r.step for r in plan.rejections] == [7, 7]
    assert "no readable part of rank 1 (of 2; there are parts of [0])" in {r.reason for r in plan.rejections}


def test_memory_of_another_node_cannot_be_read() -> None:
    assert plan_of(held(source="memory", step=7, rank=0, world=1, node="n2")).step is None


def test_a_step_that_ended_two_readers_is_offered_last_and_one_reader_may_die_by_chance() -> None:
    parts = (held(source="disk", step=7, rank=0, world=1), held(source="disk", step=5, rank=0, world=1))
    once = Attempt(format=1, step=7, count=1)
    twice = Attempt(format=1, step=7, count=2)
    assert plan_of(*parts, attempts=(once,)).step == 7
    plan = plan_of(*parts, attempts=(twice,))
    assert plan.step == 5
    assert plan.rejections[0].reason == "2 readers in a row died while loading it"
    assert plan_of(parts[0], attempts=(twice,)).step == 7


def test_a_damaged_base_and_the_values_of_its_step_have_nothing_to_do_with_each_other() -> None:
    base, older = (held(source="disk", step=step, rank=0, world=1) for step in (7, 4))
    values = msgspec.structs.replace(base, bytes=2)
    records = Records(
        source="disk", node="n1", rank=0, world=1, first=5, last=7, bytes=1, cut_time=0.0, has_values=True
    )  # fmt: skip
    survey = Survey(holdings=(base, older), records=(records,), values=(values,))
    assert (make_plan(survey, {"n1"}).step, make_plan(survey, {"n1"}).base) == (7, 7)
    without_base = make_plan(without(survey, base, "bits flipped"), {"n1"})
    assert (without_base.step, without_base.base, without_base.values) == (7, 4, (values,))
    without_values = make_plan(without(survey, values, "bits flipped"), {"n1"})
    assert (without_values.step, without_values.base) == (7, 7)
    neither = without(without(survey, base, "bits flipped"), values, "bits flipped")
    assert make_plan(neither, {"n1"}).step == 4
