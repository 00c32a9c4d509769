"""A rank is lost inside a step, and the others finish it without the lost: nothing is done again, and it says lossy."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from team import STEPS, Act, Here, Team, in_backward, in_forward, in_the_update, kill_at, survivors
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import everstep
from everstep import run
from everstep.capture import compress
from everstep.capture.position import Feed
from everstep.errors import Restart
from everstep.events import WentOn, read_events
from everstep.live import forward, presence
from everstep.live.course import Begin, Give, GiveUp, GoOn, Reduce, Saying, next_move

BUCKET_MB = 0.0001  # a bucket for almost every parameter
BATCH = 12  # of three ranks
BUCKETS = 5


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def team(directory: Path, world: int = 3, **options: Any) -> Team:
    return Team(directory, world, **{"on_loss": "forward", "ddp": {"bucket_cap_mb": BUCKET_MB}, **options})


def went_on(directory: Path) -> list[WentOn]:
    return [event for event in read_events(directory) if isinstance(event, WentOn)]


def check(started: Team, *, left: int, tries: tuple[int, ...] = (STEPS,)) -> list[WentOn]:
    """The loop ends in the same processes, with the same state on all, and no step was done twice."""
    found = survivors(started.wait())
    assert [one["world"] for one in found] == [left] * left
    assert {one["pid"] for one in found} <= set(started.pids.values())
    assert len({one["state"] for one in found}) == 1
    assert {one["step"] for one in found} == {STEPS}
    assert all(one["tries"] in tries for one in found)
    events = went_on(started.directory)
    assert events and not any(event.exact for event in events)
    return events


def between_buckets(name: int, tries: int, parameter: int) -> Act:
    """When this gradient is there, and those before are reduced on all ranks."""

    def act(here: Here) -> None:
        if here.name == name and here.tries == tries - 1:
            tensor = list(here.model.parameters())[parameter]
            tensor.register_post_accumulate_grad_hook(lambda _: (time.sleep(0.1), die()))

    return act


def before_the_update(name: int, tries: int) -> Act:
    def act(here: Here) -> None:
        if here.name == name and here.tries == tries:
            here.optimizer.register_step_pre_hook(die)

    return act


@pytest.mark.parametrize("parameter", range(6))
def test_a_rank_lost_between_two_buckets_is_done_without(directory: Path, parameter: int) -> None:
    events = check(team(directory).start(between_buckets(1, 5, parameter)), left=2)
    missing = {event.buckets for event in events}
    assert {(event.policy, event.samples, event.step) for event in events} == {("forward", BATCH // 3, 5)}
    assert missing == {{5: 5, 4: 5, 3: 4, 2: 3, 1: 2, 0: 1}[parameter]}


@pytest.mark.parametrize("strategy", ["snapshot", "log"])
@pytest.mark.parametrize(
    "act",
    [in_forward(2, 6), in_backward(0, 4, 3), before_the_update(2, 7), in_the_update(0, 7), kill_at(1, STEPS)],
    ids=["in forward", "rank 0 in backward", "before the update", "rank 0 after the update", "in the last step"],
)
def test_wherever_a_rank_is_lost_nothing_is_done_again(directory: Path, act: Act, strategy: str) -> None:
    check(team(directory, strategy=strategy).start(act), left=2)


def test_a_rank_lost_in_its_loader_is_done_without(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    next_batch = Feed.next_batch

    def next_or_die(self: Feed) -> Any:
        if (self.rank, self._batches) == (2, 5):
            die()
        return next_batch(self)

    monkeypatch.setattr(Feed, "next_batch", next_or_die)
    check(team(directory).start(), left=2)


def test_two_may_be_lost_at_once(directory: Path) -> None:
    def act(here: Here) -> None:
        if here.name in (0, 2):
            in_backward(here.name, 5, 3)(here)

    check(team(directory, 4).start(act), left=2)


def test_all_but_one_may_be_lost(directory: Path) -> None:
    def act(here: Here) -> None:
        if here.name != 1:
            in_backward(here.name, 5, 3)(here)

    check(team(directory).start(act), left=1)


def test_one_after_the_other_may_be_lost(directory: Path) -> None:
    def act(here: Here) -> None:
        in_backward(0, 3, 3)(here)
        in_backward(2, 6, 0)(here)
        in_the_update(3, 9)(here)

    events = check(team(directory, 4).start(act), left=1)
    assert {event.view for event in events} == {1, 2, 3}


@pytest.mark.parametrize(
    "moment",
    [
        (presence.Presence, "meet"),
        (forward.Forward, "_say"),
        (forward.Forward, "_reduce"),
        (forward.Forward, "_answer"),
        (run.Run, "_listen"),
        (forward.Forward, "has_begun"),
    ],
    ids=lambda moment: moment[1],
)
def test_a_rank_lost_while_the_others_finish_the_step_is_done_without_too(
    directory: Path, moment: tuple[type, str]
) -> None:
    def act(here: Here) -> None:
        in_backward(0, 5, 3)(here)
        if here.name == 1 and here.tries == 4:
            setattr(*moment, die)

    check(team(directory, 4).start(act), left=2)


def test_nobody_does_the_first_step_of_a_life_that_another_has_not_begun(directory: Path) -> None:
    """Rank 1 is lost when rank 3 has begun the new life, and rank 2 has not."""
    arrive = run.arrive

    def arrive_and_fail(*args: Any, **options: Any) -> None:
        run.arrive = arrive
        arrive(*args, **options)
        time.sleep(0.5)
        raise ConnectionError("connection closed")

    def act(here: Here) -> None:
        in_backward(0, 5, 3)(here)
        if here.name == 1 and here.tries == 4:
            forward.Forward.has_begun = die  # type: ignore[assignment,method-assign]
        if here.name == 2 and here.tries == 4:
            run.arrive = arrive_and_fail

    check(team(directory, 4).start(act), left=2)


def test_a_rank_that_is_a_step_ahead_gives_the_others_what_they_lack(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 never hears the end of the fifth step's last two reductions; rank 0 is in the sixth by then."""
    failure = forward._Bucket.failure

    def failed(self: forward._Bucket, done: Any) -> Exception | None:
        found = failure(self, done)
        is_late = os.environ["RANK"] == "1" and self.batch == 5 and self.number % BUCKETS >= 3
        return ConnectionError("connection closed") if is_late else found

    monkeypatch.setattr(forward._Bucket, "failure", failed)
    events = check(team(directory).start(before_the_update(2, 5)), left=2)
    assert {event.step for event in events} == {6}  # a life begins where all are
    assert {(event.buckets, event.samples) for event in events} == {(5, BATCH // 3)}  # of the sixth


def test_in_a_good_step_nobody_is_woken_but_the_program(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that would meet the others looks once, when it begins."""
    broken = forward.Forward._broken

    def noted(self: forward.Forward) -> Any:
        with Path(directory.parent, f"looks-{os.getpid()}").open("a") as file:
            file.write("x")
        return broken(self)

    monkeypatch.setattr(forward.Forward, "_broken", noted)
    found = survivors(team(directory).start().wait())
    looks = [Path(directory.parent, f"looks-{one['pid']}").read_text() for one in found]
    assert looks == ["x"] * 3


def test_nobody_meets_others_before_all_that_was_begun_has_ended() -> None:
    """A later reduction may be heard of before an earlier one, and only the first that is missing may be asked for."""
    here = forward.Forward.__new__(forward.Forward)
    here._changed, here._stop, here._then, here._has_met = threading.Condition(), None, None, False
    here.is_under_way, here._held = True, {}
    buckets = [forward._Bucket(number, 1, torch.ones(1), torch.ones(1)) for number in range(3)]
    here._open = {one.number: one for one in buckets}
    meets, lacks = threading.Event(), list[int]()
    here._meet = meets.set  # type: ignore[method-assign]
    here._do = lambda move: None  # type: ignore[method-assign]

    def say() -> list[Saying]:
        lacks.append(min(here._open))
        return [says(1)]

    here._say = say  # type: ignore[method-assign]
    crossing = threading.Thread(target=here._cross)
    buckets[2].error = ConnectionError("connection closed")
    crossing.start()
    assert not meets.wait(0.2)
    here._finish(buckets[0])
    assert not meets.wait(0.2)
    failed: torch.futures.Future[Any] = torch.futures.Future()
    failed.set_exception(ConnectionError("connection closed"))
    here._hear(buckets[1], failed)
    crossing.join(20)
    assert meets.is_set() and lacks == [1]


def test_what_needs_the_lost_for_more_than_gradients_is_rolled_back(directory: Path) -> None:
    def act(here: Here) -> None:
        dist.all_reduce(torch.zeros(1))  # of the program: nobody knows what it is for
        in_backward(1, 5, 3)(here)

    started = team(directory, on_loss=["forward", "rollback"]).start(act)
    events = check(started, left=2, tries=(STEPS + 1, STEPS + 2))
    assert {event.policy for event in events} == {"rollback"}
    assert all("process group" in event.reason for event in events)


def test_what_cannot_go_forward_and_may_not_go_back_is_started_again(directory: Path) -> None:
    found = team(directory).start(kill_at(1, 1)).wait()
    assert {found[name].code for name in (0, 2)} == {Restart.exit_code}
    assert all("final buckets" in found[name].error for name in (0, 2))


def test_a_spare_comes_first_where_it_is_wished_for_first(directory: Path) -> None:
    def act(here: Here) -> None:
        in_backward(1, 5, 3)(here)
        in_backward(0, 9, 3)(here)

    found = survivors(team(directory, spares=1, on_loss=["spare", "forward"]).start(act).wait())
    assert len({one["state"] for one in found}) == 1
    assert [one["world"] for one in found] == [2, 2]
    told = sorted((event.view, event.policy) for event in went_on(directory))
    assert told == [(1, "spare")] * 3 + [(2, "forward")] * 2


def test_gradients_that_gather_over_batches_are_kept(directory: Path) -> None:
    """Rank 1 is lost in the first of three; the others begin their next life with what they have of it."""

    def act(here: Here) -> None:
        in_forward(1, 7)(here)
        if here.tries != 7:
            return
        time.sleep(0.5)  # until the loss is heard of
        had = [parameter.grad.clone() for parameter in here.model.parameters()]

        def compare(*_: object) -> None:
            handle.remove()
            assert os.environ["WORLD_SIZE"] == "2"
            assert all(map(torch.equal, had, [parameter.grad for parameter in here.model.parameters()]))

        handle = here.model.register_forward_pre_hook(compare)

    check(team(directory, gather=3).start(act), left=2, tries=(3 * STEPS,))


def test_the_status_of_the_run_says_lossy(directory: Path) -> None:
    check(team(directory).start(between_buckets(1, 5, 3)), left=2)
    told = everstep.open(directory).status()["went_on"]
    assert [(one.policy, one.step, one.exact, one.buckets, one.samples) for one in told] == [
        ("forward", 5, False, 4, 4)
    ]
    said = subprocess.run(
        [sys.executable, "-m", "everstep.cli", "status", directory], capture_output=True, text=True, check=True
    )
    assert "at step 5, view 1: forward, 2 ranks, lossy: 4 buckets without 4 samples" in said.stdout


def test_samples_that_were_not_in_a_broken_step_are_seen_once(directory: Path) -> None:
    found = survivors(team(directory).start(between_buckets(1, 5, 3)).wait())
    samples = [sample for one in found for batch in one["seen"] for sample in batch]
    assert len(samples) == len(set(samples)) == 5 * 2 * BATCH // 3 + (STEPS - 5) * BATCH


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"ddp": {"find_unused_parameters": True}}, "find_unused_parameters=False"),
        ({"prepare": lambda model: model.register_comm_hook(None, allreduce_hook)}, "another communication hook"),
        ({"compress": compress.TopK(0.5)}, "compress="),
    ],
    ids=["unused", "hook", "compress"],
)
def test_where_reductions_could_not_be_finished_it_is_said_at_once(
    directory: Path, options: dict[str, Any], word: str
) -> None:
    (found,) = team(directory, 1, **options).start().wait().values()
    assert "BadConfig" in found.error and word in found.error


# -- what is decided, in one round


def says(batch: int, needs: int | None = None, *has: int, broken: str = "") -> Saying:
    return Saying(batch=batch, share=0.25, needs=needs, has=has, broken=broken)


@pytest.mark.parametrize(
    ("said", "move"),
    [
        ([says(3, 7, 5, 6), says(3, 7, 6)], Reduce(number=7, present=0.5)),
        ([says(3, 7, 5, 6), says(3, 6, 5)], Give(number=6, source=0)),
        ([says(3, 6, 5, 7), says(3, 7, 5, 6)], Give(number=6, source=1)),
        ([says(4, 8, 6, 7), says(3, 7, 6)], Give(number=7, source=0)),
        ([says(4, 8, 6, 7), says(3, None, 6, 7)], GoOn(batch=4)),
        ([says(4), says(3)], GoOn(batch=4)),
        ([says(4), says(4)], Begin()),
        ([says(4), says(4, broken="it fell")], GiveUp(reason="rank 1: it fell")),
        ([says(4, None, 7), says(4, 8, 7)], GiveUp(reason="rank 0 knows nothing of a reduction that others wait for")),
        ([says(4, 9), says(4, 8, 7)], GiveUp(reason="rank 0 knows nothing of a reduction that others wait for")),
    ],
)
def test_what_is_done_next_follows_from_where_all_are(said: list[Saying], move: object) -> None:
    assert next_move(said) == move
