"""A rank of a model that is cut over ranks is lost, and training goes on in the same processes."""

from __future__ import annotations

import os
import re
import signal
import time
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from crews import Job
from lives import cuts_made, run_directory, told
from sharing import train_sharded
from team import STEPS, Act, Ended, Here, Team, in_forward, in_the_update, kill_at, own, survivors

from everstep.errors import Restart
from everstep.events import Called, Started, WentOn

EXAMPLE = Path(__file__).parents[2] / "examples/train_hsdp.py"


def team(directory: Path, world: int = 4, **options: Any) -> Team:
    return Team(directory, world, train=train_sharded, **options)


def in_backward_of(name: int, tries: int, layer: int) -> Act:
    """When its gradient is about to be made: of the layers above it gradients are reduced, or on their way."""

    def act(here: Here) -> None:
        if here.name == name and here.tries == tries - 1:
            here.model[layer].register_full_backward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))

    return act


def all_of(*acts: Act) -> Act:
    def act(here: Here) -> None:
        for one in acts:
            one(here)

    return act


def replicas(found: dict[int, Ended], shards: int = 2) -> list[set[str]]:
    """By place in a replica: the states that replicas have there."""
    results = survivors(found)
    return [{one["state"] for one in results if one["rank"] % shards == place} for place in range(shards)]


@pytest.fixture(scope="module")
def undisturbed() -> dict[int, Ended]:
    with run_directory() as directory:
        return team(directory, on_loss=["spare", "rollback"]).start().wait()


@pytest.mark.parametrize(
    "act",
    [
        pytest.param(kill_at(1, 5), id="before the update", marks=pytest.mark.soak),
        pytest.param(in_forward(2, 6), id="in forward", marks=pytest.mark.soak),
        pytest.param(in_backward_of(0, 4, 3), id="in backward", marks=pytest.mark.soak),
        pytest.param(in_backward_of(3, 4, 0), id="late in backward"),
        pytest.param(in_the_update(3, 7), id="in the update", marks=pytest.mark.soak),
        pytest.param(all_of(kill_at(1, 5), in_backward_of(0, 5, 3)), id="a whole replica", marks=pytest.mark.soak),
    ],
)
def test_with_spares_every_replica_is_whole_again_and_the_run_ends_bit_for_bit(
    directory: Path, undisturbed: dict[int, Ended], act: Act
) -> None:
    ranks = team(directory, spares=2, on_loss=["spare"])
    found = ranks.start(act).wait()
    assert own(found) == own(undisturbed)
    assert sum(one.killed for one in found.values()) in (1, 2)
    assert all(len(states) == 1 for states in replicas(found))
    assert all(one["pid"] in ranks.pids.values() for one in survivors(found))


@pytest.mark.soak
def test_those_who_wait_for_one_that_is_busy_stand_still_at_once(directory: Path) -> None:
    """Rank 2 is no neighbour of the dead: it waits for rank 0, which has not noticed anything yet."""

    def act(here: Here) -> None:
        if here.tries == 5 and here.name in (0, 1):
            time.sleep(3.0 if here.name == 0 else 1.0)
            if here.name == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    survivors(team(directory, spares=1, on_loss=["spare"]).start(act).wait())
    stopped = {event.rank: event.stopped_s for event in told(directory, WentOn)}
    assert stopped[2] < 1.0 < stopped[0]


def test_without_a_spare_whole_replicas_go_on_and_the_rest_of_the_broken_one_stands_by(directory: Path) -> None:
    found = team(directory, on_loss=["spare", "rollback"], batch="shrink", linger="1s").start(kill_at(1, 5)).wait()
    results = survivors(found)
    assert sorted(one["rank"] for one in results) == [0, 1] and {one["world"] for one in results} == {2}
    assert {one["step"] for one in results} == {STEPS}
    assert found[0].result is None and (found[0].code, found[0].error) == (0, "")  # it stood by until the end
    (called,) = told(directory, Called)
    assert (called.policy, called.world, called.lost, called.idle) == ("rollback", 2, (1,), (0,))
    samples = list(chain(*chain(*(one["seen"] for one in results))))
    assert len(samples) == len(set(samples))


@pytest.mark.soak
def test_a_replica_is_made_whole_by_who_stands_by_and_who_comes(directory: Path) -> None:
    """The rank that lost its neighbour waits in its process; with a fresh spare it trains again, in another place."""

    def aside(here: Here) -> None:
        while here.run.status()["world"] == 2 and here.run.step >= STEPS - 2:
            time.sleep(0.05)  # not before the world has grown back

    options = {"on_loss": ["spare", "rollback"], "dropout": 0.0, "aside": aside}
    ranks = team(directory, **options).start(kill_at(0, 5))
    while not told(directory, Called):
        time.sleep(0.01)
    ranks.add(4, spare=True)
    found = ranks.wait()
    results = survivors(found)
    assert sorted((one["rank"], one["world"]) for one in results) == [(rank, 4) for rank in range(4)]
    assert found[1].result is not None and (found[1].result["pid"], found[1].result["rank"]) == (ranks.pids[1], 2)
    assert all(len(states) == 1 for states in replicas(found))
    assert [(event.policy, event.world) for event in told(directory, Called)] == [("rollback", 2), ("spare", 4)]


