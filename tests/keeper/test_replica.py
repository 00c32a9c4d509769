"""A replica is as new as the trainer and has its bits; whatever becomes of it, nothing else is lost."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lives import MeetingPlace, digest, live, must_finish, run_directory, run_of, way_to
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import everstep
from everstep import run as door
from everstep.capture import gradients, steering
from everstep.capture.arena import Arena, find_arenas
from everstep.capture.host import arena_root
from everstep.cli import app
from everstep.events import Degraded, Drift, Persisted, Replayed, ReplicaMade, Started, read_events
from everstep.keeper.client import keeper_pid, replica_of
from everstep.recover.survey import Sources
from everstep.store.places import Places

STEPS, KILLED_AT = 24, 15
At = Callable[[everstep.Run], None]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.001, centered=True, momentum=0.5),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "muon": lambda p: torch.optim.Muon([q for q in p if q.dim() == 2], lr=0.01),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2),
}


@pytest.fixture
def directory() -> Iterator[Path]:
    with run_directory() as folder:
        yield folder
        told = replica_of(run_of(folder)) if run_of(folder) else None
        stop_keeper(folder)
        if told is not None:
            os.kill(told.pid, signal.SIGKILL)  # it may have been stopped


def stop_keeper(directory: Path) -> None:
    pid = keeper_pid(run_of(directory)) if run_of(directory) else None
    if pid is not None:
        os.kill(pid, signal.SIGKILL)


def train(directory: Path, at_step: At = lambda run: None, kind: str = "adam", **options: Any) -> dict[str, Any]:
    """A life that is slow enough for a log, whatever the disk."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 3))
    optimizer = OPTIMIZERS[kind](list(model.parameters()))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
    data = TensorDataset(torch.randn(48, 8), torch.randint(0, 3, (48,)))
    loader = DataLoader(data, batch_size=4, shuffle=True)
    if dist.is_initialized():
        model = nn.parallel.DistributedDataParallel(model)
    options = {"steps": STEPS, "epochs": None, "keeper": "process", "strategy": "replica", **options}
    run = everstep.guard(model, optimizer, loader, dir=directory, scheduler=scheduler, **options)
    for x, y in run:

        def loss() -> torch.Tensor:
            model.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            return loss

        if kind == "lbfgs":
            optimizer.step(loss)
        else:
            loss()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        scheduler.step()
        if run.step and options["keeper"] == "process":
            run.wait("durable")  # a ring that is full would end the chain, and a replica with it
        at_step(run)
    return {
        "resumed_from": run.resumed_from,
        "digest": digest(model.state_dict(), optimizer.state_dict(), scheduler.state_dict(), torch.get_rng_state()),
    }


def undisturbed(kind: str = "adam") -> str:
    with run_directory() as folder:
        return str(must_finish(lambda: train(folder, kind=kind, keeper="inline", strategy="snapshot"))["digest"])


def replica(run: everstep.Run) -> dict[str, Any]:
    return run.status()["replica"] or {"step": -1}  # type: ignore[return-value]


def await_replica(run: everstep.Run, timeout_s: float = 90.0) -> None:
    """Until it has what the loop has cut; the step that the loop is in has no record yet."""
    deadline = time.monotonic() + timeout_s
    while replica(run)["step"] < run.step:
        assert time.monotonic() < deadline, f"the replica is at {replica(run)}, the run at {run.step}"
        time.sleep(0.02)


def take_bases_every(steps: int) -> None:
    steering.Steering.steps_per_base = steps  # type: ignore[method-assign,assignment]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_when_followed(run: everstep.Run) -> None:
    if run.step == KILLED_AT:
        await_replica(run)
        die()


def events(directory: Path, kind: type, after: float = 0.0) -> list[Any]:
    return [event for event in read_events(directory) if type(event) is kind and event.time > after]


def reasons(directory: Path) -> list[str]:
    return [f"{event.what}: {event.reason}" for event in events(directory, Degraded)]


def replicas(directory: Path) -> list[Arena]:
    return [arena for arena in find_arenas(arena_root(None), run_of(directory)) if arena.kind == "replica"]


# -- as new as the trainer, with its bits


@pytest.mark.parametrize(
    "kind",
    ["adam", "sgd", *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("adamw", "adagrad", "rmsprop", "nadam"))],
)
def test_a_killed_trainer_goes_on_from_the_newest_step_without_replay(kind: str, directory: Path) -> None:
    assert live(lambda: train(directory, die_when_followed, kind)).killed
    ended = must_finish(lambda: train(directory, kind=kind))
    assert ended == {"resumed_from": KILLED_AT, "digest": undisturbed(kind)}
    assert events(directory, Replayed) == []
    assert events(directory, Started)[-1].source == "memory"
    assert reasons(directory) == []


def test_it_is_compared_with_every_true_base_and_is_the_same(directory: Path) -> None:
    def life() -> dict[str, Any]:
        take_bases_every(4)
        return train(directory, lambda run: await_replica(run) if run.step in (3, 15) else None)

    must_finish(life)
    found = events(directory, Drift)
    assert len({drift.step for drift in found}) >= 2
    assert [(drift.differing, drift.largest) for drift in found] == [(0, 0.0)] * len(found)


