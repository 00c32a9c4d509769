"""Every feature, killed in every place of the loop, ends with the bits of a run that was never killed."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from features import ON_ONE_RANK, ON_TWO_RANKS
from harness import EVERYWHERE, ON_TWO, Kill, Stage, differing

from everstep.events import ChainEnded, Replayed, TapMoved, read_events

Make = Callable[..., Stage]


def some(names: list[str], every: int) -> list[object]:
    """All of them in the soak, and some of them always."""
    rest = pytest.mark.soak
    return [name if i % every == 0 else pytest.param(name, marks=rest) for i, name in enumerate(names)]


# Where data comes from does not depend on how state is kept.
LOGGED = [name for name in ON_ONE_RANK if not name.startswith("data_")]


def by_strategy(names: list[str]) -> list[object]:
    """Every feature by bases; by the log all in the soak, and every eighth of those that concern it always."""
    logged = [name for name in names if name in LOGGED][::8]
    return [
        *((name, "snapshot") for name in names),
        *((name, "log") if name in logged else pytest.param(name, "log", marks=pytest.mark.soak) for name in names),
    ]


@pytest.mark.parametrize(("name", "strategy"), by_strategy(ON_ONE_RANK))
def test_killed_in_every_place_it_ends_with_the_same_bits(name: str, strategy: str, stage: Make) -> None:
    once, again = stage(name), stage(name, strategy=strategy)
    unbroken = once.play()
    assert differing(unbroken, again.play(EVERYWHERE)) == []
    for finished in (once, again):
        assert differing(unbroken, finished.play()) == [], "a finished run came back changed"
        assert finished.read("ended")["given"] == 0, "a finished run gave another batch"
        assert finished.left_in_memory() == []


@pytest.mark.parametrize(("name", "strategy"), by_strategy(ON_TWO_RANKS))
def test_two_ranks_killed_one_at_a_time_end_with_the_same_bits(name: str, strategy: str, stage: Make) -> None:
    unbroken, again = stage(name).play(world=2), stage(name, strategy=strategy)
    assert differing(unbroken, again.play(ON_TWO, world=2)) == []
    assert again.left_in_memory() == []


@pytest.mark.parametrize(
    "name",
    some(["a_convolution_in_channels_last", "two_models_with_an_optimizer_each", "accumulated_gradients"], every=3),
)
def test_killed_when_its_replica_is_as_new_it_ends_with_the_same_bits(name: str, stage: Make) -> None:
    unbroken, again = stage(name).play(), stage(name, keeper="process", strategy="replica")
    assert differing(unbroken, again.play([Kill(5, "step"), Kill(9, "given")])) == []
    assert differing(unbroken, again.play()) == [], "a finished run came back changed"


@pytest.mark.parametrize("name", some(LOGGED, every=4))
def test_rebooted_in_every_place_the_log_on_the_disk_gives_the_same_bits(name: str, stage: Make) -> None:
    unbroken, again = stage(name).play(), stage(name, strategy="log")
    assert differing(unbroken, again.play(EVERYWHERE, reboot=True, other_seeds=False, may_lose=1000)) == []


@pytest.mark.parametrize("name", ["adam", "batch_norm_and_dropout", "data_stateful_with_two_workers"])
def test_with_a_keeper_of_its_own_it_ends_with_the_same_bits(name: str, stage: Make) -> None:
    unbroken = stage(name).play()
    again = stage(name, keeper="process")
    assert differing(unbroken, again.play(EVERYWHERE)) == []
    assert differing(unbroken, again.play()) == []
    assert again.read("ended")["given"] == 0


def test_two_ranks_with_a_keeper_of_their_own_end_with_the_same_bits(stage: Make) -> None:
    unbroken = stage("adamw_with_amsgrad").play(world=2)
    assert differing(unbroken, stage("adamw_with_amsgrad", keeper="process").play(ON_TWO, world=2)) == []


@pytest.mark.parametrize(("keeper", "world"), [("inline", 1), ("process", 1), ("inline", 2)])
def test_killed_at_any_time_it_ends_with_the_same_bits(keeper: str, world: int, stage: Make) -> None:
    name = "batch_norm_and_dropout"
    unbroken = stage(name).play(world=world)
    again, moments = stage(name, keeper=keeper), []
    while len(moments) < 20:
        moments.append(random.uniform(0.0, 0.4 if world == 1 else 1.5))
        if again.live_once(world=world, after_s=moments[-1]) == [0] * world:
            break
    killed = again.play(world=world, other_seeds=False, may_lose=1000)
    assert differing(unbroken, killed) == [], f"killed after {moments} seconds"


def test_a_rank_keeps_its_old_place_until_the_others_have_a_new_one(stage: Make) -> None:
    name = "a_rank_that_is_slow_to_seal_when_the_state_outgrows_its_place"
    unbroken, again = stage(name).play(world=2), stage(name)
    assert differing(unbroken, again.play([Kill(5, "forward", rank=1)], world=2)) == []
    assert again.left_in_memory() == []


def test_killed_before_the_first_step_it_begins_anew(stage: Make) -> None:
    unbroken = stage("adam").play()
    again = stage("adam")
    assert differing(unbroken, again.play([Kill(0, "given"), Kill(0, "backward")], other_seeds=False)) == []


@pytest.mark.parametrize("name", ["data_stateful", "data_stateful_with_two_workers", "data_shuffled_by_two_workers"])
@pytest.mark.parametrize("place", ["asked", "given"])
def test_killed_around_the_end_of_every_epoch_it_ends_with_the_same_bits(name: str, place: str, stage: Make) -> None:
    unbroken = stage(name).play()
    assert differing(unbroken, stage(name).play([Kill(6, place), Kill(12, place)])) == []


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("gradients_accumulated_for_one_optimizer_across_steps_of_another", "gradients are not part of a cut"),
        ("a_parameter_group_added_in_mid_run", "the resumed program has not added the group yet when it is loaded"),
        ("a_persistent_buffer_that_is_none_at_first", "a strict load calls it missing in the program"),
    ],
)
def test_not_kept_yet(name: str, why: str, stage: Make, request: pytest.FixtureRequest) -> None:
    request.applymarker(pytest.mark.xfail(strict=True, reason=why, raises=AssertionError))
    unbroken = stage(name).play()
    assert differing(unbroken, stage(name).play([Kill(10, "backward")])) == []


end_is_lost = pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="the end of a run has the number of its last step, and a step that is durable is not written again",
)


@end_is_lost
def test_batches_after_a_durable_last_update_are_not_given_again(stage: Make) -> None:
    once = stage("batches_left_over_after_the_last_update_was_durable")
    unbroken = once.play()
    assert differing(unbroken, once.play()) == [], "they are given again, with the same bits"
    assert once.read("ended")["given"] == 0


@end_is_lost
def test_killed_after_the_last_update_it_ends_in_a_life_without_a_step(stage: Make) -> None:
    once, again = (stage("batches_left_over_after_the_last_update") for _ in range(2))
    unbroken = once.play()
    assert differing(unbroken, again.play([Kill(14, "backward")])) == []
    assert differing(unbroken, again.play()) == []
    assert again.read("ended")["given"] == 0


# -- where gradients are taken


def told(stage: Stage, kind: type) -> list[object]:
    return [event for event in read_events(stage.directory / "run") if isinstance(event, kind)]


def test_gradients_are_taken_as_ddp_reduces_them(stage: Make) -> None:
    unbroken, again = stage("adamw_with_amsgrad").play(world=3), stage("adamw_with_amsgrad", strategy="log")
    assert differing(unbroken, again.play(world=3)) == [], "the tap reduces with other bits than DDP"
    assert told(again, TapMoved) == []
    assert told(again, ChainEnded) == []


def test_gradients_that_are_clipped_are_taken_in_front_of_the_step(stage: Make) -> None:
    unbroken, again = stage("clipped_gradients").play(world=2), stage("clipped_gradients", strategy="log")
    assert differing(unbroken, again.play(ON_TWO, world=2)) == []
    assert len(told(again, TapMoved)) >= 2, "each rank finds it out for itself"
    assert told(again, Replayed)


def test_gradients_that_are_changed_after_they_were_compressed_are_recorded_dense(stage: Make) -> None:
    name = "gradients_that_are_clipped_after_they_were_compressed"
    unbroken, again = stage(name).play(world=2), stage(name, strategy="log")
    assert differing(unbroken, again.play(ON_TWO, world=2)) == []
    reasons = {event.reason for event in told(again, ChainEnded)}  # type: ignore[attr-defined]
    assert "gradients are changed after they were compressed, so their log is dense" in reasons
