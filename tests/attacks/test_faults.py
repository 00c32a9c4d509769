"""Faults while a run lives: media that refuse, memory that is short, signals, deaths. Training goes on or says why not.

Every life is a forked child. Where a medium must refuse, the system call refuses, in that child alone.
"""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lives import STEPS, live, must_finish, run_directory, run_of, tiny, told, train_tiny, undisturbed
from refusal import Refusal, wait_through
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data._utils import worker as of_a_loader
from typer.testing import CliRunner

import everstep
from everstep import Disk, Memory, topology
from everstep.capture import host, life
from everstep.capture.arena import Arena, find_arenas
from everstep.capture.host import arena_root
from everstep.capture.snapshot import Capture
from everstep.cli import app
from everstep.errors import EverstepError, Mismatch, NotEnoughMemory, RunHeld, Unstorable
from everstep.events import ArenaMade, Degraded, Event, KeeperEnded, Rejected, Scavenged, Started
from everstep.keeper import keeper as keeping
from everstep.keeper.client import keeper_pid
from everstep.keeper.keeper import Keeper
from everstep.keeper.protocol import Attach, Bye, Channel, Hello, Trouble, Welcome
from everstep.keeper.scavenge import whole_steps
from everstep.store import claim
from everstep.topology import process_alive

OFTEN = [Disk(every=1)]
SELDOM = [Disk(every=100)]


def at(step: int, deed: Callable[[everstep.Run], Any]) -> Callable[[everstep.Run], None]:
    """Do something in the step after this cut."""

    def when(run: everstep.Run) -> None:
        if run.step == step:
            deed(run)

    return when


def die(run: everstep.Run) -> None:
    run.wait("sealed")
    os.kill(os.getpid(), signal.SIGKILL)


def committed(directory: Path) -> list[int]:
    return sorted(int(path.name[5:15]) for path in directory.glob("step-*.json"))


def until(what: Callable[[], Any], seconds: float = 60.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)
    return found


# -- a disk that refuses


@pytest.mark.parametrize(
    ("number", "after_bytes"), [(errno.ENOSPC, 0), (errno.ENOSPC, 6000), (errno.EROFS, 0), (errno.EIO, 100)]
)
def test_training_goes_on_while_the_disk_refuses_and_the_step_is_written_once_it_does_not(
    number: int, after_bytes: int
) -> None:
    def life() -> dict[str, Any]:
        refusal = Refusal(directory, number, after_bytes)
        said: list[str] = []

        def at_step(run: everstep.Run) -> None:
            if run.step == 2:
                run.wait("durable")
                refusal.on = True
            if run.step == 4:
                try:
                    run.wait("durable", timeout=60)
                except EverstepError as error:
                    said.append(str(error))
                refusal.on = False
                wait_through(run)

        return {**train_tiny(directory, at_step, tiers=SELDOM), "said": said}

    with run_directory() as directory:
        result = must_finish(life)
        assert result["digest"] == undisturbed()
        assert len(result["said"]) == 1 and "step 4 is not durable" in result["said"][0]
        assert any(word in result["said"][0] for word in ("MB free", "Read-only", "Input/output"))
        told_of = [event.reason for event in told(directory, Degraded) if "not durable yet" in event.what]
        assert told_of, "the event came late"
        assert any("training goes on" in reason for reason in told_of) == (number == errno.ENOSPC)
        assert committed(directory)[-1] == STEPS and 4 in committed(directory)
        assert not list(directory.rglob(".tmp-*")), "half-written files were left"
        assert everstep.open(directory).verify()


def test_whoever_waits_is_told_at_once_however_often_the_disk_has_refused() -> None:
    def life() -> dict[str, Any]:
        refusal = Refusal(directory, errno.ENOSPC)
        took: list[float] = []

        def ask(run: everstep.Run) -> None:
            if run.step == 2:
                run.wait("durable")  # the base that a keeper begins with, which on a busy machine would be the next
            if run.step != 3:
                return
            refusal.on = True
            for _ in range(8):
                began = time.monotonic()
                with pytest.raises(EverstepError):
                    run.wait("durable")
                took.append(time.monotonic() - began)
            refusal.on = False

        train_tiny(directory, ask, tiers=SELDOM)
        return {"took": took}

    with run_directory() as directory:
        assert sum(must_finish(life)["took"]) < 50  # with pauses that double it would be two minutes


