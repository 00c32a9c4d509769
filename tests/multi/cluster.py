"""Nodes on one machine: each has a name, a directory, an arena and a keeper of its own, and can be lost as a whole.

A life is one start of the job: every rank is a forked process that trains a small model under guard(). What a rank
returns, and why it did not, reaches the test. Losing a node kills all its processes and wipes its directories.
"""

from __future__ import annotations

import os
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
import torch._dynamo  # once, before ranks are forked: it takes seconds
import torch.distributed as dist
from lives import MeetingPlace, digest, way_to
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import everstep
from everstep.capture.host import arena_root
from everstep.keeper.client import keeper_pid
from everstep.store.disk import DiskTier
from everstep.store.manifest import run_name

STEPS = 8
_REFUSAL_S = 15.0  # until all must have ended once one has refused
AtStep = Callable[[everstep.Run, int], None]


class Ended(msgspec.Struct):
    """How one rank of a life ended."""

    killed: bool = False
    result: dict[str, Any] | None = None
    error: str = ""


def train(directory: Path, at_step: AtStep, *, steps: int = STEPS, wide: int = 32, **options: Any) -> dict[str, Any]:
    """What every rank does; the batches are the same for any number of ranks that divides eight."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, wide), nn.Tanh(), nn.Linear(wide, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(96, 8, generator=generator), torch.randint(0, 3, (96,), generator=generator))
    sampler: DistributedSampler[Any] = DistributedSampler(data, world, rank, shuffle=True)
    loader = DataLoader(data, batch_size=8 // world if 8 % world == 0 else 2, sampler=sampler)
    losses: list[float] = []
    options = {"strategy": "snapshot", "linger": "60s", **options}
    run = everstep.guard(
        model, optimizer, loader, dir=directory, extra={"losses": losses}, steps=steps, epochs=None, **options
    )
    began, restored = run.resumed_from, digest(model.state_dict(), optimizer.state_dict())
    for x, y in run:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        at_step(run, rank)
    return {
        "resumed_from": began,
        "restored": restored,
        "step": run.step,
        "state": digest(model.state_dict(), optimizer.state_dict()),
        "digest": digest(model.state_dict(), optimizer.state_dict(), losses, torch.get_rng_state()),
    }


class Cluster:
    """`ranks`: how many each node has, in the order of their names."""

    def __init__(self, root: Path, ranks: Sequence[int], **options: Any) -> None:
        self.root, self.options = root, options
        name = uuid.uuid4().hex[:8]  # shared memory knows nothing of the test's directory
        self.nodes = [f"n{number}-{name}" for number in range(len(ranks))]
        self.ranks = dict(zip(self.nodes, ranks, strict=True))
        self.domains: dict[str, str] = {}

    # -- living

    def live(
        self,
        at_step: AtStep = lambda run, rank: None,
        *,
        order: Sequence[str] | None = None,
        prepare: Callable[[str], None] = lambda node: None,
        timeout_s: float = 60.0,
        **options: Any,
    ) -> list[Ended]:
        """One start of the job on these nodes, ranks in their order; all ranks end, or are ended, before it returns.

        `prepare` is called in every rank, with the name of its node, before anything else happens there.
        """
        places = [node for node in (order or self.nodes) for _ in range(self.ranks[node])]
        store = MeetingPlace()
        children = {}
        for rank, node in enumerate(places):
            hear, tell = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(hear)
                self._be(rank, node, len(places), store.port, at_step, prepare, tell, options)
            os.close(tell)
            children[pid] = (rank, hear)
        try:
            return self._await(children, timeout_s)
        finally:
            store.close()

    def _be(
        self, rank: int, node: str, world: int, port: int, at_step: AtStep, prepare: Callable[[str], None], tell: int,
        options: dict[str, Any],
    ) -> None:  # fmt: skip
        answer: dict[str, Any] = {}
        try:
            os.environ |= {
                "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": "0", **way_to(port),
                "EVERSTEP_NODE": node, "EVERSTEP_DOMAIN": self.domains.get(node, node),
            }  # fmt: skip
            torch.set_num_threads(1)
            prepare(node)
            everstep.init_process_group("gloo")
            answer = {"result": train(self.directory(node), at_step, **{**self.options, **options})}
        except BaseException:
            answer = {"error": traceback.format_exc()}
        with os.fdopen(tell, "wb") as pipe:
            pipe.write(msgspec.msgpack.encode(answer))
        os._exit(0)

    def _await(self, children: dict[int, tuple[int, int]], timeout_s: float) -> list[Ended]:
        """A rank whose peer died cannot go on: the rest of a life in which one died is ended."""
        deadline, found = time.monotonic() + timeout_s, {}
        waiting = dict(children)
        while waiting:
            for pid in list(waiting):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    rank, hear = waiting.pop(pid)
                    found[rank] = _heard(hear, os.WIFSIGNALED(status))
            if any(one.killed for one in found.values()):
                deadline = min(deadline, time.monotonic() + 1.0)
            if any(one.error for one in found.values()):
                deadline = min(deadline, time.monotonic() + _REFUSAL_S)
            if time.monotonic() > deadline:
                for pid in waiting:
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        return [found[rank] for rank in sorted(found)]

    # -- losing

    def directory(self, node: str) -> Path:
        return self.root / node

    def run(self) -> str:
        """The run's name, as whichever node still has it."""
        for node in self.nodes:
            try:
                return run_name(DiskTier(self.directory(node)))
            except FileNotFoundError:
                continue
        raise FileNotFoundError("no node has a run")

    def memory(self, node: str) -> Path:
        return self.on(node, lambda: arena_root(None))

    def keeper(self, node: str) -> int | None:
        return self.on(node, lambda: keeper_pid(self.run()))

    def on(self, node: str, what: Callable[[], Any]) -> Any:
        before = os.environ.get("EVERSTEP_NODE")
        os.environ["EVERSTEP_NODE"] = node
        try:
            return what()
        finally:
            if before is None:
                del os.environ["EVERSTEP_NODE"]
            else:
                os.environ["EVERSTEP_NODE"] = before

    def kill_keeper(self, node: str) -> None:
        pid = self.keeper(node)
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
            while Path(f"/proc/{pid}").exists() and self.keeper(node) == pid:
                time.sleep(0.01)

    def wait_for_keepers(self, timeout_s: float = 60.0) -> None:
        """Until all keepers have ended by themselves."""
        deadline = time.monotonic() + timeout_s
        while any(self.keeper(node) is not None for node in self.nodes):
            assert time.monotonic() < deadline, "a keeper stays"
            time.sleep(0.02)

    def left_in_memory(self, node: str) -> list[str]:
        """What a node still holds in shared memory."""
        memory = self.memory(node)
        return sorted(str(path.relative_to(memory)) for path in memory.rglob("*")) if memory.exists() else []

    def lose(self, *nodes: str) -> None:
        """The trainers are dead already: everything else goes too."""
        for node in nodes:
            self.kill_keeper(node)
        for node in nodes:
            shutil.rmtree(self.memory(node), ignore_errors=True)
            shutil.rmtree(self.directory(node), ignore_errors=True)

    def reboot(self, *nodes: str) -> None:
        """The directories stay."""
        for node in nodes:
            self.kill_keeper(node)
        for node in nodes:
            shutil.rmtree(self.memory(node), ignore_errors=True)

    def close(self) -> None:
        for node in self.nodes:
            try:
                self.kill_keeper(node)
            except FileNotFoundError:
                pass
            shutil.rmtree(self.memory(node), ignore_errors=True)


def _heard(hear: int, killed: bool) -> Ended:
    with os.fdopen(hear, "rb") as pipe:
        data = pipe.read()
    return Ended(killed=killed, **(msgspec.msgpack.decode(data) if data else {}))


def die_at(step: int, *ranks: int, level: str = "sealed") -> AtStep:
    """These ranks (all, if none is named) die when a step has reached a level."""

    def when(run: everstep.Run, rank: int) -> None:
        if run.step == step:
            run.wait(level)
            dist.barrier()  # all have it
            if rank in ranks or not ranks:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)

    return when


def results(ended: list[Ended]) -> list[dict[str, Any]]:
    assert all(one.result is not None for one in ended), "\n".join(one.error for one in ended)
    return [one.result for one in ended if one.result is not None]
