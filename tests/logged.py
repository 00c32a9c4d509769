"""Runs under strategy="log" whose trainers are dead, and what can befall their logs."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lives import forget_memory, live, run_directory, tiny
from torch import nn

import everstep
from everstep import Disk
from everstep.store.disk import DiskTier
from everstep.store.log import LogRead, LogWriter, log_name, read_log, segments
from everstep.store.manifest import committed_steps
from everstep.types import Frame

BASE, END = 9, 12  # the second base, and the last step

Make = Callable[[Any], torch.optim.Optimizer]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True)


class Own(torch.optim.SGD):
    """An optimizer that torch does not have."""


def own(parameters: Any) -> torch.optim.Optimizer:
    return Own(parameters, lr=0.05)


def train(
    directory: Path, make: Make, *, before: Callable[[], None], at_step: Callable[[everstep.Run], None], **options: Any
) -> dict[str, Any]:
    """Every step's state goes aside by torch's own means; then this process is killed."""
    before()
    model, _, loader = tiny()
    optimizer = make(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    options = {"tiers": [Disk(every=10**6)], "keep": 50, "strategy": "log", "keeper": "inline", **options}
    run = everstep.guard(model, optimizer, loader, dir=directory, scheduler=scheduler, epochs=None, **options)
    for x, y in run:
        if run.step == BASE:
            run._keeping.take(run.step, base=True)
            run._keeping.wait_sealed()
            run._keeper.wait_durable(BASE, None, as_base=True)
        at_step(run)  # the ring is small, and these steps are faster than any disk
        if run.step == END:
            os.kill(os.getpid(), signal.SIGKILL)
        nn.functional.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        state = {
            "model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedulers": [scheduler.state_dict()],
        }  # fmt: skip
        torch.save(state, directory.parent / f"{run.step + 1}.pt")
    return {}


def wait(run: everstep.Run) -> None:
    run.wait()


@contextmanager
def past(
    make: Make = adamw,
    *,
    reboot: bool = True,
    before: Callable[[], None] = lambda: None,
    at_step: Callable[[everstep.Run], None] = wait,
    **options: Any,
) -> Iterator[Path]:
    """The directory of a run that was killed at its step END; `n.pt` beside it is its state after step n."""
    with run_directory() as directory:
        outcome = live(lambda: train(directory, make, before=before, at_step=at_step, **options))
        assert outcome.killed, outcome.error
        if reboot:
            forget_memory(directory)
        yield directory


def alive(directory: Path, step: int) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(directory.parent / f"{step}.pt", weights_only=True)
    return state


def log_with(directory: Path, step: int) -> LogRead:
    """The file that has the record of a step."""
    tier = DiskTier(directory)
    start = max(start for start in segments(tier) if start < step)
    return read_log(tier, start, 0, everstep.open(directory).run)


def tidy(directory: Path) -> None:
    """A segment after each base on disk, wherever the keeper happened to begin new ones."""
    tier, run = DiskTier(directory), everstep.open(directory).run
    logs = [read_log(tier, start, 0, run) for start in segments(tier)]
    records = [(record.frame, [memoryview(bytes(log.payload(record)))]) for log in logs for record in log.records]
    layout = logs[0].layout
    assert layout is not None and all(log.layout == layout for log in logs)
    for path in directory.glob("log-*"):
        shutil.rmtree(path)
    starts = committed_steps(tier)
    for start, end in zip(starts, [*starts[1:], END], strict=True):
        writer = LogWriter(tier, start, 0, run, layout.header)
        for record in (r for r in records if start < r[0].step <= end):
            writer.append([record])  # each a commit of its own, so that damage is told from a torn tail


def damage(directory: Path, step: int) -> Path:
    """Flip a bit of a gradient."""
    log = log_with(directory, step)
    path = directory / log.name
    content = bytearray(path.read_bytes())
    content[log.records[step - log.start - 1].offset + 100] ^= 1
    path.write_bytes(content)
    return path


def forge(directory: Path, step: int) -> None:
    """The same with checksums that are right, as if another gradient had been recorded."""
    tier, log = DiskTier(directory), log_with(directory, step)
    assert log.layout is not None
    records: list[tuple[Frame, list[memoryview]]] = []
    for record in log.records:
        payload = bytearray(log.payload(record))
        if record.frame.step == step:
            payload[103] ^= 0x10
        records.append((record.frame, [memoryview(payload)]))
    (directory / log_name(log.start, 0)).unlink()
    LogWriter(tier, log.start, 0, everstep.open(directory).run, log.layout.header).append(records)
