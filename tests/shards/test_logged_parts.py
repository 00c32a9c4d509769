"""Sharded models with a log: each rank records what its own optimizer saw, and the same mesh goes on bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from harness import Kill, Stage, differing

from everstep.events import Chose, Degraded, Replayed, read_events

Make = Callable[..., Stage]
EACH = [
    ("fsdp_that_evaluates", 2),
    ("fsdp", 4),
    ("hsdp", 4),
    ("tensor_parallel", 2),
    ("fsdp_over_tensor_parallel", 4),
    ("zero", 2),
    ("zero", 3),
]
CASES = [(*case, reboot) for case in EACH for reboot in (True, False)]


def repeated(stage: Stage) -> list[tuple[int, int]]:
    """Base and number of steps of every replay."""
    events = list(read_events(stage.directory / "run"))
    assert not [e for e in events if isinstance(e, Degraded)]
    return [(e.base, e.steps) for e in events if isinstance(e, Replayed)]


@pytest.mark.parametrize(
    ("name", "world", "reboot"),
    [CASES[0], *(pytest.param(*case, marks=pytest.mark.soak) for case in CASES[1:])],
    ids=str,
)
def test_killed_it_goes_on_from_its_records_with_the_same_bits(
    name: str, world: int, reboot: bool, stage: Make
) -> None:
    unbroken, again = stage(name).play(world=world), stage(name, "process", "log")
    kills = [Kill(3, "step", rank=world - 1), Kill(6, "step")]  # when these steps are durable
    assert differing(unbroken, again.play(kills, world=world, reboot=reboot)) == []
    assert repeated(again) == [(1, 2)] * world + [(4, 2)] * world


@pytest.mark.soak
@pytest.mark.parametrize("name", ["fsdp", "tensor_parallel", "zero"])
def test_a_run_that_turns_to_the_log_ends_with_the_same_bits(name: str, stage: Make) -> None:
    unbroken, again = stage(name).play(world=2), stage(name, "process", "auto")
    again.turn_every = 2
    assert differing(unbroken, again.play([Kill(3, "step", rank=1), Kill(6, "backward")], world=2)) == []
    assert "log" in {event.strategy for event in read_events(again.directory / "run") if isinstance(event, Chose)}