def test_a_run_that_ends_on_a_full_disk_says_so_and_its_memory_still_has_the_last_step() -> None:
    def life() -> dict[str, Any]:
        refusal = Refusal(directory, errno.ENOSPC)
        keeping._INLINE_PATIENCE_S = 3600.0  # it must not wait for somebody to make room

        def fill(run: everstep.Run) -> None:
            run.wait("durable")
            refusal.on = True

        return train_tiny(directory, at(3, fill), tiers=SELDOM)

    with run_directory() as directory:
        outcome = live(life)
        assert f"step {STEPS} is not durable" in outcome.error
        assert f"Step {STEPS} is in memory: started again on this machine, the program goes on" in outcome.error
        assert "training goes on" not in outcome.error
        result = must_finish(lambda: train_tiny(directory, tiers=SELDOM))
        assert result["resumed_from"] == STEPS and result["digest"] == undisturbed()
        assert committed(directory)[-1] == STEPS


def test_a_full_disk_keeps_nobody_from_coming_back() -> None:
    """Neither the attempt record nor the holder's name is worth a lost start."""

    def second() -> dict[str, Any]:
        refusal = Refusal(directory, errno.ENOSPC)
        refusal.on = True

        def make_room(run: everstep.Run) -> None:
            refusal.on = False

        return train_tiny(directory, make_room, tiers=SELDOM)

    with run_directory() as directory:
        live(lambda: train_tiny(directory, at(3, die), tiers=SELDOM))
        result = must_finish(second)
        assert result["resumed_from"] == 3 and result["digest"] == undisturbed()


@pytest.mark.parametrize("what", ["step-*", "run.json", "events-*", "step-*/*.safetensors", "step-*.json"])
def test_files_that_somebody_else_deletes_in_mid_run_cost_only_themselves(what: str) -> None:
    def delete(run: everstep.Run) -> None:
        run.wait("durable")
        for path in directory.glob(what):  # the keeper may be letting go of the same
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)

    with run_directory() as directory:
        assert must_finish(lambda: train_tiny(directory, at(3, delete), tiers=OFTEN))["digest"] == undisturbed()
        assert everstep.open(directory).latest() == STEPS
        result = must_finish(lambda: train_tiny(directory, steps=STEPS))
        assert result["resumed_from"] == STEPS and result["digest"] == undisturbed()


# -- memory that is short


def without_shared_memory() -> None:
    real = host.free_memory
    host.free_memory = lambda root: real(root) if root is None else 0  # type: ignore[assignment]


def test_where_shared_memory_is_full_the_keeper_holds_the_arena_and_a_killed_run_resumes_from_it() -> None:
    def life(at_step: Callable[[everstep.Run], None] = lambda run: None) -> dict[str, Any]:
        without_shared_memory()
        return train_tiny(directory, at_step, tiers=SELDOM, keeper="process")

    with run_directory() as directory:
        assert live(lambda: life(at(4, die))).killed
        result = must_finish(life)
        assert result["resumed_from"] == 4 and result["digest"] == undisturbed()
        assert {event.place for event in told(directory, ArenaMade)} == {"memfd"}
        assert told(directory, Started)[-1].source == "memory"
        assert not list((arena_root(None) / run_of(directory)).glob("rank-*"))
        until(lambda: keeper_pid(run_of(directory)) is None)


