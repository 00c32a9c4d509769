"""Strategies side by side through the same losses: time by hand, counts, what is exact, and what can be learnt."""

from __future__ import annotations

from dataclasses import replace

import pytest

from everstep.errors import BadConfig
from everstep.lab.accuracy import trainings
from everstep.lab.lessons import Lesson
from everstep.lab.mishaps import Mishap, Place, draw_places, mishaps_of
from everstep.lab.trial import LAYERS, WAYS, Costs, Trained, Trial, judge

SMALL = Trial(workers=4, steps=12, places=(Place(8, 2, 1),), intervals=(5,), seeds=1)


def by_name(trial: Trial) -> dict[str, Trained]:
    return {one.strategy: one for one in trainings(trial)}


def test_times_and_counts_are_what_one_works_out_by_hand() -> None:
    found = by_name(SMALL)
    came = 1 / 3 + 2 / 3 / 3  # the forward pass, and one layer of three
    assert list(found) == [
        "undisturbed", "restart, every 5", "rollback", "forward", "forward, unscaled", "forward, dropped"
    ]  # fmt: skip
    assert found["undisturbed"].time == 12
    restart = found["restart, every 5"]
    assert restart.time == pytest.approx(12 + 2 * 0.5 + came + 35 + 2)
    assert restart.wasted == pytest.approx(
        {"broken off": came, "done again": 2.0, "recovery": 35.0, "checkpoints": 1.0}
    )
    assert found["rollback"].time == pytest.approx(12 + came + 1.2)
    assert (restart.again, found["rollback"].again) == (2, 0)
    for name in ("forward", "forward, unscaled", "forward, dropped"):
        one = found[name]
        assert (one.buckets, one.samples, one.again) == (2, 128 // 4, 0)
        assert one.time == pytest.approx(12 + 0.1)
    assert {name for name, one in found.items() if one.exact} == {"undisturbed", "restart, every 5", "rollback"}
    for one in found.values():
        assert one.time == pytest.approx(one.steps + sum(one.wasted.values()))
        assert one.last.step == 12 and one.last.time == one.time
    assert found["undisturbed"].failures == 0 and restart.failures == 1


def test_costs_are_those_that_are_given() -> None:
    costs = Costs(restart=7.0, rollback=3.0, forward=2.0, checkpoint=0.25)
    found = by_name(replace(SMALL, costs=costs, ways=("restart", "rollback", "forward")))
    came = 1 / 3 + 2 / 3 / 3
    assert found["restart, every 5"].time == pytest.approx(12 + 2 * 0.25 + came + 7 + 2)
    assert found["rollback"].time == pytest.approx(12 + came + 3)
    assert found["forward"].time == 12 + 2


def test_who_is_lost_between_two_steps_may_take_a_step_along() -> None:
    trial = replace(SMALL, places=(Place(8, 2, 0),), ways=("rollback", "restart", "forward"), intervals=(7,))
    (mishap,) = trial.mishaps(0)
    assert mishap.behind
    found = by_name(trial)
    assert (found["rollback"].again, found["rollback"].exact) == (1, True)
    assert (found["restart, every 7"].again, found["restart, every 7"].exact) == (0, True)
    assert (found["forward"].buckets, found["forward"].samples) == (3, 32)


def test_many_losses_in_a_row_are_lived_through() -> None:
    places = (Place(1, 0, 0), Place(2, 1, 0), Place(3, 3, 2), Place(4, 0, 0), Place(4, 1, 0), Place(12, 2, 2))
    found = by_name(replace(SMALL, places=places))
    assert found["rollback"].exact and found["restart, every 5"].exact
    assert found["forward"].buckets == 3 + 3 + 1 + 3 + 1
    assert found["forward"].samples == 6 * 32
    assert found["forward"].failures == 5


def test_a_training_is_a_function_of_the_trial() -> None:
    trial = Trial(workers=3, steps=10, failures=2, seeds=2, ways=("rollback", "forward"))
    assert list(trainings(trial)) == list(trainings(trial))
    seeds = [one.digest for one in trainings(trial) if one.strategy == "undisturbed"]
    assert len(set(seeds)) == 2


def test_verdicts_compare_with_the_undisturbed_training_of_the_same_seed() -> None:
    trial = replace(SMALL, seeds=2, ways=("rollback", "forward-dropped"))
    found = list(trainings(trial))
    undisturbed, rollback, dropped = judge(found)
    assert (rollback.accuracy_change.mean, rollback.loss_change.mean, rollback.exact) == (0.0, 0.0, 2)
    assert rollback.loss_change.within == 0.0, "seed by seed, and not only in the mean"
    changes = [found[n + 2].last.loss - found[n].last.loss for n in (0, 3)]
    assert dropped.loss_change.mean == pytest.approx(sum(changes) / 2) and dropped.exact == 0
    assert undisturbed.overhead.mean == 0.0
    assert [one.seeds for one in judge(found[:4])] == [2, 1, 1]


@pytest.mark.parametrize(("kind", "steps"), [("mlp", 60), ("cnn", 80), ("gpt", 40)])
def test_what_is_made_up_can_be_learnt(kind: str, steps: int) -> None:
    (undisturbed,) = trainings(Trial(model=kind, workers=2, steps=steps, ways=(), seeds=1))
    chance = 0.1 if kind != "gpt" else 1 / 24
    assert undisturbed.curve[0].accuracy < 2.5 * chance
    assert undisturbed.last.accuracy > 4 * chance
    assert undisturbed.last.loss < 0.8 * undisturbed.curve[0].loss
    assert len(Lesson(kind, workers=2, samples=1, seed=0).layers) == LAYERS[kind]


def test_losses_are_drawn_by_the_seed() -> None:
    drawn = [draw_places(20, steps=40, workers=5, layers=3, seed=seed) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len({place.step for place in drawn[0]}) == 20
    mishaps = mishaps_of(drawn[0], workers=5, seed=0)
    assert len({len(one.behind) for one in mishaps}) > 1
    for one in mishaps:
        assert len(one.behind) < 4 and not set(one.behind) & set(one.ranks)
    assert mishaps_of([Place(1, 0, 0)], workers=64, seed=0)[0].behind == ()
    assert mishaps_of([Place(5, 0, 1), Place(5, 1, 1)], workers=3, seed=0) == [
        Mishap(step=5, layer=1, ranks=(0, 1), behind=())
    ]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": "rnn"}, "--model rnn must be one of mlp, cnn, gpt"),
        ({"workers": 1}, "--workers must be from 2 to 64, not 1"),
        ({"workers": 65}, "--workers must be from 2 to 64, not 65"),
        ({"steps": 0}, "--steps must be from 1 to 100000, not 0"),
        ({"seeds": 0}, "--seeds must be from 1 to 1000, not 0"),
        ({"intervals": (0,)}, "--interval must be from 1 to 100000, not 0"),
        ({"ways": ("backward",)}, f"--strategy backward must be one of {', '.join(WAYS)}"),
        ({"places": (Place(13, 0, 0),)}, "--fail 13:0:0: the step must be from 1 to 12, not 13"),
        ({"places": (Place(1, 4, 0),)}, "--fail 1:4:0: the rank must be from 0 to 3, not 4"),
        ({"places": (Place(1, 0, 3),)}, "--fail 1:0:3: the layer must be from 0 to 2, not 3"),
        ({"places": (Place(1, 0, 0), Place(1, 1, 2))}, "is lost at the same layer, 0"),
        ({"places": tuple(Place(1, rank, 0) for rank in range(4))}, "of 4 workers 3 may be lost at once"),
        ({"failures": 1}, "give one of them"),
        ({"places": (), "failures": 13}, "--failures must be from 0 to 12, not 13"),
        ({"costs": Costs(forward=-1.0)}, "--forward-cost must be from 0 to 1000000 steps, not -1"),
        ({"costs": Costs(restart=float("nan"))}, "--restart-cost must be from 0 to 1000000 steps, not nan"),
    ],
)
def test_what_cannot_be_is_named_with_what_can(changes: dict[str, object], named: str) -> None:
    with pytest.raises(BadConfig) as refused:
        replace(SMALL, **changes)  # type: ignore[arg-type]
    assert named in str(refused.value)
