"""Ranks of a program that speaks SCR: forked processes over gloo, on nodes that can be lost.

A node has a name, a cache, an arena and a keeper of its own; the prefix is common. What an app returns on each rank,
and why it did not, reaches the test.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
import traceback
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from lives import MeetingPlace, way_to

import everstep
from everstep.capture.host import arena_root
from everstep.events import Event, read_events
from everstep.integrations import scr
from everstep.integrations.scr_settings import choose
from everstep.keeper.client import keeper_pid
from everstep.store.disk import DiskTier
from everstep.store.manifest import run_name

App = Callable[[int], Any]


class Ended(msgspec.Struct):
    """How one rank ended."""

    killed: bool = False
    result: Any = None
    error: str = ""


class Nodes:
    """`ranks`: how many each node has. `settings`: SCR's."""

    def __init__(self, root: Path, ranks: Sequence[int], **settings: Any) -> None:
        self.root, self.settings = root, {name: str(value) for name, value in settings.items()}
        own = uuid.uuid4().hex[:8]  # other tests run beside this one, and nodes of one name share their memory
        self.names = [f"{own}-s{number}" for number in range(len(ranks))]
        self.ranks = dict(zip(self.names, ranks, strict=True))
        self.prefix = root / "prefix"
        self.prefix.mkdir(parents=True)
        for node in self.names:
            (root / node).mkdir()

    def environment(self, node: str) -> dict[str, str]:
        return {
            "EVERSTEP_NODE": node, "SCR_PREFIX": str(self.prefix), "SCR_CACHE_BASE": str(self.root / node),
            **self.settings,
        }  # fmt: skip

    def live(self, app: App, *, timeout_s: float = 60.0, order: Sequence[str] | None = None) -> list[Ended]:
        """One start of the job. All ranks have ended, or were ended, when this returns."""
        places = [node for node in order or self.names for _ in range(self.ranks[node])]
        children, meeting = {}, MeetingPlace()
        for rank, node in enumerate(places):
            hear, tell = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(hear)
                self._be(rank, node, len(places), meeting.port, app, tell)
            os.close(tell)
            children[pid] = (rank, hear)
        try:
            return _await(children, timeout_s)
        finally:
            meeting.close()

    def _be(self, rank: int, node: str, world: int, port: int, app: App, tell: int) -> None:
        answer: dict[str, Any] = {}
        try:
            os.environ |= {
                "RANK": str(rank), "WORLD_SIZE": str(world), **way_to(port), **self.environment(node),
            }  # fmt: skip
            os.chdir(self.prefix)
            torch.set_num_threads(1)
            if world > 1:
                everstep.init_process_group("gloo")
            answer = {"result": app(rank)}
        except BaseException:
            answer = {"error": traceback.format_exc()}
        with os.fdopen(tell, "wb") as pipe:
            pipe.write(msgspec.msgpack.encode(answer))
        os._exit(0)

    # -- losing

    def directory(self, node: str) -> Path:
        return choose({}, self.environment(node)).directory

    def run(self) -> str:
        for node in self.names:
            try:
                return run_name(DiskTier(self.directory(node)))
            except FileNotFoundError:
                continue
        return ""

    def kill_keeper(self, node: str) -> None:
        pid = _on(node, lambda: keeper_pid(self.run()))
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
            while Path(f"/proc/{pid}").exists() and _on(node, lambda: keeper_pid(self.run())) == pid:
                time.sleep(0.01)

    def lose(self, *nodes: str) -> None:
        """Keeper, memory and cache. The ranks are dead already."""
        for node in nodes:
            self.kill_keeper(node)
        for node in nodes:
            shutil.rmtree(_on(node, lambda: arena_root(None)), ignore_errors=True)
            shutil.rmtree(self.root / node)
            (self.root / node).mkdir()

    def close(self) -> None:
        for node in self.names:
            self.kill_keeper(node)
            shutil.rmtree(_on(node, lambda: arena_root(None)), ignore_errors=True)

    def told(self, node: str, kind: type[Event]) -> list[Any]:
        return [event for event in read_events(self.directory(node)) if isinstance(event, kind)]


def _on(node: str, what: Callable[[], Any]) -> Any:
    before = os.environ.get("EVERSTEP_NODE")
    os.environ["EVERSTEP_NODE"] = node
    try:
        return what()
    finally:
        os.environ.pop("EVERSTEP_NODE")
        if before is not None:
            os.environ["EVERSTEP_NODE"] = before


def _await(children: dict[int, tuple[int, int]], timeout_s: float) -> list[Ended]:
    """A rank whose peer died cannot go on: the rest of a life in which one died is ended."""
    deadline, found, waiting = time.monotonic() + timeout_s, {}, dict(children)
    while waiting:
        for pid in list(waiting):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                rank, hear = waiting.pop(pid)
                with os.fdopen(hear, "rb") as pipe:
                    data = pipe.read()
                found[rank] = Ended(killed=os.WIFSIGNALED(status), **(msgspec.msgpack.decode(data) if data else {}))
        if any(one.killed or one.error for one in found.values()):
            deadline = min(deadline, time.monotonic() + 2.0)
        if time.monotonic() > deadline:
            for pid in waiting:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return [found[rank] for rank in sorted(found)]


def results(ended: list[Ended]) -> list[Any]:
    assert not any(one.killed or one.error for one in ended), "\n".join(one.error or "killed" for one in ended)
    return [one.result for one in ended]


# -- what apps do


def content(rank: int, number: int) -> dict[str, bytes]:
    """Several files of unequal sizes; every fifth rank has none."""
    chance = random.Random(f"{rank} {number}")
    return {f"part{i}.r{rank}": chance.randbytes(chance.randrange(20_000) * (rank + 1)) for i in range(rank % 5)}


def write(number: int, rank: int, *, flags: int = scr.FLAG_CHECKPOINT, valid: bool = True) -> bool:
    name = f"step{number}"
    scr.start_output(name, flags)
    for file, data in content(rank, number).items():
        with open(scr.route_file(f"{name}/{file}"), "wb") as opened:
            opened.write(data)
    return scr.complete_output(valid)


def read_back(rank: int) -> str | None:
    """The name of the checkpoint that was restored, every byte of it compared with what was written."""
    name = scr.have_restart()
    if name is None:
        return None
    assert scr.start_restart() == name
    number = int(name.removeprefix("step"))
    for file, data in content(rank, number).items():
        with open(scr.route_file(f"{name}/{file}"), "rb") as opened:
            assert opened.read() == data, file
    assert scr.complete_restart()
    return name


def die() -> None:
    """All ranks at once, as far as that can be."""
    if dist.is_initialized():
        dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)