def test_an_arena_without_a_name_is_held_until_its_successor_has_a_seal() -> None:
    """The state outgrows its arena, and the trainer dies before the first seal in the new one."""

    def outgrow(run: everstep.Run) -> None:
        run.wait("sealed")
        run._state.extra["blob"] = "x" * 1_000_000
        Arena.seal = lambda self, *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]

    def life(at_step: Callable[[everstep.Run], None] = lambda run: None) -> dict[str, Any]:
        without_shared_memory()
        model, optimizer, loader = tiny()
        extra: dict[str, Any] = {"losses": [], "blob": ""}
        run = everstep.guard(
            model, optimizer, loader, dir=directory, extra=extra, steps=STEPS, epochs=None, tiers=SELDOM
        )
        for x, y in run:
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            at_step(run)
        return {"resumed_from": run.resumed_from}

    with run_directory() as directory:
        assert live(lambda: life(at(3, outgrow))).killed
        assert must_finish(life)["resumed_from"] == 3
        until(lambda: keeper_pid(run_of(directory)) is None)


@pytest.mark.parametrize("path", [None, "given"])
def test_too_little_memory_of_any_kind_is_an_error_with_numbers_and_advice(path: str | None, tmp_path: Path) -> None:
    def life() -> dict[str, Any]:
        host.free_memory = lambda root: 12_345  # type: ignore[assignment]
        memory = Memory(path=str(tmp_path) if path else None)
        try:
            train_tiny(directory, tiers=[Disk(every=100), memory])
        except NotEnoughMemory as error:
            return {"said": str(error), "needed": error.needed_bytes, "free": error.free_bytes}
        return {}

    with run_directory() as directory:
        result = must_finish(life)
        assert result["free"] == 12_345 and result["needed"] > 12_345
        assert (
            "MB are free" in result["said"] and "Memory(slots=" in result["said"] and "Memory(path=" in result["said"]
        )


# -- two at once


def test_a_second_run_on_one_directory_is_refused_with_the_holders_pid_and_host() -> None:
    def second() -> dict[str, Any]:
        claim._LOCK_PATIENCE_S = 0.2
        try:
            train_tiny(directory)
        except RunHeld as error:
            return {"pid": error.pid, "host": error.host, "said": str(error)}
        return {}

    with run_directory() as directory:
        hear, tell = os.pipe()
        holder = os.fork()
        if holder == 0:

            def hold(run: everstep.Run) -> None:
                os.write(tell, b"!")
                time.sleep(60)

            try:
                train_tiny(directory, hold)
            finally:
                os._exit(0)
        try:
            os.read(hear, 1)
            result = must_finish(second)
            assert (result["pid"], result["host"]) == (holder, topology.node_name())
            assert str(holder) in result["said"] and str(directory) in result["said"]
        finally:
            os.kill(holder, signal.SIGKILL)
            os.waitpid(holder, 0)
        assert must_finish(lambda: train_tiny(directory))["digest"] == undisturbed()  # the lock died with its holder


def test_a_second_run_in_the_same_process_is_refused_too() -> None:
    def life() -> dict[str, Any]:
        model, optimizer, loader = tiny()
        first = everstep.guard(model, optimizer, loader, dir=directory, keeper="inline")
        try:
            everstep.guard(model, optimizer, loader, dir=directory, keeper="inline")
        except RunHeld as error:
            first.close()
            everstep.guard(model, optimizer, loader, dir=directory, keeper="inline").close()
            return {"pid": error.pid, "me": os.getpid(), "said": str(error)}
        return {}

    with run_directory() as directory:
        result = must_finish(life)
        assert result["pid"] == result["me"] and "close() the run that it has there" in result["said"]


def test_whoever_was_woken_by_signals_before_a_run_is_again_after_it() -> None:
    """An event loop, as that of a notebook's kernel."""

    def life() -> dict[str, Any]:
        _, woken = os.pipe2(os.O_NONBLOCK)
        signal.set_wakeup_fd(woken)
        model, optimizer, loader = tiny()
        everstep.guard(model, optimizer, loader, dir=directory, keeper="inline").close()
        return {"is_woken": signal.set_wakeup_fd(-1) == woken}

    with run_directory() as directory:
        assert must_finish(life)["is_woken"]


