"""Retention is a pure decision, and the last restorable checkpoint is never in it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from everstep.config import Keep
from everstep.store.retain import to_retire

steps = st.lists(st.integers(0, 500), unique=True, max_size=30)


def test_the_newest_and_every_nth_stay() -> None:
    assert to_retire([10, 20, 25, 30, 35, 40], Keep(last=2, every=20)) == [10, 25, 30]


@given(steps, steps, st.integers(1, 5), st.none() | st.integers(1, 50))
def test_the_newest_sound_steps_are_never_retired(
    committed: list[int], damaged: list[int], last: int, every: int | None
) -> None:
    gone = set(to_retire(committed, Keep(last=last, every=every), damaged=damaged))
    sound = sorted(set(committed) - set(damaged))
    assert gone <= set(committed)
    assert gone.isdisjoint(sound[-last:])
    if not sound:
        assert not gone


@given(steps, st.integers(1, 5))
def test_no_more_than_asked_for_stays(committed: list[int], last: int) -> None:
    left = set(committed) - set(to_retire(committed, Keep(last=last)))
    assert len(left) == min(last, len(committed))
