"""Training in forked children that may be killed, and what is left of them.

A life is one process that trains a small model under guard() until it ends or dies. Lives of one directory follow each
other like restarts of a job.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn
from torch.distributed import TCPStore
from torch.utils.data import DataLoader, TensorDataset

import everstep
from everstep.capture import gradients, room, steering
from everstep.capture.arena import Arena, find_arenas
from everstep.capture.host import arena_root
from everstep.events import Event, read_events
from everstep.keeper import client, process
from everstep.keeper.client import keeper_pid
from everstep.store.disk import DiskTier
from everstep.topology import process_alive
from everstep.tune.controller import Measured

STEPS = 6


def digest(*objects: Any) -> str:
    """A hash of tensors and values, to the bit."""
    total = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            value = getattr(value, "_local_tensor", value)  # of a DTensor
            total.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                total.update(str(key).encode())
                add(value[key])
        elif isinstance(value, list | tuple):
            for item in value:
                add(item)
        else:
            total.update(repr(value).encode())

    add(objects)
    return total.hexdigest()[:16]


def tiny() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(48, 8), torch.randint(0, 3, (48,)))
    return model, optimizer, DataLoader(data, batch_size=4, shuffle=True)


def train_tiny(
    directory: Path, at_step: Callable[[everstep.Run], None] = lambda run: None, **options: Any
) -> dict[str, Any]:
    """One life; what it returns reaches the parent if it lives that long."""
    model, optimizer, loader = tiny()
    losses: list[float] = []
    options = {"steps": STEPS, "epochs": None, "keeper": "inline", **options}
    run = everstep.guard(model, optimizer, loader, dir=directory, extra={"losses": losses}, **options)
    began = run.resumed_from
    for x, y in run:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        at_step(run)
    return {
        "resumed_from": began,
        "step": run.step,
        "digest": digest(model.state_dict(), optimizer.state_dict(), losses, torch.get_rng_state()),
        "losses": losses,
    }


def bases_every(steps: int) -> None:
    """Bases of a log take turns this often in this process, whatever the tuner thinks of it."""
    steering.Steering.steps_per_base = property(lambda self: steps)  # type: ignore[assignment,method-assign]


def turn_every(steps: int) -> None:
    """Make up costs for strategy="auto": whatever the run does is dear, and the other way is cheap."""
    read = steering.Steering._read

    def made_up(self: steering.Steering, recorder: Any, *rest: Any) -> Measured:
        seen = read(self, recorder, *rest)
        base_stall_s = 0.05 if recorder is None else 0.0
        return msgspec.structs.replace(seen, step_s=0.1, base_stall_s=base_stall_s, record_stall_s=0.0)

    steering.WINDOW = steps
    steering.Steering._read = made_up  # type: ignore[method-assign]


def train_log(
    directory: Path,
    at_step: Callable[[everstep.Run], None] = lambda run: None,
    *,
    records_a_base: int = 2,
    digest_every: int = 64,
    ring_bytes: int = 0,
    **options: Any,
) -> dict[str, Any]:
    """One life with a log. Bases switch as often as the test wants, and digests are as dense; both for this process.

    `ring_bytes`: of the ring at least; by default it is as short as can be, so that slots are used again and again.
    """
    bases_every(records_a_base)
    gradients._DIGEST_EVERY = digest_every
    room._LEAST_BYTES = ring_bytes
    return train_tiny(directory, at_step, strategy="log", **options)


class Outcome(msgspec.Struct):
    """How a life ended."""

    killed: bool
    code: int
    result: dict[str, Any] | None
    error: str


def live(life: Callable[[], dict[str, Any]], timeout: float = 120.0) -> Outcome:
    """Run one life in a forked child and see how it ends; one that does not is not taken for one that was killed."""
    hear, tell = os.pipe()
    child = os.fork()
    if child == 0:
        answer: dict[str, Any] = {}
        code = 0
        try:
            os.close(hear)
            answer = {"result": life()}
        except SystemExit as leaving:
            code = int(leaving.code or 0)
            answer = {"error": "SystemExit"}
        except BaseException:
            code = 1
            answer = {"error": traceback.format_exc()}
        with os.fdopen(tell, "wb") as pipe:
            pipe.write(msgspec.msgpack.encode(answer))
        os._exit(code)
    os.close(tell)
    deadline, in_time = time.monotonic() + timeout, True
    with os.fdopen(hear, "rb") as pipe:
        os.set_blocking(hear, False)
        data = b""
        while time.monotonic() < deadline:
            chunk = pipe.read()
            if chunk == b"":
                break
            data += chunk or b""
            time.sleep(0.002)
        else:
            in_time = False
            os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert in_time, f"a life did not end in {timeout} s"
    answer = msgspec.msgpack.decode(data) if data else {}
    killed = os.WIFSIGNALED(status)
    code = -os.WTERMSIG(status) if killed else os.WEXITSTATUS(status)
    return Outcome(killed=killed, code=code, result=answer.get("result"), error=answer.get("error", ""))


def must_finish(life: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    outcome = live(life)
    assert outcome.result is not None, f"exit {outcome.code}: {outcome.error}"
    return outcome.result


@cache
def undisturbed(steps: int = STEPS) -> str:
    """What the tiny training gives that nothing happens to. By bases: what knows nothing of a log."""
    with run_directory() as directory:
        return str(must_finish(lambda: train_tiny(directory, steps=steps))["digest"])


def told(directory: Path, kind: type[Event]) -> list[Any]:
    """What a run has said of itself."""
    return [event for event in read_events(directory) if isinstance(event, kind)]


def kill_keeper(directory: Path) -> int | None:
    """The process that was killed, if there was one."""
    pid = keeper_pid(run_of(directory))
    if pid is not None:
        os.kill(pid, signal.SIGKILL)
    return pid


class Countdown:
    """Kills this process before the n-th operation on any medium."""

    def __init__(self, operation: int) -> None:
        self.left = operation
        self.counting = threading.Lock()  # trainer, copier and keeper are threads: no operation is passed over

    def __call__(self, name: str) -> None:
        with self.counting:
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(10)  # the signal may take a moment to arrive
            self.left -= 1

    def install(self) -> None:
        DiskTier.before = staticmethod(self)  # type: ignore[assignment]
        Arena.before = staticmethod(self)  # type: ignore[assignment]


def fork_keeper(run: str, directory: Path, before: Callable[[], None] = lambda: None) -> None:
    """Stands in for keeper.process.start: the keeper is forked from here, with whatever the test has changed."""
    child = os.fork()
    if child == 0:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for standard in range(3):
            os.dup2(nowhere, standard)
        os.closerange(3, 1024)  # it may outlive its trainer and the test, and must not hold their pipes
        try:
            before()
            process.main(run, directory)
        finally:
            os._exit(0)
    os.waitpid(child, 0)


class MeetingPlace:
    """Where ranks find each other, as torchrun has it: a port that is bound when it is chosen.

    The store is in a process of its own, because its threads would hold locks while ranks are forked beside them.
    """

    def __init__(self) -> None:
        hear, tell = os.pipe()
        until, self._until = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._until)
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            os.write(tell, str(store.port).encode())
            os.read(until, 1)  # ends when the other end is closed
            os._exit(0)
        os.close(until)
        os.close(tell)
        self.port = int(os.read(hear, 16))
        os.close(hear)

    def close(self) -> None:
        os.close(self._until)
        os.kill(self._pid, signal.SIGKILL)  # ranks that were forked meanwhile have the other end, too
        os.waitpid(self._pid, 0)


def way_to(port: int) -> dict[str, str]:
    """The environment of ranks that meet there."""
    return {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }  # fmt: skip


def cuts_made(directory: Path) -> int:
    """How many steps the dead had cut, from the memory that outlived them."""
    run = run_of(directory)
    arenas = list(find_arenas(arena_root(None), run)) if run else []
    newest = max((arena.live().step for arena in arenas), default=0)
    for arena in arenas:
        arena.close()
    return newest


def run_of(directory: Path) -> str:
    try:
        return str(msgspec.json.decode((directory / "run.json").read_bytes())["run"])
    except FileNotFoundError:
        return ""


def forget_memory(directory: Path) -> None:
    """What a reboot does."""
    if run_of(directory):
        shutil.rmtree(arena_root(None) / run_of(directory), ignore_errors=True)


@contextmanager
def run_directory() -> Iterator[Path]:
    """A directory for one run; its memory is given back too, and a keeper that lingers goes with it."""
    # A keeper that is just ending may still have something to say there.
    with tempfile.TemporaryDirectory(prefix="everstep-test-", ignore_cleanup_errors=True) as folder:
        directory = Path(folder, "run")
        try:
            yield directory
        finally:
            end_keeper(directory)
            forget_memory(directory)


def end_keeper(directory: Path) -> None:
    pid = client.keeper_pid(run_of(directory)) if run_of(directory) else None
    if pid is not None and pid != os.getpid():
        os.kill(pid, signal.SIGKILL)
        while process_alive(pid):
            time.sleep(0.002)
