"""What is left after losses: the plan of a few who stand for all is the plan of all."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tables import table

from everstep.lab.holdings import Holdings, begin_life
from everstep.lab.rhythm import rhythm_of
from everstep.lab.scenario import scenario_of
from everstep.recover.plan import make_plan
from everstep.types import Survey

STRATEGIES = [
    {"name": "partner", "kind": "snapshot"},
    {"name": "parity", "kind": "snapshot", "protect": "parity", "group": 3},
    {"name": "none", "kind": "snapshot", "protect": "none"},
    {"name": "log", "kind": "log"},
    {"name": "replica", "kind": "replica"},
]
SCENARIO = scenario_of(
    table(
        cluster={"nodes": 12, "nodes_per_rack": 2}, strategies=[{**one, "shared_every": "120s"} for one in STRATEGIES]
    )
)
LIKE_ALL = list(range(12))


def plan_of(survey: Survey) -> tuple[object, ...]:
    found = make_plan(survey, {one.node for one in (*survey.holdings, *survey.records, *survey.parities)})
    return found.step, found.base, sorted({part.source for part in found.parts})


losses = st.lists(
    st.tuples(st.sampled_from(["node", "process", "cluster"]), st.sets(st.integers(0, 11), min_size=1, max_size=4)),
    max_size=3,
)


@settings(max_examples=150)
@given(st.sampled_from(range(len(STRATEGIES))), losses, losses, st.sets(st.integers(0, 11), max_size=3))
def test_a_few_stand_for_all(number: int, before: list, after: list, absent: set[int]) -> None:
    strategy = SCENARIO.strategies[number]
    holdings, step, now = Holdings(SCENARIO, strategy), 0, 0.0
    for life, (seats, struck) in enumerate([(LIKE_ALL, before), ([s for s in LIKE_ALL if s not in absent], after)]):
        rhythm = rhythm_of(SCENARIO, strategy, len(seats))
        ready = {way.source: now + way.write_s for way in rhythm.ways}
        holdings.begin(begin_life(SCENARIO, strategy, seats, number=life, step=step), now, ready)
        for way in rhythm.ways:
            if whole := rhythm.whole(way, step, 400.0, 2):
                holdings.add(way.source, whole, now + 400)
        step, now = rhythm.step_after(step, 400.0), now + 400
        for kind, who in struck:
            holdings.lose(kind, set(LIKE_ALL) if kind == "cluster" else who.intersection(seats))
        few, _ = holdings.survey(step, now, rhythm)
        everybody, shown = holdings.survey_of(LIKE_ALL, step, now, rhythm)
        assert plan_of(few)[:2] == plan_of(everybody)[:2]
        assert set(plan_of(few)[2]) == set(plan_of(everybody)[2])
        assert shown == len(seats)
        step = plan_of(few)[0] or 0


def lost(name: str, kind: str, seats: set[int]) -> tuple[int, object, list[str]]:
    """The newest step, and the plan, after a loss."""
    strategy = next(one for one in SCENARIO.strategies if one.name == name)
    holdings, rhythm = Holdings(SCENARIO, strategy), rhythm_of(SCENARIO, strategy, 12)
    ready = {way.source: 0.0 for way in rhythm.ways}
    holdings.begin(begin_life(SCENARIO, strategy, LIKE_ALL, number=0, step=0), 0.0, ready)
    for way in rhythm.ways:
        holdings.add(way.source, rhythm.whole(way, 0, 400.0, 2), 400.0)
    newest = rhythm.step_after(0, 400.0)
    holdings.lose(kind, seats)
    step, _, sources = plan_of(holdings.survey(newest, 400.0, rhythm)[0])
    return newest, step, sources


def test_each_kind_of_loss_is_survived_by_what_is_made_for_it() -> None:
    newest, step, sources = lost("partner", "process", {3})
    assert newest - step <= 1 and sources == ["memory"]
    newest, step, sources = lost("partner", "node", {3})
    assert newest - step <= 3 and sources == ["memory", "partner"]
    newest, step, sources = lost("parity", "node", {3})
    assert newest - step <= 3 and sources == ["memory", "parity"]
    newest, step, sources = lost("partner", "cluster", set(LIKE_ALL))
    assert newest - step >= 1 and sources == ["disk"]
    newest, step, sources = lost("none", "node", {3})
    assert newest - step > 10 and sources == ["shared"]
    newest, step, sources = lost("log", "node", {3})
    assert newest - step <= 1 and "partner" in sources
    newest, step, sources = lost("log", "process", {3})
    assert newest == step


def test_a_node_and_its_partner_are_one_loss_too_many() -> None:
    (partner,) = begin_life(SCENARIO, SCENARIO.strategies[0], LIKE_ALL, number=0, step=0).protection.holders[3]
    alone, both = lost("partner", "node", {3}), lost("partner", "node", {3, partner})
    assert alone[1] > both[1] and both[2] == ["shared"]
