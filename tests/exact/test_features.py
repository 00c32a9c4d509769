"""Every feature, killed in every place of the loop, ends with the bits of a run that was never killed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from features import FEATURES, ON_TWO_RANKS
from harness import EVERYWHERE, ON_TWO, Lines, Stage

Make = Callable[..., Stage]


def differing(unbroken: list[Lines], killed: list[Lines]) -> list[str]:
    """Where two runs are not the same, in words."""
    return [
        f"rank {rank}{name}: {a.get(name)} unbroken, {b.get(name)} killed"
        for rank, (a, b) in enumerate(zip(unbroken, killed, strict=True))
        for name in sorted(a.keys() | b.keys())
        if a.get(name) != b.get(name)
    ]


@pytest.mark.parametrize("name", FEATURES)
def test_killed_in_every_place_it_ends_with_the_same_bits(name: str, stage: Make) -> None:
    unbroken = stage(name).play()
    again = stage(name)
    assert differing(unbroken, again.play(EVERYWHERE)) == []
    assert differing(unbroken, again.play()) == [], "a finished run came back changed"
    assert again.read("ended")["given"] == 0, "a finished run gave another batch"
    assert list(again.memory().glob("rank-*")) == [], "a finished run left its memory behind"


@pytest.mark.parametrize("name", ON_TWO_RANKS)
def test_two_ranks_killed_one_at_a_time_end_with_the_same_bits(name: str, stage: Make) -> None:
    unbroken = stage(name).play(world=2)
    assert differing(unbroken, stage(name).play(ON_TWO, world=2)) == []
