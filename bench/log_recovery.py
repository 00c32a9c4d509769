"""How long a base and a hundred records take to come home, against the base alone. The door is bench/log.py."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import MB, Report, Stat, Table, Target, timed
from log_gpu import RATIO
from log_turns import Loop, sizes
from peers import drop_cache
from replay import sequentially

from everstep import topology
from everstep.capture.compress import TopK
from everstep.capture.steering import Steering
from everstep.events import Replayed
from everstep.keeper.client import keeper_pid
from everstep.recover import resume as resuming
from everstep.recover.state import State
from everstep.recover.survey import Sources
from everstep.store.disk import DiskTier
from everstep.store.manifest import run_name
from everstep.store.places import Places

RECORDS = 100


def bench_recovery(scratch: Path, quick: bool) -> dict[str, Any]:
    width = 96 if quick else 192
    return {kind: _recovered(kind, width, scratch, 2 if quick else 3) for kind in ("dense", "topk")}


def _small(width: int) -> Loop:
    return Loop(width, batch=1, length=16)  # recovery does not depend on what a step computed


def _life(directory: str, kind: str, width: int) -> None:
    """Train until as many records follow a base, and die."""
    Steering.steps_per_base = 10 * RECORDS  # type: ignore[method-assign,assignment]
    torch.set_flush_denormal(True)
    loop = _small(width)
    run = loop.guard(Path(directory), strategy="log", compress=TopK(RATIO) if kind == "topk" else None)
    while run._capture.base_step < 0 or run.step - run._capture.base_step < RECORDS:
        loop.step()
        run.done()
        if run.step % 8 == 0:
            run.wait("durable")  # so that the ring is never full, whatever the disk
    run.wait("durable")
    os.kill(os.getpid(), signal.SIGKILL)


def _recovered(kind: str, width: int, scratch: Path, repeats: int) -> dict[str, Any]:
    root = Path(tempfile.mkdtemp(dir=scratch))
    whole, base = root / "run", root / "base"
    child = multiprocessing.get_context("spawn").Process(target=_life, args=(str(whole), kind, width))
    child.start()
    child.join()
    run = run_name(DiskTier(whole))
    deadline = time.monotonic() + 60
    while keeper_pid(run) is not None and time.monotonic() < deadline:
        time.sleep(0.1)  # until it has let the memory go: what is recovered comes from the disk
    shutil.copytree(whole, base, ignore=shutil.ignore_patterns("log-*", "values-*"))
    ways: dict[str, tuple[Path, Callable[..., Any]]] = {
        "base": (base, resuming.replay),
        "slabs": (whole, resuming.replay),
        "sequential": (whole, lambda subjects, steps, _: sequentially(subjects, steps)),
    }
    found: dict[str, Any] = {name: [] for name in ways}
    steps: dict[str, int] = {}
    for turn in range(repeats):
        for name, (directory, replay) in ways.items():
            if name != "sequential" or turn == 0:
                seconds, steps[name] = _resume(directory, run, kind, width, replay)
                found[name].append(seconds)
    wrong = {name: count for name, count in steps.items() if count != (0 if name == "base" else RECORDS)}
    if wrong:
        raise RuntimeError(f"other numbers of steps were repeated than {RECORDS}: {wrong}")
    size = sizes(whole)
    shutil.rmtree(root)
    return {"seconds": found, "bytes": size, "parameters": _small(width).parameters}


def _resume(directory: Path, run: str, kind: str, width: int, replay: Callable[..., Any]) -> tuple[float, int]:
    """Seconds of the whole way home into fresh objects, and how many steps were repeated on it."""
    loop, events = _small(width), []
    state = State(
        models=[loop.model], optimizers=[loop.optimizer], schedulers=[], scaler=None, extra=None,
        compressor=TopK(RATIO) if kind == "topk" else None,
    )  # fmt: skip
    drop_cache([path for path in directory.rglob("*") if path.is_file()])
    theirs, resuming.replay = resuming.replay, replay
    try:
        with Sources(Places(directory=str(directory)), run) as sources, timed() as timer:
            resuming.resume(sources, state, None, topology.here(), strict=True, emit=events.append)
    finally:
        resuming.replay = theirs
    return timer.seconds, sum(event.steps for event in events if isinstance(event, Replayed))


# -- what is said about it


def recovery_report(report: Report, found: dict[str, Any]) -> None:
    table = Table(
        f"Recovery: a base and {RECORDS} records",
        ["log", "what", "s", "times the base", "MB read"],
        note="recover.resume from a disk whose cache was dropped, into fresh objects: survey, read, check, copy, "
        "replay. Sequential: whole parameters, step after step; slabs: the real way. Replay alone, and "
        "shared by two ranks, is in bench/replay.py. " + _why(found["dense"]),
    )
    for kind, one in found.items():
        alone = Stat(one["seconds"]["base"])
        size = one["bytes"]
        for way, seconds in one["seconds"].items():
            read = size["base"] + (0 if way == "base" else RECORDS * size["record"] + size["values"])
            table.rows.append([
                kind, "the base alone" if way == "base" else f"and {RECORDS} records, {way}", Stat(seconds).text(),
                f"{Stat(seconds).median / alone.median:.1f}", f"{read / MB:.0f}",
            ])  # fmt: skip
        times = Stat(one["seconds"]["slabs"]).median / alone.median
        what = f"base and {RECORDS} records, {kind}"
        report.targets.append(Target(what, "<= 2x the base alone", f"{times:.1f}x", times <= 2))
    report.tables.append(table)


def _why(dense: dict[str, Any]) -> str:
    size, count = dense["bytes"], dense["parameters"]
    base, log = size["base"] / count, RECORDS * size["record"] / count
    return (
        f"Dense cannot be 2x: the base has {base:.0f} bytes a parameter and the records {log:.0f}, so reading alone is "
        f"{1 + log / base:.0f}x; packed records are few bytes, but each is still an update of every parameter, which "
        f"reads and writes some 24 bytes of it, {RECORDS * 24 / base:.0f}x the base over {RECORDS} steps."
    )