def test_the_workers_of_a_loader_do_not_hold_the_run_of_a_killed_trainer() -> None:
    def life() -> dict[str, Any]:
        claim._LOCK_PATIENCE_S = 0.2
        torch.manual_seed(0)
        model = nn.Linear(8, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(TensorDataset(torch.randn(48, 8)), batch_size=4, num_workers=2)
        run = everstep.guard(model, optimizer, loader, dir=directory, keeper="inline", steps=8, epochs=None)
        for (x,) in run:
            model(x).sum().backward()
            optimizer.step()
            if run.step == 3 and run.resumed_from is None:
                workers = [str(worker.pid) for worker in multiprocessing.active_children()]
                directory.with_name("workers").write_text(" ".join(workers))
                die(run)
        return {"resumed_from": run.resumed_from}

    with run_directory() as directory:
        trainer = os.fork()
        if trainer == 0:
            of_a_loader.MP_STATUS_CHECK_INTERVAL = 3600.0  # after so long they see that they are orphans
            try:
                life()
            finally:
                os._exit(0)
        os.waitpid(trainer, 0)
        workers = [int(pid) for pid in directory.with_name("workers").read_text().split()]
        assert len(workers) == 2 and all(map(process_alive, workers)), "they do not see yet that they are orphans"
        try:
            assert must_finish(life)["resumed_from"] == 3
        finally:
            for worker in filter(process_alive, workers):
                os.kill(worker, signal.SIGKILL)


# -- a program that changed


class Other(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.c = nn.Linear(4, 5)
        self.d = nn.Linear(4, 4).double()


class One(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)
        self.c = nn.Linear(4, 4)
        self.d = nn.Linear(4, 4)


def one_step(directory: Path, model: nn.Module, kind: type[torch.optim.Optimizer], **options: Any) -> everstep.Run:
    optimizer = kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    run = everstep.guard(model, optimizer, dir=directory, keeper="inline", **options)
    if run.resumed_from is None:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        run.done()
    run.close()
    return run


def test_a_changed_model_is_refused_with_every_difference_and_strict_false_loads_the_overlap() -> None:
    def first() -> dict[str, Any]:
        model = One()
        one_step(directory, model, torch.optim.SGD)
        return {"a": model.a.weight.tolist()}

    def strict() -> dict[str, Any]:
        try:
            one_step(directory, Other(), torch.optim.SGD)
        except Mismatch as error:
            return {"said": str(error)}
        return {}

    def loose() -> dict[str, Any]:
        model = Other()
        run = one_step(directory, model, torch.optim.SGD, strict=False)
        return {"a": model.a.weight.tolist(), "from": run.resumed_from}

    with run_directory() as directory:
        saved = must_finish(first)
        said = must_finish(strict)["said"]
        assert "missing in the program: model.b.weight" in said
        assert "model.c.weight: shape was (4, 4), is (5, 4)" in said
        assert "model.d.weight: dtype was torch.float32, is torch.float64" in said
        assert not (directory / "attempt.json").exists(), "the program is to blame, not the checkpoint"
        assert must_finish(loose) == {"a": saved["a"], "from": 1}
        assert any("model.b.weight" in event.reason for event in told(directory, Degraded))


def test_state_of_a_parameter_with_another_shape_is_not_loaded_either_and_training_goes_on() -> None:
    def second() -> dict[str, Any]:
        model = Other().float()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        run = everstep.guard(model, optimizer, dir=directory, keeper="inline", strict=False)
        counts = {name: float(optimizer.state[p]["step"]) for name, p in model.named_parameters() if optimizer.state[p]}
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        run.done()
        run.close()
        return {"counts": counts, "step": run.step}

    with run_directory() as directory:
        must_finish(lambda: one_step(directory, One(), torch.optim.AdamW) and {})
        fitting = {f"{layer}.{what}": 1.0 for layer in "ad" for what in ("weight", "bias")}
        assert must_finish(second) == {"counts": fitting, "step": 2}


def test_another_optimizer_is_refused_by_its_name() -> None:
    def second() -> dict[str, Any]:
        try:
            one_step(directory, One(), torch.optim.AdamW)
        except Mismatch as error:
            return {"said": str(error)}
        return {}

    with run_directory() as directory:
        must_finish(lambda: {"step": one_step(directory, One(), torch.optim.SGD).step})
        said = must_finish(second)["said"]
        assert "torch.optim.sgd.SGD" in said and "torch.optim.adamw.AdamW" in said


def itself() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


@pytest.mark.parametrize(
    ("value", "key", "kind"),
    [
        (lambda: 1, "state.extra.odd.value", "builtins.function"),
        ({"deep": [1, object()]}, "state.extra.odd.value.deep[1]", "builtins.object"),
        (threading.Lock(), "state.extra.odd.value", "_thread.lock"),
        (torch.eye(2).to_sparse(), "state.extra.odd.value", "torch.Tensor"),
        (itself(), "state", "holds itself"),
        ("\ud800", "state", "no text"),
    ],
    ids=["function", "object", "lock", "sparse", "itself", "surrogate"],
)
def test_state_that_cannot_be_stored_is_refused_by_guard_with_its_key_and_type(
    value: Any, key: str, kind: str, tmp_path: Path
) -> None:
    model, optimizer, loader = tiny()
    with pytest.raises(Unstorable) as caught:
        everstep.guard(model, optimizer, loader, dir=tmp_path / "run", extra={"odd": value}, keeper="inline")
    assert key in str(caught.value) and kind in str(caught.value)
    assert not (tmp_path / "run").exists()


# -- signals


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 1)])
@pytest.mark.parametrize("keeper", ["inline", "process"])
def test_a_signal_ends_the_run_after_its_step_and_the_next_life_goes_on_from_there(
    number: int, code: int, keeper: str
) -> None:
    with run_directory() as directory:
        how = {"tiers": SELDOM, "keeper": keeper, "linger": "1s"}
        outcome = live(lambda: train_tiny(directory, at(3, lambda run: os.kill(os.getpid(), number)), **how))
        assert outcome.code == code, outcome
        assert ("KeyboardInterrupt" in outcome.error) == (number == signal.SIGINT)
        assert committed(directory)[-1] == 4, "the step in which it came was finished and written"
        result = must_finish(lambda: train_tiny(directory, **how))
        assert result["resumed_from"] == 4 and result["digest"] == undisturbed()
        until(lambda: keeper_pid(run_of(directory)) is None)


