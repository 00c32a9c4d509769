"""Sharded models, killed: the same mesh goes on bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from harness import Kill, Stage, differing

Make = Callable[..., Stage]

ALWAYS = [("hsdp", 4)]
SOAK = [
    ("fsdp_that_evaluates", 2),
    ("fsdp", 3),
    ("fsdp", 4),
    ("tensor_parallel", 2),
    ("fsdp_over_tensor_parallel", 4),
    ("zero", 2),
    ("zero", 3),
    ("fsdp_that_evaluates", 3),
]


@pytest.mark.parametrize(
    ("name", "world"), [*ALWAYS, *(pytest.param(*case, marks=pytest.mark.soak) for case in SOAK)], ids=str
)
def test_killed_it_ends_with_the_same_bits(name: str, world: int, stage: Make) -> None:
    unbroken, again = stage(name).play(world=world), stage(name, "process")
    kills = [Kill(1, "step", rank=world - 1), Kill(4, "backward")]
    assert differing(unbroken, again.play(kills, world=world)) == []


@pytest.mark.soak
@pytest.mark.parametrize("name", ["fsdp", "tensor_parallel", "zero"])
def test_after_a_reboot_it_ends_with_the_same_bits(name: str, stage: Make) -> None:
    unbroken, again = stage(name).play(world=2), stage(name, "process")
    assert differing(unbroken, again.play([Kill(4, "backward")], world=2, reboot=True)) == []
    assert again.read("began")["resumed_from"] in (3, 4)
