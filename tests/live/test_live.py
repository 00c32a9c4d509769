"""A rank is lost inside a step, and training goes on in the same processes."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lives import run_directory
from sharing import train_sharded
from team import (
    STEPS,
    Act,
    Ended,
    Here,
    Team,
    in_backward,
    in_forward,
    in_the_update,
    kill_at,
    nothing,
    own,
    survivors,
    train,
)

from everstep.events import Called, RanksLost, WentOn, read_events
from everstep.keeper.client import keeper_pid
from everstep.store.disk import DiskTier
from everstep.store.manifest import run_name


@pytest.fixture(scope="module")
def undisturbed() -> dict[int, Ended]:
    with run_directory() as directory:
        return Team(directory, 3, on_loss=["spare", "rollback"]).start().wait()


@pytest.mark.parametrize(
    "act", [kill_at(1, 5), in_forward(2, 6), in_backward(0, 4, 5), in_backward(1, 4, 0), in_the_update(2, 7)],
    ids=["after backward", "in forward", "rank 0 in backward", "late in backward", "in the update"],
)  # fmt: skip
@pytest.mark.parametrize("strategy", ["snapshot", "log"])
def test_with_a_spare_the_run_ends_bit_for_bit_like_an_undisturbed_one(
    directory: Path, undisturbed: dict[int, Ended], act: Act, strategy: str
) -> None:
    team = Team(directory, 3, spares=1, on_loss=["spare"], strategy=strategy).start(act)
    found = team.wait()
    assert own(found) == own(undisturbed)
    assert sum(one.killed for one in found.values()) == 1
    assert all(one["pid"] in team.pids.values() for one in survivors(found))


@pytest.mark.parametrize("act", [kill_at(1, 5), kill_at(0, 5), in_backward(2, 4, 5)], ids=["1", "0", "in backward"])
def test_without_a_spare_the_others_go_on_and_no_sample_is_lost_or_seen_twice(directory: Path, act: Act) -> None:
    found = survivors(Team(directory, 3, on_loss="rollback", batch="shrink").start(act).wait())
    assert [one["world"] for one in found] == [2, 2]
    assert len({one["state"] for one in found}) == 1
    assert {one["step"] for one in found} == {STEPS}
    samples = list(chain(*chain(*(one["seen"] for one in found))))
    assert len(samples) == len(set(samples))
    assert {len(one["seen"]) for one in found} == {STEPS}


@pytest.mark.parametrize("tries", [5, 43], ids=["in the first pass", "in the second"])
def test_persistent_workers_of_a_loader_go_back_with_the_ranks_that_stay(directory: Path, tries: int) -> None:
    options = {"on_loss": ["spare"], "workers": 1, "steps": 46}
    found = Team(directory, 3, spares=1, **options).start(kill_at(1, tries)).wait()
    with run_directory() as other:
        undisturbed = Team(other, 3, **options).start().wait()
    assert own(found) == own(undisturbed)


def global_batches(results: list[dict[str, Any]]) -> list[list[Any]]:
    """Of all ranks together, step by step."""
    return [sorted(chain(*rows)) for rows in zip(*(one["seen"] for one in results), strict=True)]


def test_persistent_workers_of_those_who_are_left_read_what_the_lost_would_have_read(directory: Path) -> None:
    options = {"on_loss": "rollback", "workers": 1, "steps": 40}
    found = survivors(Team(directory, 3, **options).start(kill_at(1, 5)).wait())
    with run_directory() as other:
        undisturbed = survivors(Team(other, 3, **options).start().wait())
    assert global_batches(found)[4:] == global_batches(undisturbed)[4:]


@pytest.mark.parametrize("strategy", ["snapshot", "log"])
@pytest.mark.parametrize("world", [3, pytest.param(4, marks=pytest.mark.soak)])
def test_those_who_are_left_train_on_the_very_same_global_batches(directory: Path, world: int, strategy: str) -> None:
    """Also over the end of a pass; and what comes of it differs only by the order of additions."""
    options = {"on_loss": "rollback", "strategy": strategy, "steps": 48, "dropout": 0.0}
    found = survivors(Team(directory, world, **options).start(kill_at(1, 5)).wait())
    with run_directory() as other:
        undisturbed = survivors(Team(other, world, **options).start().wait())
    assert len({one["state"] for one in found}) == 1
    assert global_batches(found)[4:] == global_batches(undisturbed)[4:]
    assert found[0]["weight"] == pytest.approx(undisturbed[0]["weight"], rel=1e-4)


def test_all_but_one_may_be_lost(directory: Path) -> None:
    def act(here: Here) -> None:
        if here.name != 1 and here.tries == 5:
            os.kill(os.getpid(), signal.SIGKILL)

    (left,) = survivors(Team(directory, 4, on_loss="rollback").start(act).wait())
    assert (left["world"], left["rank"], left["step"]) == (1, 0, STEPS)


def test_one_loss_after_the_other_is_lived_through_until_there_are_no_spares(
    directory: Path, undisturbed: dict[int, Ended]
) -> None:
    def act(here: Here) -> None:
        if (here.name, here.tries) in {(0, 3), (1, 6), (2, 9)}:
            os.kill(os.getpid(), signal.SIGKILL)

    found = Team(directory, 3, spares=3, on_loss=["spare"]).start(act).wait()
    assert own(found) == own(undisturbed)
    assert [found[name].killed for name in range(3)] == [True, True, True]


def test_a_spare_that_is_not_needed_ends_with_the_run(directory: Path) -> None:
    found = Team(directory, 2, spares=1, on_loss=["spare"], linger="1s").start().wait()
    assert found[2].result is None and found[2].code == 0 and not found[2].error


def test_when_spares_run_out_the_next_policy_holds(directory: Path) -> None:
    def act(here: Here) -> None:
        if (here.name, here.tries) in {(0, 3), (1, 7)}:
            os.kill(os.getpid(), signal.SIGKILL)

    found = survivors(Team(directory, 3, spares=1, on_loss=["spare", "rollback"]).start(act).wait())
    assert [one["world"] for one in found] == [2, 2]
    called = [event for event in read_events(directory) if isinstance(event, Called)]
    assert [event.policy for event in called] == ["spare", "rollback"]
    assert called[1].reason == "1 lost, and 0 spares"


def test_a_rank_that_is_stopped_is_ended_and_the_others_go_on(directory: Path, undisturbed: dict[int, Ended]) -> None:
    def act(here: Here) -> None:
        if here.name == 1 and here.tries == 4:
            os.kill(os.getpid(), signal.SIGSTOP)

    found = Team(directory, 3, spares=1, on_loss=["spare"], detect_timeout="1s").start(act).wait()
    assert found[1].killed
    assert own(found) == own(undisturbed)


def test_a_rank_lost_while_the_others_recover_is_lived_through_too(
    directory: Path, undisturbed: dict[int, Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    from everstep.live import presence

    meet = presence.Presence.meet

    def die(self: presence.Presence, called: presence.View) -> None:
        if called.number == 1 and called.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        meet(self, called)

    monkeypatch.setattr(presence.Presence, "meet", die)
    found = Team(directory, 3, spares=2, on_loss=["spare"]).start(kill_at(0, 4)).wait()
    assert own(found) == own(undisturbed)
    assert sum(one.killed for one in found.values()) == 2


def test_a_spare_lost_while_it_joins_is_followed_by_another(
    directory: Path, undisturbed: dict[int, Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    from everstep.live import presence

    meet = presence.Presence.meet

    def die(self: presence.Presence, called: presence.View) -> None:
        if os.environ.get("EVERSTEP_SPARE") and called.number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        meet(self, called)

    monkeypatch.setattr(presence.Presence, "meet", die)
    found = Team(directory, 3, spares=2, on_loss=["spare"]).start(kill_at(0, 4)).wait()
    assert own(found) == own(undisturbed)


def test_a_rank_that_comes_back_after_it_was_taken_for_lost_does_not_train_on(directory: Path) -> None:
    """It lost its line for a while, and the others went on: it finds that out from the keeper, and ends."""

    def act(here: Here) -> None:
        if here.name == 1 and here.tries == 4:
            line = here.run._presence._line
            introduce = line._introduce
            line._introduce = lambda: time.sleep(1.0) or introduce()
            line._channel.close()
        time.sleep(0.1)  # the others are still there when it comes back

    found = Team(directory, 3, on_loss="rollback", steps=40).start(act).wait()
    assert "taken for lost" in found[1].error and found[1].code == 75
    assert [found[name].result["world"] for name in (0, 2)] == [2, 2]


def test_an_error_of_the_program_leaves_the_loop_as_ever(directory: Path) -> None:
    def act(here: Here) -> None:
        if here.tries == 3:
            raise ValueError("a mistake of the program")

    found = Team(directory, 2, on_loss="rollback").start(act).wait()
    assert all("a mistake of the program" in one.error for one in found.values())


def test_restart_is_the_last_word_and_a_new_job_goes_on(directory: Path, undisturbed: dict[int, Ended]) -> None:
    found = Team(directory, 3, on_loss=["spare", "restart"]).start(kill_at(1, 5)).wait()
    assert [found[name].code for name in (0, 2)] == [75, 75]
    assert own(Team(directory, 3, on_loss=["spare", "restart"]).start().wait()) == own(undisturbed)


def test_a_keeper_that_dies_is_followed_by_another_that_knows_who_is_here(
    directory: Path, undisturbed: dict[int, Ended]
) -> None:
    def act(here: Here) -> None:
        if here.name == 0 and here.tries == 3:
            pid = keeper_pid(run_name(DiskTier(directory)))
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            time.sleep(1.0)
        if here.name == 1 and here.tries == 6:
            os.kill(os.getpid(), signal.SIGKILL)

    found = Team(directory, 3, spares=1, on_loss=["spare"]).start(act).wait()
    assert own(found) == own(undisturbed)


def test_who_was_lost_and_what_was_done_is_told(directory: Path) -> None:
    Team(directory, 3, spares=1, on_loss=["spare"]).start(kill_at(1, 5)).wait()
    events = read_events(directory)
    assert [(e.view, e.rank) for e in events if isinstance(e, RanksLost)] == [(0, 1)]
    assert [(e.policy, e.world, e.lost) for e in events if isinstance(e, Called)] == [("spare", 3, (1,))]
    went_on = [event for event in events if isinstance(event, WentOn)]
    assert {event.rank for event in went_on} == {0, 1, 2}
    assert all(event.exact and event.left_at - event.step <= 1 for event in went_on)


def test_a_rank_that_is_asked_to_leave_hands_over_and_the_others_go_on(
    directory: Path, undisturbed: dict[int, Ended]
) -> None:
    def act(here: Here) -> None:
        if here.name == 2 and here.tries == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    found = Team(directory, 3, spares=1, on_loss=["spare"]).start(act).wait()
    assert found[2].code == 128 + signal.SIGTERM
    assert own(found) == own(undisturbed)


def test_a_spare_that_comes_later_takes_the_place_that_was_left(directory: Path) -> None:
    def act(here: Here) -> None:
        if here.name == 1 and here.tries == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.05 if dist.get_world_size() == 3 else 0.3)  # there is time enough for one to come

    team = Team(directory, 3, on_loss=["spare", "rollback"], steps=60).start(act)
    time.sleep(1.5)
    team.add(3, nothing, spare=True)
    found = survivors(team.wait())
    assert {one["world"] for one in found} == {3}
    assert len({one["state"] for one in found}) == 1


@pytest.mark.parametrize(
    ("losses", "program"),
    [
        (8, train),
        pytest.param(50, train, marks=pytest.mark.soak),
        pytest.param(8, train_sharded, marks=pytest.mark.soak),
    ],
    ids=["8", "50", "8 of a sharded model"],
)  # fmt: skip
def test_losses_leave_no_thread_descriptor_or_memory_behind(
    directory: Path, losses: int, program: Callable[..., dict[str, Any]]
) -> None:
    """Whoever is not the first dies in its third step, again and again."""
    seen: list[tuple[int, int, int]] = []

    def act(here: Here) -> None:
        if here.name == 0:
            status = Path("/proc/self/status").read_text()
            threads, resident = (int(re.findall(rf"{word}:\s+(\d+)", status)[0]) for word in ("Threads", "VmRSS"))
            seen.append((len(os.listdir("/proc/self/fd")), threads, resident))
            Path(directory.parent, "seen").write_text(repr(seen))
        elif here.tries == 3 and len(list(directory.parent.glob("dead-*"))) < losses:
            Path(directory.parent, f"dead-{here.name}").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    team = Team(directory, 2, spares=losses, train=program, on_loss=["spare"], steps=4 * losses).start(act)
    found = team.wait(30 + 6 * losses)
    assert sum(one.killed for one in found.values()) == losses
    counted = eval(Path(directory.parent, "seen").read_text())
    early, late = counted[len(counted) // 2], counted[-1]
    assert late[0] <= early[0] + 2 and late[1] <= early[1] + 1, (early, late)
    assert late[2] - early[2] < 20_000, (early, late)  # kB