def test_a_signal_on_a_full_disk_still_ends_the_run_with_its_code() -> None:
    def life() -> dict[str, Any]:
        refusal = Refusal(directory, errno.ENOSPC)

        def fill(run: everstep.Run) -> None:
            refusal.on = True
            os.kill(os.getpid(), signal.SIGTERM)

        return train_tiny(directory, at(3, fill), tiers=SELDOM)

    with run_directory() as directory:
        outcome = live(life)
        assert outcome.code == 143, outcome
        result = must_finish(lambda: train_tiny(directory, tiers=SELDOM))
        assert result["resumed_from"] == 4 and result["digest"] == undisturbed()


def test_a_signal_after_a_step_that_cannot_be_copied_still_ends_the_run_with_its_code() -> None:
    copy = Capture._copy

    def broken(self: Capture, shape: Any, views: Any, step: int) -> None:
        if step == 4:
            raise RuntimeError("the device is gone")
        copy(self, shape, views, step)

    def life() -> dict[str, Any]:
        Capture._copy = broken  # type: ignore[method-assign]
        return train_tiny(directory, at(3, lambda run: os.kill(os.getpid(), signal.SIGTERM)), tiers=SELDOM)

    with run_directory() as directory:
        outcome = live(life)
        assert outcome.code == 143, outcome
        assert any("the device is gone" in event.reason for event in told(directory, Degraded))
        result = must_finish(lambda: train_tiny(directory, tiers=SELDOM))
        assert result["resumed_from"] == 3 and result["digest"] == undisturbed()


