"""A run that turns from bases to the log and back every few steps, killed around each turn, ends with the same bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from harness import EVERYWHERE, ON_TWO, Stage, differing

from everstep.events import Chose, read_events

Make = Callable[..., Stage]
every_few_steps = pytest.mark.parametrize("steps", [1, 2, 3])


def turning(stage: Stage, steps: int) -> Stage:
    stage.strategy, stage.turn_every = "auto", steps
    return stage


def ways(stage: Stage) -> set[str]:
    return {event.strategy for event in read_events(stage.directory / "run") if isinstance(event, Chose)}


@every_few_steps
@pytest.mark.parametrize("name", ["adam", "batch_norm_and_dropout"])
def test_killed_in_every_place_it_ends_with_the_same_bits(name: str, steps: int, stage: Make) -> None:
    unbroken, again = stage(name).play(), turning(stage(name), steps)
    assert differing(unbroken, again.play(EVERYWHERE)) == []
    assert ways(again) >= ({"snapshot", "log"} if steps < 3 else {"log"})  # lives are short, and begin with their way
    assert again.left_in_memory() == []


@every_few_steps
def test_rebooted_in_every_place_the_disk_alone_gives_the_same_bits(steps: int, stage: Make) -> None:
    unbroken, again = stage("adam").play(), turning(stage("adam"), steps)
    assert differing(unbroken, again.play(EVERYWHERE, reboot=True, other_seeds=False, may_lose=1000)) == []


@every_few_steps
@pytest.mark.parametrize("keeper", ["inline", "process"])
def test_two_ranks_killed_one_at_a_time_end_with_the_same_bits(keeper: str, steps: int, stage: Make) -> None:
    name = "adamw_with_amsgrad"
    unbroken, again = stage(name).play(world=2), turning(stage(name, keeper), steps)
    assert differing(unbroken, again.play(ON_TWO, world=2)) == []
    assert "log" in ways(again)
    if keeper == "inline":
        assert again.left_in_memory() == []


def test_with_a_keeper_of_its_own_it_ends_with_the_same_bits(stage: Make) -> None:
    unbroken, again = stage("adam").play(), turning(stage("adam", "process"), 2)
    assert differing(unbroken, again.play(EVERYWHERE)) == []
