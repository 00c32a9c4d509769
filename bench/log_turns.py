"""Ways of keeping one training loop that take turns on it, and what they leave on a disk.

A plain loop and a guarded one are the same objects in one process: for a block without Everstep its hooks are taken
off the optimizer and put back afterwards. So a plain block is a loop that nobody guards, and the run has not seen its
steps. (Such a run could not be recovered; it is here for its times.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from common import Stat, timed
from cpu import Gpt
from torch import nn

import everstep
from everstep.capture.snapshot import _WATCHED_CUTS
from everstep.events import ChainEnded, Degraded, RingMade, Tuned, read_events
from everstep.store.disk import DiskTier
from everstep.store.log import LogRead, log_folder, log_name, scan, segments
from everstep.store.manifest import committed_steps, run_name, step_folder, values_folder, values_steps

ADAM_BYTES = 12  # a parameter and two moments, fp32


class Hooks:
    """Some of an optimizer, as an owner that `hooks_of` knows."""

    def __init__(self, ids: set[int]) -> None:
        self._handles = [SimpleNamespace(id=number) for number in ids]


def hooks_now(optimizer: torch.optim.Optimizer) -> Hooks:
    return Hooks({*optimizer._optimizer_step_pre_hooks, *optimizer._optimizer_step_post_hooks})


@contextmanager
def hooks_of(optimizer: torch.optim.Optimizer, *owners: object) -> Iterator[None]:
    """Only the hooks that these objects have on an optimizer; without any, it is that of a plain loop."""
    tables: Any = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    known = [dict(table) for table in tables]
    kept = {handle.id for owner in owners for handle in owner._handles}  # type: ignore[attr-defined]
    for table in tables:
        for key in table.keys() - kept:
            del table[key]
    try:
        yield
    finally:
        for table, hooks in zip(tables, known, strict=True):
            table.clear()
            table.update(hooks)


def nothing() -> None:
    pass


@dataclass
class Way:
    """One way of keeping a loop."""

    done: Callable[[], object] = nothing  # after each step
    hooks: tuple[object, ...] | None = ()  # whose hooks the optimizer keeps; None: all
    before: Callable[..., None] | None = None  # a hook of its own in front of the optimizer's step
    steps: int = 0  # in a block, if not as many as the others
    behind: Callable[[], int] = lambda: 0  # steps that are done and not durable
    settle: Callable[[], object] = nothing  # until nothing of it is under way


@dataclass
class Turns:
    """What was seen of one way."""

    step_s: list[float] = field(default_factory=list)  # per block
    behind: list[int] = field(default_factory=list)  # at the end of each block


def take_turns(
    ways: dict[str, Way],
    step: Callable[[], None],
    optimizer: torch.optim.Optimizer,
    *,
    rounds: int,
    steps: int,
    sync: Callable[[], None] = nothing,
) -> dict[str, Turns]:
    """Blocks of steps; in every round each way has one, and another one comes first."""
    found = {name: Turns() for name in ways}
    names = list(ways)
    for round_ in range(rounds):
        at = round_ % len(names)
        for name in names[at:] + names[:at]:
            way = ways[name]
            with _kept(optimizer, way):
                step()  # so that whatever a step leaves to the next is there from the first that is timed
                way.done()
                sync()
                count = way.steps or steps
                with timed() as timer:
                    for _ in range(count):
                        step()
                        way.done()
                    sync()
                found[name].step_s.append(timer.seconds / count)
                found[name].behind.append(way.behind())
                way.settle()
    return found


@contextmanager
def _kept(optimizer: torch.optim.Optimizer, way: Way) -> Iterator[None]:
    with nullcontext() if way.hooks is None else hooks_of(optimizer, *way.hooks):
        handle = optimizer.register_step_pre_hook(way.before) if way.before is not None else None
        try:
            yield
        finally:
            if handle is not None:
                handle.remove()


def over(found: dict[str, Turns], way: str, base: str) -> Stat:
    """The overhead of one way over another, round by round."""
    pairs = zip(found[way].step_s, found[base].step_s, strict=True)
    return Stat([on / off - 1 for on, off in pairs])


class Loop:
    """A GPT on fresh tokens; width 384 gives it 11 million parameters."""

    def __init__(self, width: int, batch: int = 8, length: int = 128) -> None:
        torch.manual_seed(0)
        self.model = Gpt(vocab=256, width=width, layers=6, heads=6, length=length)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4)
        self._shape = (batch, length + 1)

    def step(self) -> None:
        tokens = torch.randint(0, 256, self._shape)
        loss = nn.functional.cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    def guard(self, directory: Path, **options: Any) -> everstep.Run:
        return everstep.guard(self.model, self.optimizer, dir=directory, linger="1s", **options)


# -- Everstep


class Watched:
    """A guarded loop that counts the steps which have no record."""

    def __init__(self, run: everstep.Run) -> None:
        self.run, self.cuts, self.missed = run, 0, 0

    def done(self) -> None:
        self.run.done()
        self.cuts += 1
        recorder = self.run._keeping.recorder
        self.missed += recorder is not None and recorder.whole_since == self.run.step

    def behind(self) -> int:
        durable = self.run.status()["durable_step"]
        return self.run.step - (durable if isinstance(durable, int) else 0)

    def stall_s(self) -> float:
        """Host time of the training thread in cuts, gates and hooks, so far."""
        recorder = self.run._keeping.recorder
        return self.run._capture.stall_s + (recorder.stall_s if recorder is not None else 0.0)

    def warm_up(self, step: Callable[[], None], steps: int = 8) -> None:
        """The first captures make arenas, try the optimizers and are watched; none of that comes again."""
        for _ in range(steps):
            step()
            self.run.done()
        self.run.wait("durable", timeout=60)
        end_watch(self.run)


def end_watch(run: everstep.Run) -> None:
    """Plain blocks write parameters behind the gates; the first captures would be found out of order by that."""
    run._capture._cuts += _WATCHED_CUTS
    run._capture._watched = None


def steps_between_values(directory: Path) -> int:
    """How many steps the keeper has between two saves of values, where records need them; at first half a ring."""
    events = read_events(directory)
    told = [event.value for event in events if isinstance(event, Tuned) and event.what == "steps per save of values"]
    made = [event.slots // 2 for event in events if isinstance(event, RingMade)]
    return (told or made or [0])[-1]


def troubles(directory: Path) -> list[str]:
    """Why chains ended and what was not as safe as it was asked to be; not that records begin with the first base."""
    events = read_events(directory)
    found = {event.reason for event in events if isinstance(event, ChainEnded) and "first base" not in event.reason}
    return sorted(found | {f"{event.what}: {event.reason}" for event in events if isinstance(event, Degraded)})


def newest_log(tier: DiskTier, rank: int) -> LogRead | None:
    """The newest file of a rank that has records; ranks need not have begun theirs after the same step."""
    run = run_name(tier)
    there = [start for start in segments(tier) if log_name(start, rank) in tier.names(log_folder(start))]
    found = []
    for start in there:
        try:
            found.append(scan(tier, start, rank, run))
        except FileNotFoundError:
            continue  # the keeper has just let it go
    return next((log for log in reversed(found) if log.records), None)


def sizes(directory: Path, world: int = 1) -> dict[str, float]:
    """Bytes of one record, one save of values and one base, over all ranks, as they lie on the disk."""
    tier = DiskTier(directory)
    logs = [newest_log(tier, rank) for rank in range(world)]
    records = sum((log.end - log.records[0].begin) / len(log.records) for log in logs if log is not None)
    folders = {
        "base": list(map(step_folder, committed_steps(tier))),
        "values": list(map(values_folder, values_steps(tier))),
    }
    whole = {
        what: float(sum(tier.size(name) for name in tier.names(names[-1]))) if names else 0.0
        for what, names in folders.items()
    }
    return {"record": records, **whole}
