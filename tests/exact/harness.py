"""Whether a run that was killed ends with the same bits as one that was not.

A feature is a function that trains something under guard(). The harness lets it live in processes of its own: once
without failure, and once more with a SIGKILL in each life but the last. What is left at the end of both, every tensor
and every number of it, is written down as text and compared line by line.

Lives are forked from a server that has torch already imported, so a life costs a tenth of a second. A life that
resumes starts from another seed than the first one: whatever is not restored shows.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import everstep
from everstep.capture import buckets, position, snapshot
from everstep.capture.sharded import local_of, stepping
from everstep.events import Degraded, read_events
from everstep.keeper.client import keeper_pid

sys.path.insert(0, str(Path(__file__).parents[1]))
from lives import Countdown, MeetingPlace, turn_every, way_to

SEED = 7
PLACES = ("asked", "given", "forward", "backward", "step")
Lines = dict[str, str]


@dataclass(frozen=True)
class Kill:
    """Die when `step` steps are done, at this place of the loop.

    Places: the next batch is `asked` for (the cut is made), it is `given`, `forward` has run, `backward` has run, the
    optimizer's `step` has run.
    """

    step: int
    place: str
    rank: int = 0


EVERYWHERE = (Kill(2, "forward"), Kill(4, "backward"), Kill(5, "step"), Kill(6, "asked"), Kill(9, "given"))
ON_TWO = (Kill(3, "backward", rank=1), Kill(5, "step", rank=0), Kill(6, "asked", rank=1))


@dataclass(frozen=True)
class Life:
    """What a process is told; plain values, since it travels to another process."""

    feature: str
    directory: Path
    number: int = 0
    rank: int = 0
    world: int = 1
    port: int = 0
    kill: Kill | None = None
    keeper: str = "inline"
    strategy: str = "snapshot"
    seed: int = SEED
    slow_copies: bool = False
    operation: int | None = None  # before which operation on a medium to die
    turn_every: int = 0
    module: str = "parallel"

    def file(self, what: str) -> Path:
        return self.directory / f"{what}-life-{self.number}-rank-{self.rank}"


# -- in the process that trains


def _has_no_replica(run: everstep.Run) -> bool:
    """None can follow what this loop trains, as it was told."""
    events = (e for e in read_events(run.settings.directory) if isinstance(e, Degraded))
    return any(e.what.startswith(("there is no replica", "there is no log")) for e in events)


@dataclass
class Trial:
    """What a feature is given: a guard that knows where, places to die at, and a pencil."""

    life: Life
    run: everstep.Run | None = None
    kept: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    given: int = 0

    @property
    def rank(self) -> int:
        return self.life.rank

    @property
    def world(self) -> int:
        return self.life.world

    def parallel(self, model: nn.Module, **options: Any) -> nn.Module:
        return nn.parallel.DistributedDataParallel(model, **options) if self.world > 1 else model

    def guard(self, model: Any, optimizer: Any, loader: Any = None, **options: Any) -> everstep.Run:
        self.extra = {"losses": [], "seen": [], **options.pop("extra", {})}
        ours = {"dir": self.life.directory / "run", "keeper": self.life.keeper, "strategy": self.life.strategy}
        options = {**ours, "extra": self.extra, **options}
        self.run = everstep.guard(model, optimizer, loader, **options)
        self.kept = {"model": model, "optimizer": optimizer, "extra": self.extra}
        self.kept |= {name: options[name] for name in ("scheduler", "scaler") if name in options}
        self._note("began", {"resumed_from": self.run.resumed_from, "state": dict(describe(self.state()))})
        return self.run

    def batches(self, run: everstep.Run) -> Iterator[tuple[Tensor, Tensor]]:
        """The run's batches, with the indices of their samples written down."""
        for x, y, indices in run:
            self.given += 1
            self.seen(indices.tolist())
            self.at("given")
            yield x, y

    def seen(self, indices: list[int]) -> None:
        assert self.run is not None
        self.extra["seen"].extend(indices)
        with open(self.life.file("seen"), "a") as log:
            log.write(json.dumps([self.run.step, self.run.epoch, indices]) + "\n")

    def at(self, place: str) -> None:
        """Die here, if this is the place and the time."""
        kill, run = self.life.kill, self.run
        if run is not None and kill == Kill(run.step, place, self.rank):
            self._await_replica(run)
            self._note("killed", run.step)
            os.kill(os.getpid(), signal.SIGKILL)

    def _await_replica(self, run: everstep.Run) -> None:
        """Where a process has a replica, and can have one: die when it is as new as the last cut."""
        if self.life.strategy != "replica" or self.life.keeper != "process" or _has_no_replica(run):
            return
        deadline = time.monotonic() + 90.0
        while (run.status()["replica"] or {"step": -1})["step"] < run.step:  # type: ignore[index]
            assert time.monotonic() < deadline, f"the replica does not come: {run.status()}"
            time.sleep(0.02)

    def lost(self, loss: Tensor) -> None:
        self.extra["losses"].append(loss.item())

    def state(self) -> dict[str, Any]:
        return {"model": self.kept["model"], "optimizer": self.kept["optimizer"]}

    def note_state(self) -> None:
        """The state after the step that the optimizer has just done, for whoever wants to compare it."""
        assert self.run is not None
        self._note(f"state-{self.run.step + 1}", dict(describe(self.state())))

    def end(self) -> None:
        self._note("ended", {"given": self.given, "lines": dict(describe({**self.kept, "random": randomness()}))})

    def _note(self, what: str, value: Any) -> None:
        self.life.file(what).write_text(json.dumps(value))


