"""Two ranks with a log, one of which dies before an operation on a medium: both go on from one step, exact to the bit.

Whoever dies between two seals leaves the other with a record more.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from harness import SEED, Kill, Stage, differing

Make = Callable[..., Stage]
FEATURE = "sgd_with_momentum"


def walk(stage: Make, operations: range, rank: int, *, reboot: bool) -> None:
    unbroken = stage(FEATURE).play(world=2)
    for operation in operations:
        again = stage(FEATURE, strategy="log")
        codes = again.live_once(world=2, operation=(rank, operation))
        if codes == [0, 0]:
            return  # the walk is over
        assert codes[rank] == -9, again.errors()
        if reboot:
            again.clean_up()
        codes = again.live_once(world=2, seed=SEED + 1 if not reboot else SEED)
        assert codes == [0, 0], again.errors()
        resumed_from = again.read("began")["resumed_from"]
        if resumed_from is None and not reboot:
            continue  # it died before there was anything, and began anew from another seed
        lines = [again.read("ended", one)["lines"] for one in range(2)]
        assert differing(unbroken, lines) == [], f"rank {rank} died before operation {operation}: {resumed_from}"
        if resumed_from != 12:  # a life without a step leaves what was not durable in memory
            assert again.left_in_memory() == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_dies_before_some_operations(rank: int, stage: Make) -> None:
    walk(stage, range(14 + rank, 60, 17), rank, reboot=False)


def test_what_one_rank_has_committed_stays_whole_while_the_other_ends(stage: Make) -> None:
    """Each has a keeper of its own, and the first to have its part in place waits for the other to commit both."""
    walk(stage, range(72, 93, 3), 0, reboot=True)


@pytest.mark.soak
@pytest.mark.parametrize("reboot", [False, True], ids=["killed", "rebooted"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_dies_before_every_third_operation(rank: int, reboot: bool, stage: Make) -> None:
    walk(stage, range(rank, 130, 3), rank, reboot=reboot)


def test_a_rank_whose_ring_stays_full_takes_no_bases_that_the_other_has_not(stage: Make) -> None:
    """They would take the place of the last that both have. What all ranks are asked for is three steps apart."""
    again = stage(FEATURE, "process", strategy="log")
    again.module = "full_ring"
    codes = again.live_once(world=2, kill=Kill(11, "backward", rank=1))
    assert codes[1] == -9, again.errors()
    assert again.live_once(world=2, seed=SEED + 1) == [0, 0], again.errors()
    assert again.read("began")["resumed_from"] >= 11 - 3


@pytest.mark.parametrize(
    ("words", "keeper"),
    [("nobody_hears", "process"), ("nobody_hears", "inline"), ("all_hear_too_late", "process")],
)
def test_bases_that_one_rank_asks_for_are_taken_by_all_or_none(words: str, keeper: str, stage: Make) -> None:
    """Whatever becomes of its words: at the latest they decide together, every 64 steps."""
    again = stage(words, keeper, strategy="log")
    again.module = "late_words"
    codes = again.live_once(world=2, kill=Kill(190, "backward", rank=1))
    assert codes[1] == -9, again.errors()
    assert again.live_once(world=2, seed=SEED + 1) == [0, 0], again.errors()
    assert again.read("began")["resumed_from"] >= 128
