"""The time between failures: arithmetic that agrees with a loop over every step, and with the keepers' rounds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tables import EVERY_KIND, table

from everstep.cadence import Every
from everstep.lab.rhythm import Log, Rhythm, Way, rhythm_of, settled
from everstep.lab.scenario import scenario_of
from everstep.tune.models import WRITING_SHARE

ways = st.builds(
    Way, source=st.just("disk"), every=st.integers(1, 9), write_s=st.floats(0.01, 20), bytes=st.just(1),
    stall_s=st.floats(0.01, 2),
)  # fmt: skip
logs = st.none() | st.builds(
    Log, flush=st.just(1), partner_lag=st.just(1), shared_group=st.just(1), bytes=st.just(1), stall_s=st.floats(0.01, 1)
)


@given(st.lists(ways, max_size=3), logs, st.integers(0, 20), st.floats(0.01, 200))
def test_a_run_is_what_a_loop_over_its_steps_gives(found: list[Way], log: Log | None, first: int, until: float) -> None:
    rhythm = Rhythm(step_s=1.0, ways=tuple(found), log=log, has_replica=False, decisions=())
    step, now, ready = first, 0.0, {n: list[tuple[int, float]]() for n in range(len(found))}
    while True:
        took = 1.0 + (0.0 if log is None else log.stall_s)
        took += sum(way.stall_s for way in found if (step + 1) % way.every == 0)
        if now + took > until + 1e-9:
            break
        step, now = step + 1, now + took
        for n, way in enumerate(found):
            if step % way.every == 0:
                ready[n].append((step, now + way.write_s))
    assert rhythm.step_after(first, until + 1e-9) == step
    assert rhythm.time_s(first, step) == pytest.approx(now, abs=1e-6)
    for n, way in enumerate(found):
        whole = [one for one, at in ready[n] if at <= until + 1e-9]
        assert rhythm.whole(way, first, until + 1e-9, 2) == whole[-2:]


@pytest.mark.parametrize(
    ("cadence", "write_s", "least_s", "most_s"),
    [
        (Every(steps=1), 0.1, 1, 2),  # keepers appoint a step ahead of the newest
        (Every(steps=10), 3.0, 10, 10),
        (Every(steps=10), 25.0, 30, 40),  # a step that comes while one is written is passed over
        (Every(seconds=900), 5.0, 900, 920),
        (Every(), 2.0, 2 / WRITING_SHARE, 2 / WRITING_SHARE + 5),  # a tenth of the time at most
        (Every(), 2000.0, 2000 / WRITING_SHARE, 2000 / WRITING_SHARE * 1.2),
    ],
)
def test_lanes_settle_where_the_rounds_of_keepers_do(
    cadence: Every, write_s: float, least_s: float, most_s: float
) -> None:
    assert least_s <= settled(cadence, 1.0, write_s) <= most_s


def test_every_strategy_pays_where_it_should() -> None:
    scenario = scenario_of(table(strategies=EVERY_KIND))
    rhythms = {one.name: rhythm_of(scenario, one, 8) for one in scenario.strategies}
    one_rank, all_ranks = rhythms["torch-save"].ways[0], rhythms["dcp"].ways[0]
    assert one_rank.stall_s == pytest.approx(8.0) and all_ranks.stall_s == pytest.approx(4.0)
    assert all_ranks.every < one_rank.every  # cheaper, so more often
    assert rhythms["checkfreq"].ways[0].every == 5  # 0.05 s to copy and 4 s to write, in steps of a second
    assert [way.source for way in rhythms["in-memory"].ways] == ["memory", "partner", "shared"]
    assert [way.source for way in rhythms["scr"].ways] == ["memory", "parity", "shared"]
    assert [way.source for way in rhythms["snapshot"].ways] == ["memory", "partner", "disk", "shared"]
    assert rhythms["snapshot"].ways[0].every == 1 and rhythms["snapshot"].log is None
    assert rhythms["log"].log is not None and rhythms["log"].ways[0].every > 1
    assert rhythms["replica"].has_replica and rhythms["replica"].ways[0].every == 4 * rhythms["log"].ways[0].every
    assert rhythms["auto"].log is None  # a base a step hides behind the step: the controller stays with bases
    assert all(rhythm.decisions for name, rhythm in rhythms.items() if name not in ("snapshot", "in-memory"))


def test_the_controller_turns_to_a_log_where_bases_cost_too_much() -> None:
    heavy = scenario_of(
        table(strategies=[{"kind": "auto"}], training={"step": "1s", "state": "800GB", "record": "8GB"})
    )
    assert rhythm_of(heavy, heavy.strategies[0], 8).log is not None


def test_fewer_nodes_take_longer_for_the_same_batch() -> None:
    scenario = scenario_of(table())
    full, half = (rhythm_of(scenario, scenario.strategies[0], nodes) for nodes in (8, 4))
    assert (full.step_s, half.step_s) == (1.0, 2.0)
    told = replace(scenario.strategies[0], kind="dcp", every_s=60.0)
    assert [rhythm_of(scenario, told, nodes).ways[0].every for nodes in (8, 4)] == [60, 30]