@pytest.mark.soak
def test_replicas_that_are_left_train_on_the_very_same_global_batches(directory: Path) -> None:
    """Also where ranks have unequal shares of them: of six, four are left."""
    options = {"on_loss": "rollback", "dropout": 0.0, "steps": 20, "linger": "1s"}
    found = team(directory, 6, **options).start(kill_at(3, 5)).wait()
    with run_directory() as other:
        whole = team(other, 6, **options).start().wait()
    left, undisturbed = survivors(found), survivors(whole)
    assert {one["world"] for one in left} == {4}
    assert all(len(states) == 1 for states in replicas(found))
    batches, wanted = (
        [sorted(chain(*rows)) for rows in zip(*(one["seen"] for one in results), strict=True)]
        for results in (left, undisturbed)
    )
    assert batches[4:] == wanted[4:]
    weights = [[one["weight"] for one in results if one["rank"] < 2] for results in (left, undisturbed)]
    assert sum(weights[0]) == pytest.approx(sum(weights[1]), rel=1e-4)


@pytest.mark.soak
def test_without_replicas_a_spare_takes_the_part_of_the_lost_from_memory(directory: Path) -> None:
    options = {"shards": None, "on_loss": ["spare", "rollback"]}
    with run_directory() as other:
        undisturbed = team(other, 2, **options).start().wait()
    found = team(directory, 2, spares=1, **options).start(in_backward_of(1, 5, 3)).wait()
    assert own(found) == own(undisturbed)


def test_without_replicas_and_spares_all_are_started_again(directory: Path) -> None:
    found = team(directory, 2, shards=None, on_loss=["spare", "rollback"]).start(kill_at(0, 5)).wait()
    assert (found[0].killed, found[1].code) == (True, Restart.exit_code)
    (called,) = told(directory, Called)
    assert (called.policy, called.world) == ("restart", 0)
    assert called.reason == "1 lost, and 0 spares; none of the replicas, of 2 ranks each, is whole"


@pytest.mark.soak
@pytest.mark.parametrize("groups", [0, 3])
def test_a_rank_lost_while_meshes_are_moved_is_lived_through_too(
    directory: Path, undisturbed: dict[int, Ended], groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it has made so many of the groups of the next view."""
    new_group, made = dist.new_group, 0

    def die(*args: Any, **options: Any) -> Any:
        nonlocal made
        if os.environ["RANK"] == "2" and not os.environ["EVERSTEP_SPARE"] and dist.get_backend() == "gloo":
            made += 1
            if made == 2 * 4 + 1 + groups:  # those of the program, and those that guard() made of them
                os.kill(os.getpid(), signal.SIGKILL)
        return new_group(*args, **options)

    monkeypatch.setattr("torch.distributed.device_mesh.new_group", die)
    found = team(directory, spares=2, on_loss=["spare"]).start(kill_at(1, 4)).wait()
    assert own(found) == own(undisturbed)
    assert sum(one.killed for one in found.values()) == 2


@pytest.mark.soak
def test_one_loss_after_the_other_is_lived_through_in_every_phase(
    directory: Path, undisturbed: dict[int, Ended]
) -> None:
    mark = directory.parent / "a spare was lost"

    def lose_a_spare(here: Here) -> None:
        """One of those who came for the others, whichever was called first."""
        if here.name > 3 and here.tries == 4 and not mark.exists():
            mark.touch()
            in_backward_of(here.name, 5, 0)(here)

    act = all_of(in_backward_of(0, 3, 3), in_forward(1, 5), in_the_update(2, 7), kill_at(3, 12), lose_a_spare)
    found = team(directory, spares=5, on_loss=["spare"]).start(act).wait(120)
    assert own(found) == own(undisturbed)
    assert sum(one.killed for one in found.values()) == 5


@pytest.mark.soak
def test_what_cannot_be_lived_through_is_started_again_from_memory_with_the_same_bits(
    directory: Path, tmp_path: Path
) -> None:
    """Of a model without replicas one rank is killed, and nobody stands by."""
    words = ["--nproc", 2, EXAMPLE, "--steps", 200, "--shards", 2, "--on-loss", "rollback", "--dir"]
    job = Job(tmp_path, *words, directory)
    job.until(lambda: cuts_made(directory) >= 20)
    before = told(directory, Started)
    os.kill(before[0].pid, signal.SIGKILL)
    assert job.wait() == 0, job.said
    assert "left with code 75: the job is to be started again" in job.said
    assert {event.source for event in told(directory, Started)[len(before) :]} == {"memory"}
    with run_directory() as other:
        (folder := tmp_path / "undisturbed").mkdir()
        undisturbed = Job(folder, *words, other)
        assert undisturbed.wait() == 0, undisturbed.said
    assert said_at_the_end(job) == said_at_the_end(undisturbed)


def said_at_the_end(job: Job) -> dict[str, str]:
    return dict(re.findall(r"^rank (\d) of \d \(process \d+\): (.*)$", job.said, re.MULTILINE))