def test_a_trainer_that_hangs_leaves_within_the_grace_and_loses_nothing_that_was_sealed() -> None:
    def hang(run: everstep.Run) -> None:
        run.wait("sealed")
        directory.with_name("told").touch()
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_BLOCK, [])
        while True:
            time.sleep(60)

    with run_directory() as directory:
        assert live(lambda: train_tiny(directory, at(3, hang), tiers=SELDOM)).code == 143
        assert time.time() - directory.with_name("told").stat().st_mtime < 30, "the grace is 2 s, or five steps"
        result = must_finish(lambda: train_tiny(directory))
        assert result["resumed_from"] == 3 and result["digest"] == undisturbed()


def test_a_signal_to_a_child_of_the_trainer_is_the_childs_alone() -> None:
    """A forked helper that is terminated dies at once, and the trainer does not take it for its own end."""

    def bear(run: everstep.Run) -> None:
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM, "it slept to its end"
        time.sleep(2.6)  # longer than the grace

    with run_directory() as directory:
        outcome = live(lambda: train_tiny(directory, at(3, bear)))
        assert outcome.result is not None, outcome
        assert outcome.result["digest"] == undisturbed()


# -- deaths


def test_the_keeper_of_a_killed_trainer_writes_the_last_step_lingers_removes_the_memory_and_ends() -> None:
    how: dict[str, Any] = {"tiers": SELDOM, "keeper": "process"}
    with run_directory() as directory:
        assert live(lambda: train_tiny(directory, at(3, die), linger="600s", **how)).killed
        name = run_of(directory)
        keeper = keeper_pid(name)
        assert keeper is not None
        try:
            until(lambda: committed(directory)[-1:] == [3])
            assert process_alive(keeper), "it lingers for a restart"
            assert list((arena_root(None) / name).glob("rank-*")), "with the memory in place"
            assert live(lambda: train_tiny(directory, at(4, die), linger="1s", **how)).killed
            until(lambda: not process_alive(keeper))
        finally:
            if process_alive(keeper):
                os.kill(keeper, signal.SIGKILL)
        until(lambda: told(directory, KeeperEnded))
        assert not (arena_root(None) / name).exists()
        assert told(directory, Scavenged)[-1].step == 4
        result = must_finish(lambda: train_tiny(directory))
        assert result["resumed_from"] == 4 and result["digest"] == undisturbed()


def test_training_goes_on_with_a_new_keeper_when_its_own_is_killed() -> None:
    def life() -> dict[str, Any]:
        pids: list[int | None] = []

        def kill_keeper(run: everstep.Run) -> None:
            pids.append(keeper_pid(run_of(directory)))
            os.kill(pids[0] or 0, signal.SIGKILL)
            assert run.wait("durable", timeout=60)
            pids.append(keeper_pid(run_of(directory)))

        return {**train_tiny(directory, at(3, kill_keeper), tiers=SELDOM, keeper="process"), "pids": pids}

    with run_directory() as directory:
        result = must_finish(life)
        assert result["digest"] == undisturbed()
        assert None not in result["pids"] and len(set(result["pids"])) == 2
        assert 3 in committed(directory) and committed(directory)[-1] == STEPS
        assert any("keeper died" in event.what for event in told(directory, Degraded))
        until(lambda: keeper_pid(run_of(directory)) is None)


def test_a_keeper_that_hears_nonsense_goes_on_keeping() -> None:
    def life() -> dict[str, Any]:
        def babble(run: everstep.Run) -> None:
            name = run_of(directory)
            before = keeper_pid(name)
            for nonsense in (b"\xc1", b"x" * 1000, b"\x81\xa4type\xa5Hello", b"\x82\xa4type\xa6Attach\xa5place\xa1x"):
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
                    stranger.connect(str(arena_root(None) / name / "keeper.sock"))
                    stranger.send(nonsense)
                    stranger.settimeout(60)
                    stranger.recv(1000)  # an answer or the end, but no silence
            assert run.wait("durable", timeout=60)
            assert keeper_pid(name) == before

        return train_tiny(directory, at(3, babble), tiers=SELDOM, keeper="process")

    with run_directory() as directory:
        assert must_finish(life)["digest"] == undisturbed()
        until(lambda: keeper_pid(run_of(directory)) is None)


