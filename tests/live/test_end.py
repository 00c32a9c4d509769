"""A rank is lost when the loop is over, and others have finished or are about to: nobody waits for ever."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from team import STEPS, Act, Ended, Here, Team, survivors

from everstep import topology
from everstep.errors import Restart
from everstep.events import Finished, Persisted, RanksLost, read_events
from everstep.keeper.keeping import Keeping
from everstep.keeper.protocol import Lost
from everstep.live.presence import Presence


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def until(holds: Any) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline, "it did not come to that in time"
        time.sleep(0.02)


def has_finished(directory: Path, rank: int) -> bool:
    return any(isinstance(event, Finished) and event.rank == rank for event in read_events(directory))


def lose_when_all_have_the_last_step(name: int) -> Act:
    def act(here: Here) -> None:
        if here.name == name and here.tries == STEPS:
            here.run.close = die

    return act


def lose_before(name: int, has_it: bool) -> Act:
    """The rank itself has the last step in memory, or not; whether the others have, it has not heard."""

    def act(here: Here) -> None:
        if here.name == name and here.tries == STEPS:
            if has_it:
                topology.exchange = die  # type: ignore[assignment]
            else:
                here.run.finish = die

    return act


@pytest.mark.parametrize("strategy", ["snapshot", "log"])
def test_a_rank_lost_when_all_have_the_last_step_in_memory_costs_nothing(directory: Path, strategy: str) -> None:
    """Its keeper has its part, and the others do not even have to meet again."""
    team = Team(directory, 3, on_loss=["rollback"], strategy=strategy).start(lose_when_all_have_the_last_step(1))
    found = survivors(team.wait())
    assert [(one["world"], one["step"], one["tries"]) for one in found] == [(3, STEPS, STEPS)] * 2
    check_durable_before_anybody_ended(directory)


@pytest.mark.parametrize("strategy", ["snapshot", "log"])
@pytest.mark.parametrize("policy", ["spare", "rollback", "forward"])
@pytest.mark.parametrize("has_it", [False, True], ids=["without it", "with it"])
def test_a_rank_lost_before_all_have_it_is_lived_through(
    directory: Path, policy: str, strategy: str, has_it: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bring_down = Keeping.bring_down

    def noted(self: Keeping, step: int, why_hopeless: Any) -> None:
        bring_down(self, step, why_hopeless)
        Path(directory.parent, f"down-{os.getpid()}").touch()

    monkeypatch.setattr(Keeping, "bring_down", noted)
    team = Team(directory, 3, spares=policy == "spare", on_loss=[policy], strategy=strategy)
    found = survivors(team.start(lose_before(1, has_it)).wait())
    world = 3 if policy == "spare" else 2
    assert [(one["world"], one["step"]) for one in found] == [(world, STEPS)] * world
    assert len({one["state"] for one in found}) == 1
    durable = {int(note.name.removeprefix("down-")) for note in directory.parent.glob("down-*")}
    assert durable == {one["pid"] for one in found}, "nobody ends before the last step is durable"


def check_durable_before_anybody_ended(directory: Path) -> None:
    events = read_events(directory)
    durable = min(e.time for e in events if isinstance(e, Persisted) and e.step == STEPS)
    assert durable < min(e.time for e in events if isinstance(e, Finished))


def lose_one_and_keep_another_waiting(directory: Path) -> Act:
    """Rank 0 finishes; then rank 1 is lost; rank 2 waits for others all the time."""

    def wait_and_die() -> None:
        until(lambda: has_finished(directory, 0))
        die()

    def exchange_and_wait(payload: bytes, place: topology.Topology) -> list[bytes]:
        found = exchange(payload, place)
        topology.exchange = exchange
        until(lambda: has_finished(directory, 0))
        dist.barrier()  # its peers are gone
        return found

    exchange = topology.exchange

    def act(here: Here) -> None:
        if here.tries != STEPS:
            return
        if here.name == 1:
            here.run.close = wait_and_die
        if here.name == 2:
            topology.exchange = exchange_and_wait

    return act


def test_who_still_waits_when_another_has_finished_is_told_of_a_loss_and_goes_on(directory: Path) -> None:
    found = Team(directory, 3, on_loss=["rollback"]).start(lose_one_and_keep_another_waiting(directory)).wait()
    assert [(one["world"], one["step"]) for one in survivors(found)] == [(3, STEPS), (1, STEPS)]
    assert [event.rank for event in read_events(directory) if isinstance(event, RanksLost)] == [1]


def test_or_is_told_to_start_again_and_that_ends_the_run(directory: Path) -> None:
    found = Team(directory, 3, on_loss=["restart"]).start(lose_one_and_keep_another_waiting(directory)).wait()
    assert found[0].code == 0 and found[1].killed
    assert found[2].code == Restart.exit_code and "rank 1: its process ended" in found[2].error
    again = survivors(Team(directory, 3, on_loss=["restart"]).start().wait())
    assert [(one["step"], one["tries"]) for one in again] == [(STEPS, 0)] * 3


def test_if_the_lost_had_what_all_wait_for_the_others_say_so_in_time(directory: Path) -> None:
    """As it is when a node is lost with its memory and its disk."""
    lose = lose_when_all_have_the_last_step(1)

    def act(here: Here) -> None:
        lose(here)
        if here.tries == STEPS:
            here.run._keeper.wait_durable = lambda *_, **__: time.sleep(0.05)

    found = Team(directory, 3, on_loss=["rollback"], detect_timeout="1s").start(act).wait()
    assert not found[0].killed and not found[2].killed
    check_restart(found[0])
    check_restart(found[2])


def check_restart(ended: Ended) -> None:
    assert ended.code == Restart.exit_code
    assert f"Step {STEPS}, the last, is not durable yet" in ended.error and "rank 1: its process ended" in ended.error


def test_a_last_step_that_is_long_on_its_way_to_the_disk_is_waited_for(directory: Path) -> None:
    """For longer than a step may take: nobody hangs."""

    def act(here: Here) -> None:
        if here.tries == STEPS:
            keeper = here.run._keeper
            wait, until_s = keeper.wait_durable, time.monotonic() + 4.0
            keeper.wait_durable = lambda *args, **how: (
                wait(*args, **how) if time.monotonic() > until_s else time.sleep(0.05)
            )

    found = Team(directory, 3, on_loss=["rollback"], detect_timeout="0.5s").start(act).wait()
    assert [one["step"] for one in survivors(found)] == [STEPS] * 3
    assert not any(isinstance(event, RanksLost) for event in read_events(directory))


def test_a_restart_is_never_taken_for_a_step_to_be_done_again() -> None:
    """Whatever it says: where a group is lost, words like these come from torch."""
    heard = Presence.__new__(Presence)
    heard._changed, heard._line, heard._settings = threading.Condition(), None, SimpleNamespace(detect_s=0.1)
    heard.lost = Lost(view=0, ranks=(1,), reason="its node store-1 was not heard of")
    assert heard.is_by_loss(ConnectionError("connection closed by peer"))
    assert not heard.is_by_loss(Restart(heard.lost.reason))
