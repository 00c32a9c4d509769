"""Ranks are killed from outside, at random moments of a step or of a recovery, again and again in one run."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sharing import train_sharded
from team import Act, Ended, Here, Team, own, survivors

from everstep.events import Called, Persisted, RanksLost, Started, WentOn, read_events
from everstep.topology import process_alive

WORLD = 3
STEPS_PER_LOSS = 40
PATIENCE_S = 120.0
POLICIES = [["spare"], ["rollback", "spare"], ["forward", "rollback", "spare"]]


def slowly_until(over: Path, steps: int) -> Act:
    """So that the run does not end before the storm: its second half takes half a second a step until then."""

    def act(here: Here) -> None:
        if not over.exists():
            time.sleep(0.02 if here.run.step < steps // 2 else 0.5)

    return act


def strike(team: Team, act: Act, losses: int, seed: int, *, spares_come_later: bool) -> None:
    """Kill one rank after the other; the next, when those who are left are called to go on, or soon after."""
    chance, directory = random.Random(seed), team.directory
    if not spares_come_later:
        awaited(lambda: len(list(directory.parent.glob("stands-*"))) == losses, "spares do not stand by")
    awaited(lambda: any(isinstance(e, Persisted) for e in read_events(directory)), "there is nothing to go back to")
    for number in range(losses):
        victims = awaited(lambda n=number: ready_for(directory, n, team.world), f"nobody went on after loss {number}")
        time.sleep(chance.uniform(0.0, 0.3))
        os.kill(chance.choice(victims), signal.SIGKILL)
        if spares_come_later:
            time.sleep(chance.uniform(0.0, 0.5))
            team.add(team.world + number, act, spare=True)
    awaited(lambda: is_whole(directory, team.world), "the world did not grow back")


def awaited(what: Callable[[], Any], else_: str) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := what()):
        assert time.monotonic() < deadline, else_
        time.sleep(0.02)
    return found


def ended(team: Team, steps: int) -> dict[int, Ended]:
    """How all have ended. They are waited for while the run advances: how fast it does is the machine's affair."""
    newest, deadline = -1, time.monotonic() + PATIENCE_S
    while newest < steps and time.monotonic() < deadline:
        events = read_events(team.directory) if team.directory.exists() else []
        found = max((event.step for event in events if isinstance(event, Persisted)), default=-1)
        if found > newest:
            newest, deadline = found, time.monotonic() + PATIENCE_S
        time.sleep(0.5)
    return team.wait(PATIENCE_S)


def is_whole(directory: Path, world: int) -> bool:
    """Whether all ranks have gone on in the newest view."""
    events = read_events(directory)
    last = next(event for event in reversed(events) if isinstance(event, Called))
    return last.world == world == sum(isinstance(event, WentOn) and event.view == last.view for event in events)


def ready_for(directory: Path, number: int, world: int) -> list[int]:
    """Ranks that are alive, once they have been called after each of so many losses, and one of them has gone on.

    One that is alone is spared: if nobody is left, nobody goes on.
    """
    events = read_events(directory) if directory.exists() else []
    calls = [event for event in events if isinstance(event, Called)]
    began = {event.rank: event.pid for event in events if isinstance(event, Started)}
    if sum(len(call.lost) for call in calls) < number or len(began) < world:
        return []
    if calls and not any(isinstance(event, WentOn) and event.view == calls[-1].view for event in events):
        return []
    if calls and calls[-1].world == 1:
        return []
    return sorted({pid for pid in began.values() if process_alive(pid)})


LATER = ", and spares come later"
SOAK = [pytest.mark.soak, pytest.mark.timeout(900)]
STORMS = [
    pytest.param(POLICIES[-1], 4, False, id="4 by all policies"),
    pytest.param(POLICIES[-1], 4, True, id=f"4 by all policies{LATER}", marks=SOAK),
    *(
        pytest.param(policies, losses, later, id=f"{losses} by {policies}{LATER * later}", marks=SOAK)
        for losses in (6, 50)
        for policies in POLICIES
        for later in (False, True)
        if policies[0] != "spare" or not later
    ),
]


@pytest.mark.parametrize(("policies", "losses", "spares_come_later"), STORMS)
def test_a_run_outlives_losses_at_random_moments(
    directory: Path, policies: list[str], losses: int, spares_come_later: bool
) -> None:
    """With spares that stand by the world grows at once; before later ones those who are left go on by themselves."""
    over, steps = directory.parent / "over", losses * STEPS_PER_LOSS
    team = Team(directory, WORLD, spares=0 if spares_come_later else losses, on_loss=policies, steps=steps)
    act = slowly_until(over, steps)
    team.start(act)
    try:
        strike(team, act, losses, seed=losses, spares_come_later=spares_come_later)
    finally:
        over.touch()
        found = ended(team, steps)
        left = survivors(found)  # whatever else went wrong: with their errors
    lost = [event.how for event in read_events(directory) if isinstance(event, RanksLost)]
    assert lost == ["its process ended"] * losses  # nobody was taken for hung
    assert sum(ended.killed for ended in found.values()) == losses
    assert len(left) == WORLD
    assert {one["step"] for one in left} == {steps}
    assert len({one["state"] for one in left}) == 1  # ranks are identical to each other
    if policies == ["spare"]:
        whole = Team(directory.with_name("whole"), WORLD, on_loss=policies, steps=steps).start()
        assert own(found) == own(ended(whole, steps))


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("losses", [6, 20])
def test_replicas_outlive_losses_at_random_moments(directory: Path, losses: int) -> None:
    """Two of two ranks each, with spares for all who are lost."""
    over, steps = directory.parent / "over", losses * STEPS_PER_LOSS
    options: dict[str, Any] = {"train": train_sharded, "on_loss": ["spare"], "steps": steps}
    team = Team(directory, 4, spares=losses, **options)
    act = slowly_until(over, steps)
    team.start(act)
    try:
        strike(team, act, losses, seed=losses, spares_come_later=False)
    finally:
        over.touch()
        found = ended(team, steps)
        left = survivors(found)
    assert [event.how for event in read_events(directory) if isinstance(event, RanksLost)] == [
        "its process ended"
    ] * losses
    assert len(left) == 4
    whole = Team(directory.with_name("whole"), 4, **options).start()
    assert own(found) == own(ended(whole, steps))