def test_a_message_that_comes_to_nothing_is_answered_and_the_keeper_lives(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    events: list[Event] = []
    keeper = threading.Thread(target=Keeper(tmp_path, events.append, inline=True).serve, args=(None, [Channel(theirs)]))
    keeper.start()
    trainer = Channel(ours)
    trainer.send(
        Hello(
            rank=0, world=1, local=1, local_ranks=(0,), ranks_here=(0,), pid=os.getpid(), run="0" * 32,
            directory=str(tmp_path), generation="1",
            resumed_from=None, every_steps=None, every_s=None, every_capture=False, keep_last=1, keep_every=None,
            lose_steps=1, lose_s=None, linger_s=0.0, torch="",
        )
    )  # fmt: skip
    assert isinstance(trainer.receive()[0], Welcome)  # type: ignore[index]
    trainer.send(Attach(place="nowhere"))  # without the descriptors that it announces
    assert isinstance(trainer.receive()[0], Trouble)  # type: ignore[index]
    assert keeper.is_alive() and any(isinstance(event, Degraded) for event in events)
    trainer.send(Bye(final=True))
    keeper.join(60)
    assert not keeper.is_alive()


def test_memory_is_not_given_up_for_a_copy_on_disk_that_is_damaged() -> None:
    """Step 6 is in memory, and on disk with a flipped bit. The run ends without another step: the disk gets it anew."""

    def last(run: everstep.Run) -> None:
        run.wait("durable")
        die(run)

    with run_directory() as directory:
        assert live(lambda: train_tiny(directory, at(5, last), steps=6, tiers=SELDOM)).killed
        data = directory / "step-0000000005" / "rank-00000.safetensors"
        damaged = bytearray(data.read_bytes())
        damaged[5000] ^= 1
        data.write_bytes(damaged)
        result = must_finish(lambda: train_tiny(directory, steps=5))
        assert result["resumed_from"] == 5
        assert [f.problem for f in everstep.open(directory).verify(5)] == [""]


# -- gc


def gc(memory: Path) -> dict[str, str]:
    result = CliRunner().invoke(app, ["gc", "--json", "--memory", str(memory)])
    assert result.exit_code == 0, result.output
    return {one["run"]: one["outcome"] for one in json.loads(result.output)["memory"]}


def test_gc_saves_what_only_the_memory_of_a_dead_run_holds_and_then_removes_it(tmp_path: Path) -> None:
    with run_directory() as directory:
        tiers = [Disk(every=100), Memory(path=str(tmp_path))]
        assert live(lambda: train_tiny(directory, at(4, die), tiers=tiers)).killed
        assert list(arena_root(str(tmp_path)).glob("*/rank-*"))
        assert gc(tmp_path) == {run_of(directory): "step 4 is on disk; removed"}
        assert not list(arena_root(str(tmp_path)).iterdir())
        assert committed(directory)[-1] == 4
        result = must_finish(lambda: train_tiny(directory, tiers=tiers))
        assert result["resumed_from"] == 4 and result["digest"] == undisturbed()


def test_gc_leaves_a_living_run_alone_and_removes_the_memory_of_a_deleted_one(tmp_path: Path) -> None:
    with run_directory() as directory:
        tiers = [Disk(every=100), Memory(path=str(tmp_path))]

        def look(run: everstep.Run) -> None:
            assert gc(tmp_path) == {run_of(directory): "kept: in use"}

        assert must_finish(lambda: train_tiny(directory, at(3, look), tiers=tiers))["digest"] == undisturbed()
    with run_directory() as directory:
        assert live(lambda: train_tiny(directory, at(4, die), tiers=tiers)).killed
        name = run_of(directory)
        shutil.rmtree(directory)
        assert gc(tmp_path) == {name: "removed"}
        assert not list(arena_root(str(tmp_path)).iterdir())
        assert not (arena_root(None) / name).exists()


def test_gc_leaves_a_run_alone_whose_next_life_has_just_begun(tmp_path: Path) -> None:
    """It has taken the run and not yet its memory: were that saved and removed now, it would write into nothing."""
    with run_directory() as directory:
        tiers = [Disk(every=100), Memory(path=str(tmp_path))]
        assert live(lambda: train_tiny(directory, at(4, die), tiers=tiers)).killed
        before = committed(directory)
        lock = claim._hold(directory, topology.here(), common=True)
        assert lock is not None
        assert gc(tmp_path) == {run_of(directory): "kept: in use"}
        os.close(lock)
        assert list(arena_root(str(tmp_path)).glob("*/rank-*")) and committed(directory) == before
        assert gc(tmp_path) == {run_of(directory): "step 4 is on disk; removed"}


def test_gc_saves_a_step_from_an_arena_that_the_state_had_outgrown(tmp_path: Path) -> None:
    """The rank has two arenas: a full one, and its successor that was never sealed."""

    def outgrow(run: everstep.Run) -> None:
        run.wait("sealed")
        run._state.extra["losses"].append("x" * 1_000_000)
        Arena.seal = lambda self, *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]

    with run_directory() as directory:
        tiers = [Disk(every=100), Memory(path=str(tmp_path))]
        assert live(lambda: train_tiny(directory, at(4, outgrow), tiers=tiers)).killed
        left = list(find_arenas(arena_root(str(tmp_path)), run_of(directory)))
        assert len(left) == 2 and whole_steps(left)[0][0] == 4
        assert gc(tmp_path) == {run_of(directory): "step 4 is on disk; removed"}
        assert committed(directory)[-1] == 4