def test_it_is_written_to_the_disk_while_the_trainer_takes_no_base(directory: Path) -> None:
    def watch(run: everstep.Run) -> None:
        if run.step in (6, 12, 18):
            await_replica(run)
            assert run._keeper.wait_durable(run.step, 60.0, as_base=True)
        if run.step == 20:
            assert run._capture.sealed_step < 6
            die()

    def life() -> dict[str, Any]:
        take_bases_every(1000)
        return train(directory, watch)

    assert live(life).killed
    assert {6, 12, 18} <= {event.step for event in events(directory, Persisted)}
    stop_keeper(directory)
    for arena in find_arenas(arena_root(None), run_of(directory)):
        arena.remove()
    assert must_finish(lambda: train(directory))["digest"] == undisturbed()


def test_where_it_stands_is_told(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert live(lambda: train(directory, die_when_followed)).killed
    told = everstep.open(directory).status()["replica"]
    assert (told.step, told.behind, told.exact) == (KILLED_AT, 0, True)
    assert told.cpu_s_per_step > 0
    app(["status", str(directory)], standalone_mode=False)
    assert f"replica: step {KILLED_AT}, 0 behind" in capsys.readouterr().out


# -- several ranks


def two_ranks(directory: Path, at_step: At = lambda run: None, **options: Any) -> list[dict[str, Any] | None]:
    store = MeetingPlace()

    def rank(number: int) -> dict[str, Any]:
        os.environ |= {"RANK": str(number), "WORLD_SIZE": "2", "LOCAL_RANK": str(number), **way_to(store.port)}
        everstep.init_process_group("gloo")
        return train(directory, at_step, **options)

    pid = os.fork()
    if pid == 0:
        os._exit(0 if live(lambda: rank(1)).result is not None else 1)
    first = live(lambda: rank(0))
    _, status = os.waitpid(pid, 0)
    store.close()
    return [first.result, {} if status == 0 else None]


def test_two_ranks_go_on_from_the_newest_step_without_replay(directory: Path) -> None:
    with run_directory() as other:
        unbroken = two_ranks(other, keeper="inline", strategy="snapshot")
    assert two_ranks(directory, die_when_followed) == [None, None]
    assert [replica.seals()[0].step for replica in replicas(directory)] == [KILLED_AT, KILLED_AT]
    ended = two_ranks(directory)
    assert ended[0] is not None and ended[1] is not None and unbroken[0] is not None
    assert ended[0] == {"resumed_from": KILLED_AT, "digest": unbroken[0]["digest"]}
    assert events(directory, Replayed) == []


# -- where there can be none


@pytest.mark.parametrize(
    ("kind", "name"), [("adafactor", "Adafactor"), ("muon", "Muon"), ("lbfgs", "LBFGS"), ("fused", "AdamW")]
)
def test_an_optimizer_that_it_cannot_follow_is_named_and_the_run_is_kept_by_its_log(
    kind: str, name: str, directory: Path
) -> None:
    def die_at(run: everstep.Run) -> None:
        if run.step == KILLED_AT:
            run.wait("sealed")
            die()

    assert live(lambda: train(directory, die_at, kind)).killed
    assert any("there is no replica" in reason and name in reason for reason in reasons(directory))
    assert replicas(directory) == []
    assert must_finish(lambda: train(directory, kind=kind)) == {
        "resumed_from": KILLED_AT, "digest": undisturbed(kind)
    }  # fmt: skip


def test_where_arithmetic_differs_every_image_and_the_resumed_run_say_so(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def life(at_step: At = lambda run: None) -> dict[str, Any]:
        door.followed = lambda subjects, emit: "cuda"
        return train(directory, at_step)

    def watch(run: everstep.Run) -> None:
        if run.step == 8:
            await_replica(run)
            assert run._keeper.wait_durable(run.step, 60.0, as_base=True)
        die_when_followed(run)

    assert live(lambda: life(watch)).killed
    for words in (["ls"], ["plan"], ["show", "--step", "8"]):
        app([words[0], str(directory), *words[1:]], standalone_mode=False)
        assert "replica of cuda" in re.sub(r"[│\s]+", " ", capsys.readouterr().out), words
    assert not everstep.open(directory).status()["replica"].exact
    assert must_finish(life)["resumed_from"] == KILLED_AT
    assert any(f"step {KILLED_AT} comes from a replica" in reason for reason in reasons(directory))


def test_where_arithmetic_differs_drift_is_measured_and_does_not_spoil_the_steps_after_it(directory: Path) -> None:
    """A fused kernel stands in for a device: the replica's plain form rounds otherwise."""

    def life(at_step: At = lambda run: None) -> dict[str, Any]:
        door.followed = lambda subjects, emit: "cuda"
        take_bases_every(12)
        gradients._DIGEST_EVERY = 2
        return train(directory, at_step, "fused")

    def watch(run: everstep.Run) -> None:
        if run.step in (12, 13, 16):
            await_replica(run)
        if run.step == 16:
            os.kill(replica(run)["pid"], signal.SIGSTOP)
        if run.step == 19:
            die()

    assert live(lambda: life(watch)).killed
    drift = events(directory, Drift)[0]
    assert drift.differing > 0 and 0 < drift.largest < 1e-4
    assert must_finish(life)["resumed_from"] == 19  # by digests of training, the replica would be taken for damaged


# -- whatever becomes of it


def test_a_replica_that_stands_still_holds_up_neither_log_nor_training(directory: Path) -> None:
    def stop(run: everstep.Run) -> None:
        if run.step == 5:
            await_replica(run)
            os.kill(replica(run)["pid"], signal.SIGSTOP)
        if run.step == 20:
            assert run.wait("durable", timeout=60.0)
            assert replica(run)["behind"] == 15
            os.kill(replica(run)["pid"], signal.SIGKILL)
            die()

    assert live(lambda: train(directory, stop)).killed
    assert [e for e in read_events(directory) if type(e).__name__ == "ChainEnded"] == []
    ended = must_finish(lambda: train(directory))
    assert ended == {"resumed_from": 20, "digest": undisturbed()}


def test_a_replica_that_falls_behind_the_ring_catches_up_by_the_log(directory: Path) -> None:
    def stop(run: everstep.Run) -> None:
        if run.step == 5:
            await_replica(run)
            os.kill(replica(run)["pid"], signal.SIGSTOP)
        if run.step == KILLED_AT:
            os.kill(replica(run)["pid"], signal.SIGCONT)
        die_when_followed(run)

    assert live(lambda: train(directory, stop)).killed
    assert [made.step for made in events(directory, ReplicaMade)] == [1], "it began anew"
    assert must_finish(lambda: train(directory)) == {"resumed_from": KILLED_AT, "digest": undisturbed()}
    assert events(directory, Replayed) == []


def test_a_killed_replica_is_followed_by_another_that_goes_on_from_its_image(directory: Path) -> None:
    def kill(run: everstep.Run) -> None:
        if run.step == 8:
            await_replica(run)
            os.kill(replica(run)["pid"], signal.SIGKILL)
        die_when_followed(run)

    assert live(lambda: train(directory, kill)).killed
    assert [made.step for made in events(directory, ReplicaMade)] == [1, 8]
    assert must_finish(lambda: train(directory)) == {"resumed_from": KILLED_AT, "digest": undisturbed()}
    assert events(directory, Replayed) == []


def test_a_killed_keeper_is_followed_by_another_and_so_is_its_replica(directory: Path) -> None:
    def kill(run: everstep.Run) -> None:
        if run.step == 8:
            await_replica(run)
            stop_keeper(directory)
        die_when_followed(run)

    assert live(lambda: train(directory, kill)).killed
    assert must_finish(lambda: train(directory)) == {"resumed_from": KILLED_AT, "digest": undisturbed()}
    assert events(directory, Replayed) == []


def test_a_replica_torn_in_the_middle_of_a_step_is_passed_over_for_base_and_log(directory: Path) -> None:
    def tear(run: everstep.Run) -> None:
        if run.step == KILLED_AT:
            await_replica(run)
            pid = replica(run)["pid"]
            stop_keeper(directory)
            os.kill(pid, signal.SIGKILL)
            die()

    assert live(lambda: train(directory, tear)).killed
    for torn in replicas(directory):
        torn.unseal(0)
        torn.slots[0][-100_000:] = os.urandom(100_000)
    assert must_finish(lambda: train(directory)) == {"resumed_from": KILLED_AT, "digest": undisturbed()}
    assert len(events(directory, Replayed)) == 1


def test_nobody_advances_a_replica_that_is_being_read(directory: Path) -> None:
    def read(run: everstep.Run) -> None:
        if run.step == 5:
            await_replica(run)
            sources = Sources(Places(directory=str(directory)), run_of(directory))
            run.__dict__["sources"] = sources
        if run.step == 10:
            (arena,) = [a for a in run.__dict__["sources"].arenas if a.kind == "replica"]
            assert arena.seals()[0].step == 5
            run.__dict__["sources"].close()
            await_replica(run)

    assert must_finish(lambda: train(directory, read))["digest"] == undisturbed()


def test_another_strategy_in_the_next_life_uses_its_image_up(directory: Path) -> None:
    assert live(lambda: train(directory, die_when_followed)).killed
    ended = must_finish(lambda: train(directory, lambda run: None, strategy="snapshot"))
    assert ended == {"resumed_from": KILLED_AT, "digest": undisturbed()}
    assert replicas(directory) == []


def test_nothing_is_left_of_it_when_the_run_ends(directory: Path) -> None:
    def watch(run: everstep.Run) -> None:
        if run.step == 10:
            await_replica(run)
            Path(directory, "pid").write_text(str(replica(run)["pid"]))

    must_finish(lambda: train(directory, watch))
    deadline = time.monotonic() + 60
    while (arena_root(None) / run_of(directory)).exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with pytest.raises(ProcessLookupError):
        os.kill(int(Path(directory, "pid").read_text()), 0)
