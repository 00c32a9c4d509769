"""Ranks and spares of one machine that train together under run.live(), and can be killed one by one.

Every process is forked, trains a small model under DDP, and tells the test what became of it.
"""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
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
from everstep.live.line import Line

STEPS = 12
Act = Callable[["Here"], None]


class Here(msgspec.Struct):
    """Where a process is, for whoever wants to break it there."""

    name: int  # of the process: its first rank; spares follow
    run: Any
    model: Any
    optimizer: Any
    tries: int  # of steps, by this process


class Ended(msgspec.Struct):
    killed: bool = False
    result: dict[str, Any] | None = None
    error: str = ""
    code: int = 0


def nothing(here: Here) -> None:
    pass


def train(
    name: int,
    directory: Path,
    act: Act,
    *,
    steps: int = STEPS,
    dropout: float = 0.1,
    ddp: dict[str, Any] | None = None,
    prepare: Callable[[Any], None] = lambda model: None,
    gather: int = 1,
    workers: int = 0,
    aside: Act = nothing,
    device: str = "cpu",
    **options: Any,
) -> dict[str, Any]:
    """`gather`: batches a step. `workers`: persistent ones. `aside`: what the program does between two steps."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)  # so that dropout differs from rank to rank, and must be restored
    model = nn.parallel.DistributedDataParallel(_model(dropout).to(device), **(ddp or {}))
    prepare(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(480, 8, generator=generator), torch.arange(480))
    sampler: DistributedSampler[Any] = DistributedSampler(data, world, rank, shuffle=True)
    loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=workers, persistent_workers=workers > 0)
    losses: list[float] = []
    seen: list[list[int]] = []
    run = everstep.guard(
        model, optimizer, loader, dir=directory, extra={"losses": losses, "seen": seen}, steps=steps, epochs=None,
        **{"strategy": "snapshot", "linger": "60s", **options},
    )  # fmt: skip
    here = Here(name, run, model, optimizer, 0)
    for step in run.live():
        with step as (x, which):
            here.tries += 1
            loss = nn.functional.cross_entropy(model(x.to(device)), which.to(device) % 3)
            gathers = here.tries % gather != 0
            with model.no_sync() if gathers else nullcontext():
                loss.backward()
            act(here)
            if not gathers:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            seen.append(which.tolist())
        aside(here)
    return {
        "pid": os.getpid(),
        "step": run.step,
        "rank": int(os.environ["RANK"]),
        "world": int(os.environ["WORLD_SIZE"]),
        "seen": seen,
        "tries": here.tries,
        "weight": sum(float(p.detach().double().abs().sum()) for p in model.parameters()),
        "state": digest(model.module.state_dict(), optimizer.state_dict()),
        "own": digest(losses, torch.get_rng_state(), torch.cuda.get_rng_state() if device == "cuda" else 0),
    }


def _model(dropout: float) -> nn.Module:
    torch_state = torch.get_rng_state()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 32), nn.Dropout(dropout), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3)
    )
    torch.set_rng_state(torch_state)
    return model


class Team:
    def __init__(
        self, directory: Path, world: int, spares: int = 0, train: Callable[..., dict[str, Any]] = train, **options: Any
    ) -> None:
        self.directory, self.world, self.train, self.options = directory, world, train, options
        self._store = MeetingPlace()
        self.pids: dict[int, int] = {}
        self._hears: dict[int, int] = {}
        self._acts: dict[int, Act] = {}
        self._spares = spares

    def start(self, act: Act = nothing) -> Team:
        for name in range(self.world + self._spares):
            self.add(name, act, spare=name >= self.world)
        return self

    def add(self, name: int, act: Act = nothing, *, spare: bool) -> None:
        hear, tell = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(hear)
            self._be(name, act, spare, tell)
        os.close(tell)
        self.pids[name], self._hears[name] = pid, hear

    def _be(self, name: int, act: Act, spare: bool, tell: int) -> None:
        answer: dict[str, Any] = {}
        code = 0
        try:
            os.environ |= {"RANK": str(name), "WORLD_SIZE": str(self.world), **way_to(self._store.port)}
            os.environ["EVERSTEP_SPARE"] = "1" if spare else ""
            if spare:
                self._say_when_it_stands(name)
            else:
                act = self._after_spares_stand(act)
            torch.set_num_threads(1)
            everstep.init_process_group("gloo")
            answer = {"result": self.train(name, self.directory, act, **self.options)}
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        except BaseException as error:
            code = getattr(error, "exit_code", 1)
            answer = {"error": traceback.format_exc()}
        with os.fdopen(tell, "wb") as pipe:
            pipe.write(msgspec.msgpack.encode(answer))
        os._exit(code)

    def _say_when_it_stands(self, name: int) -> None:
        stand = Line.stand

        def told(line: Line, view: int, address: str) -> Any:
            Path(self.directory.parent, f"stands-{name}").touch()
            return stand(line, view, address)

        Line.stand = told  # type: ignore[method-assign]

    def _after_spares_stand(self, act: Act) -> Act:
        """Nothing happens before those who were started to stand by do so, however busy the machine is."""

        def later(here: Here) -> None:
            deadline = time.monotonic() + 30
            while len(list(self.directory.parent.glob("stands-*"))) < self._spares and time.monotonic() < deadline:
                time.sleep(0.01)
            act(here)

        return later

    def wait(self, timeout_s: float = 60.0) -> dict[int, Ended]:
        """How everybody ended; whoever has not in time is ended, and the test with it."""
        deadline, found = time.monotonic() + timeout_s, dict[int, Ended]()
        while len(found) < len(self.pids) and time.monotonic() < deadline:
            for name in self.pids.keys() - found.keys():
                pid, status = os.waitpid(self.pids[name], os.WNOHANG)
                if pid:
                    with os.fdopen(self._hears[name], "rb") as pipe:
                        said = pipe.read()
                    killed = os.WIFSIGNALED(status)
                    code = 0 if killed else os.WEXITSTATUS(status)
                    found[name] = Ended(killed=killed, code=code, **(msgspec.msgpack.decode(said) if said else {}))
            time.sleep(0.01)
        late = self.pids.keys() - found.keys()
        for name in late:
            os.kill(self.pids[name], signal.SIGKILL)
            os.waitpid(self.pids[name], 0)
        self._store.close()
        assert not late, f"{sorted(late)} did not end in {timeout_s} s; the others: {found}"
        return found


def kill_at(name: int, tries: int) -> Act:
    """One process dies in its n-th attempt at a step, after backward."""

    def act(here: Here) -> None:
        if here.name == name and here.tries == tries:
            os.kill(os.getpid(), signal.SIGKILL)

    return act


def survivors(found: dict[int, Ended]) -> list[dict[str, object]]:
    assert not any(one.error for one in found.values()), found
    return [one.result for one in found.values() if one.result is not None]


def in_forward(name: int, tries: int) -> Act:
    def act(here: Here) -> None:
        if here.name == name and here.tries == tries - 1:
            here.model.register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))

    return act


def in_backward(name: int, tries: int, parameter: int) -> Act:
    """When the gradient of this parameter is there: some buckets are on their way, others are not."""

    def act(here: Here) -> None:
        if here.name == name and here.tries == tries - 1:
            tensor = list(here.model.parameters())[parameter]
            tensor.register_post_accumulate_grad_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))

    return act


def in_the_update(name: int, tries: int) -> Act:
    def act(here: Here) -> None:
        if here.name == name and here.tries == tries:
            here.optimizer.register_step_post_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))

    return act


def own(found: dict[int, Ended]) -> dict[int, tuple[str, str]]:
    """By rank: the state, and what each rank has for itself."""
    results = [one.result for one in found.values() if one.result is not None]
    return {one["rank"]: (one["state"], one["own"]) for one in results}