# -- readers that fail


class Fragile:
    """State whose reader may raise, or die."""

    def __init__(self, failure: str = "") -> None:
        self.failure = failure

    def state_dict(self) -> dict[str, int]:
        return {"value": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self.failure == "raise":
            raise RuntimeError("this reader does not like it")
        if self.failure == "die":
            os.kill(os.getpid(), signal.SIGKILL)


def fragile_life(directory: Path, failure: str, steps: int) -> dict[str, Any]:
    model, optimizer, loader = tiny()
    extra = {"fragile": Fragile(failure)}
    how: dict[str, Any] = {"dir": directory, "extra": extra, "keeper": "inline", "epochs": None, "tiers": OFTEN}
    run = everstep.guard(model, optimizer, loader, steps=steps, **how)
    for x, y in run:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        run.wait("durable")
    return {"resumed_from": run.resumed_from}


@pytest.mark.parametrize(("failure", "times", "reason"), [("raise", 1, "does not like it"), ("die", 2, "2 readers")])
def test_a_checkpoint_that_failed_its_readers_is_not_offered_first_again(
    failure: str, times: int, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with run_directory() as directory:
        must_finish(lambda: fragile_life(directory, "", 4))
        for _ in range(times):
            outcome = live(lambda: fragile_life(directory, failure, 6))
            assert outcome.killed == (failure == "die") and outcome.result is None
        plan = everstep.open(directory).plan()
        assert plan.step is not None and plan.step < 4
        assert any(reason in r.reason for r in plan.rejections)
        capfd.readouterr()
        assert must_finish(lambda: fragile_life(directory, "", 6))["resumed_from"] == plan.step
        assert any(reason in event.reason for event in told(directory, Rejected))
        said = [line for line in capfd.readouterr().err.splitlines() if "passed over" in line]
        assert len(said) == 1 and "step 4 was passed over: " in said[0] and reason in said[0]
        assert not (directory / "attempt.json").exists()


def test_one_chance_death_of_a_reader_does_not_cost_the_newest_step() -> None:
    with run_directory() as directory:
        must_finish(lambda: fragile_life(directory, "", 4))
        assert live(lambda: fragile_life(directory, "die", 6)).killed
        assert must_finish(lambda: fragile_life(directory, "", 6))["resumed_from"] == 4


def test_the_names_that_these_tests_replace_are_still_the_ones_that_are_used() -> None:
    """A fault that no longer reaches the code would leave these tests green for nothing."""
    assert life.choose_place is host.choose_place
    assert host.choose_place.__globals__["free_memory"] is host.free_memory
