"""Retention is a pure decision, and the last restorable checkpoint is never in it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from everstep.config import Keep
from everstep.store.retain import milestones, spent_segments, to_retire

steps = st.lists(st.integers(0, 500), unique=True, max_size=30)


def test_the_newest_and_the_first_at_or_after_each_multiple_stay() -> None:
    assert to_retire([10, 20, 25, 30, 35, 40], Keep(last=2, every=20)) == [10, 25, 30]
    assert to_retire([1, 51, 58, 93, 201, 210, 240, 245], Keep(last=1, every=50)) == [1, 58, 93, 210, 240]


def test_all_stay_where_every_one_is_a_milestone() -> None:
    assert to_retire([0, 1, 2, 5], Keep(last=1, every=1)) == []


@given(steps, st.integers(1, 5), st.integers(2, 50))
def test_milestones_are_the_same_however_often_checkpoints_were_let_go_before(
    written: list[int], last: int, every: int
) -> None:
    left = set[int]()
    for step in sorted(written):
        left.add(step)
        left -= set(to_retire(left, Keep(last=last, every=every)))
    expected = {min(step for step in written if step >= n) for n in range(every, max(written, default=0) + 1, every)}
    assert left == expected | set(sorted(written)[-last:])


@given(steps, steps, steps, st.integers(2, 50))
def test_nodes_keep_the_same_milestones_of_what_all_have_whatever_else_each_has(
    on_all: list[int], ours: list[int], theirs: list[int], every: int
) -> None:
    everywhere = set(on_all) | (set(ours) & set(theirs))
    for own in (ours, theirs):
        gone = to_retire({*on_all, *own}, Keep(last=1, every=every), everywhere=everywhere)
        assert milestones(everywhere, every).isdisjoint(gone)


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


def test_a_segment_is_spent_when_the_next_one_begins_at_or_before_the_oldest_base() -> None:
    assert spent_segments([0, 10, 20, 30], 20) == [0, 10]
    assert spent_segments([0, 10, 20, 30], 29) == [0, 10]
    assert spent_segments([30], 100) == [] == spent_segments([], 5)


@given(steps, st.integers(0, 500))
def test_every_step_after_a_kept_base_stays_in_the_log(starts: list[int], base: int) -> None:
    left = set(starts) - set(spent_segments(starts, base))
    for step in range(base + 1, max(starts, default=0) + 2):
        holding = [start for start in starts if start < step]
        assert not holding or max(holding) in left