def randomness() -> dict[str, Any]:
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": hashlib.sha256(repr(random.getstate()).encode()).hexdigest(),
        "numpy": [kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
        "torch": torch.get_rng_state(),
    }


def describe(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Every bit of a value as lines of text, by name."""
    if isinstance(value, Tensor):
        value = local_of(value)
        data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        yield path, f"{value.dtype} {tuple(value.shape)} {value.stride()} {hashlib.sha256(data).hexdigest()}"
    elif isinstance(value, nn.Module):
        for name, tensor in [*value.named_parameters(remove_duplicate=False), *value.named_buffers()]:
            yield from describe(tensor, f"{path}.{name}")
    elif hasattr(value, "state_dict"):
        value = stepping(value)  # of an optimizer that ranks have taken apart, this one's part
        yield from describe(value.state_dict(), path)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from describe(item, f"{path}.{key}")
    elif isinstance(value, list | tuple) and not all(isinstance(item, int | float) for item in value):
        for index, item in enumerate(value):
            yield from describe(item, f"{path}.{index}")
    else:
        yield path, f"{type(value).__name__} {value!r}"


def differing(unbroken: list[Lines], killed: list[Lines]) -> list[str]:
    """Where two runs are not the same, in words."""
    return [
        f"rank {rank}{name}: {a.get(name)} unbroken, {b.get(name)} killed"
        for rank, (a, b) in enumerate(zip(unbroken, killed, strict=True))
        for name in sorted(a.keys() | b.keys())
        if a.get(name) != b.get(name)
    ]


def live(life: Life) -> None:
    """The body of a process: train, and write down what is left at the end."""
    from features import FEATURES

    importlib.import_module(life.module)  # where more of them are

    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # for the workers of loaders, as in a script
    with open(life.file("stderr"), "w") as errors:
        os.dup2(errors.fileno(), 2)
    try:
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(life.seed)
        if life.slow_copies:
            _slow_down_copies()
        if life.operation is not None:
            Countdown(life.operation).install()
        if life.turn_every:
            turn_every(life.turn_every)
        if life.world > 1:
            os.environ |= {"RANK": str(life.rank), "WORLD_SIZE": str(life.world), "LOCAL_RANK": str(life.rank)}
            os.environ |= way_to(life.port)
            everstep.init_process_group("gloo", timeout=timedelta(seconds=60))
        trial = Trial(life)
        _die_when_asked(trial)
        FEATURES[life.feature](trial)
        trial.end()
        if life.world > 1:
            dist.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def _die_when_asked(trial: Trial) -> None:
    """The place between two batches lies inside the run: after the cut, before the loader is asked."""
    original = position.Feed.next_batch

    def next_batch(feed: position.Feed) -> Any:
        trial.at("asked")
        return original(feed)

    position.Feed.next_batch = next_batch  # type: ignore[method-assign]


def _slow_down_copies() -> None:
    """Many small buckets and a rest after each, so that the training thread overtakes the copier wherever it may."""
    original = snapshot.Capture._advance

    def advance(capture: snapshot.Capture, progress: int) -> None:
        original(capture, progress)
        time.sleep(0.002)

    buckets.BUCKET_BYTES["cpu"] = 64
    snapshot.Capture._advance = advance  # type: ignore[method-assign]


# -- in the process that watches


_forked = multiprocessing.get_context("forkserver")
_forked.set_forkserver_preload(["torch._dynamo", "torchdata.stateful_dataloader", "everstep.run"])


@dataclass
class Stage:
    """A directory in which a feature lives, dies and lives again, until it ends."""

    feature: str
    directory: Path
    keeper: str = "inline"
    strategy: str = "snapshot"
    lives: int = 0
    turn_every: int = 0  # with strategy="auto": steps between turns
    module: str = "parallel"  # that knows the feature

    def play(
        self,
        kills: Sequence[Kill] = (),
        *,
        world: int = 1,
        other_seeds: bool = True,
        may_lose: int | None = None,
        reboot: bool = False,
    ) -> list[Lines]:
        """Live through the kills and then to the end; what is left, by rank. `reboot`: memory is lost each time."""
        if may_lose is None:
            may_lose = 1 if world == 1 else 2  # a rank that is waited for may be one base behind the others
        done = 0
        for kill in (*kills, None):
            codes = self.live_once(world=world, kill=kill, seed=SEED + self.lives if other_seeds else SEED)
            resumed_from = self.read("began")["resumed_from"] or 0
            assert resumed_from >= done - may_lose, f"life {self.lives} lost {done - resumed_from} steps"
            if kill is not None:
                assert codes[kill.rank] == -signal.SIGKILL, f"{kill} did not happen: {codes}\n{self.errors()}"
                done = self.read("killed", kill.rank)
            if reboot and kill is not None:
                self.clean_up()
        assert codes == [0] * world, f"exit codes {codes}\n{self.errors()}"
        return [self.read("ended", rank)["lines"] for rank in range(world)]

    def live_once(
        self,
        *,
        world: int = 1,
        kill: Kill | None = None,
        seed: int = SEED,
        after_s: float | None = None,
        operation: tuple[int, int] | None = None,
    ) -> list[int]:
        """One life of all ranks; when one of them is killed, or time is up, so are the others.

        `operation`: a rank, and the number of the operation on a medium before which it dies.
        """
        self.lives += 1
        self.directory.mkdir(parents=True, exist_ok=True)
        store = MeetingPlace() if world > 1 else None
        port = store.port if store is not None else 0
        ranks = [
            _forked.Process(
                target=live,
                args=(
                    Life(
                        feature=self.feature, directory=self.directory, number=self.lives, rank=rank, world=world,
                        port=port, kill=kill, keeper=self.keeper, strategy=self.strategy, seed=seed,
                        slow_copies=self.lives % 2 == 0, turn_every=self.turn_every, module=self.module,
                        operation=operation[1] if operation is not None and operation[0] == rank else None,
                    ),
                ),
            )
            for rank in range(world)
        ]  # fmt: skip
        for process in ranks:
            process.start()
        deadline = time.monotonic() + (120.0 if after_s is None else after_s)
        try:
            while running := [process for process in ranks if process.is_alive()]:
                left = deadline - time.monotonic()
                if left <= 0 or any(process.exitcode not in (0, None) for process in ranks):
                    break
                wait([process.sentinel for process in running], left)
        finally:
            for process in ranks:
                process.kill()
                process.join()
            if store is not None:
                store.close()
        if after_s is None:
            assert left > 0, f"life {self.lives} did not end\n{self.errors()}"
        return [process.exitcode for process in ranks]

    def read(self, what: str, rank: int = 0, number: int | None = None) -> Any:
        path = Life(self.feature, self.directory, number or self.lives, rank).file(what)
        assert path.exists(), f"life {self.lives} wrote no {what!r}\n{self.errors()}"
        return json.loads(path.read_text())

    def errors(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.directory.glob(f"stderr-life-{self.lives}-*")))

    # -- what a run leaves behind

    def name(self) -> str | None:
        record = self.directory / "run" / "run.json"
        return json.loads(record.read_text())["run"] if record.exists() else None

    def memory(self) -> Path:
        return Path("/dev/shm") / f"everstep-{os.getuid()}" / (self.name() or "none")

    def left_in_memory(self) -> list[str]:
        """The arenas that are still there."""
        return [folder.name for folder in self.memory().glob("rank-*")]

    def clean_up(self) -> None:
        name = self.name()
        pid = keeper_pid(name) if name is not None else None
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.memory(), ignore_errors=True)
