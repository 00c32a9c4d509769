"""Ranks that live through many acts, because starting them costs more than most of what they do.

An act is a world of some of them in which a model is laid out, guarded, and trained for some steps. What each rank
finds is written down for the test that reads it.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import shutil
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any
from unittest import mock

import laid_out
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode

import everstep
from everstep.capture import gradients
from everstep.capture.host import arena_root
from everstep.events import Degraded, Fetched, Replayed, read_events

_forked = multiprocessing.get_context("forkserver")
_forked.set_forkserver_preload(
    ["torch._dynamo", "torch.distributed.tensor.parallel", "torch.distributed.optim", "everstep.run"]
)


COLLECTIVES = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_gather_single", "all_reduce", "all_to_all",
    "all_to_all_single", "barrier", "batch_isend_irecv", "broadcast", "broadcast_object_list", "gather",
    "gather_object", "irecv", "isend", "monitored_barrier", "recv", "reduce", "reduce_scatter",
    "reduce_scatter_single", "reduce_scatter_tensor", "scatter", "send",
)  # fmt: skip


@dataclass(frozen=True)
class Act:
    kind: str
    world: int
    run: str  # the name of its directory
    steps: int = 0
    model: str = "Net"
    strategy: str = "snapshot"
    wipe: bool = False  # memory is lost before it begins
    breaks: bool = False  # off in the middle, so that the last step has no base if it has a record
    optimizer: str = "AdamW"


@dataclass(frozen=True)
class Scene:
    """What was found in an act, by rank."""

    began: list[dict[str, Any]]
    ended: list[dict[str, Any]]


def perform(acts: list[Act], directory: Path, module: str = "laid_out") -> list[Scene]:
    """Play all acts, one after the other, with the models of a module."""
    directory.mkdir(parents=True, exist_ok=True)
    most = max(act.world for act in acts)
    ranks = [_forked.Process(target=_live, args=(acts, rank, directory, module)) for rank in range(most)]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + 240.0
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
        _clean_up(directory)
    problems = "\n".join(path.read_text() for path in sorted(directory.glob("error-*")))
    assert not problems and all(process.exitcode == 0 for process in ranks), problems or "a rank did not end"
    return [
        Scene(
            *(
                [torch.load(directory / f"{what}-{i}-{rank}") for rank in range(act.world)]
                for what in ("began", "ended")
            )
        )
        for i, act in enumerate(acts)
    ]


def _clean_up(directory: Path) -> None:
    for record in directory.glob("*/run.json"):
        _wipe(record.parent)


def _wipe(run: Path) -> None:
    if (run / "run.json").exists():
        shutil.rmtree(arena_root(None) / everstep.open(run).run, ignore_errors=True)


def _live(acts: list[Act], rank: int, directory: Path, module: str) -> None:
    torch.set_num_threads(1)
    gradients._DIGEST_EVERY = 3  # so that short chains have one
    with open(directory / f"stderr-{rank}", "w") as errors:
        os.dup2(errors.fileno(), 2)
    try:
        for i, act in enumerate(acts):
            if rank < act.world:
                _play(act, i, rank, directory, getattr(importlib.import_module(module), act.model))
    except BaseException:
        (directory / f"error-{rank}").write_text(f"rank {rank}, {acts[i]}:\n{traceback.format_exc()}")
        os._exit(1)
    os._exit(0)


def _play(act: Act, number: int, rank: int, directory: Path, make: type[nn.Module]) -> None:
    meeting = f"file://{directory}/meeting-{number}"
    if act.kind != "single":
        dist.init_process_group("gloo", meeting, timedelta(seconds=60), rank=rank, world_size=act.world)
    if act.wipe:
        if rank == 0:
            _wipe(directory / act.run)
        if act.world > 1:
            dist.barrier()
    torch.manual_seed(number)
    model, optimizer = laid_out.laid_out(act.kind, make(), act.optimizer)
    began, ended = play(act, rank, directory / act.run, model, optimizer)
    torch.save(began, directory / f"began-{number}-{rank}")
    torch.save(ended, directory / f"ended-{number}-{rank}")
    if act.kind != "single":
        dist.destroy_process_group()


def play(act: Act, rank: int, run_directory: Path, model: Any, optimizer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    run = everstep.guard(model, optimizer, dir=run_directory, keeper="inline", strategy=act.strategy)
    began = {"resumed_from": run.resumed_from, "state": laid_out.whole(model, optimizer)}
    for _ in range(act.steps):
        laid_out.backward(model, laid_out.batch(act.kind, run.step, rank))
        # DDP broadcasts its buckets after the first pass, and ZeroRedundancyOptimizer what it has updated
        with zeros_own(optimizer) if act.kind == "zero" else no_collectives():
            optimizer.step()
        with nullcontext() if act.kind in ("ddp", "zero") and run.step == 0 else no_collectives():
            run.done()
        optimizer.zero_grad()
        if act.breaks and run.step == 1:  # keepers in threads do not agree on a base by themselves
            run._keeping.wait_sealed()
            run._keeper.wait_durable(1, None, as_base=True)
    ended = {"step": run.step, "state": laid_out.whole(model, optimizer)}
    if act.breaks:
        run.wait("durable")
        run.__exit__(KeyboardInterrupt, None, None)
    run.close()
    events = list(read_events(run_directory))
    began["fetched"] = [e.bytes for e in events if isinstance(e, Fetched) and e.rank == rank][-1:]
    began["replayed"] = [(e.base, e.steps) for e in events if isinstance(e, Replayed) and e.rank == rank][-1:]
    began["degraded"] = [(e.what, e.reason) for e in events if isinstance(e, Degraded)]
    return began, ended


@contextmanager
def no_collectives(but: tuple[str, ...] = ()) -> Iterator[None]:
    """Whatever ranks would tell each other in here is an error."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("ranks talk to each other in a step")

    names = [name for name in COLLECTIVES if hasattr(dist, name) and name not in but]
    with ExitStack() as patches, CommDebugMode() as seen:
        for name in names:
            patches.enter_context(mock.patch.object(dist, name, refuse))
        yield
    assert but or seen.get_total_counts() == 0, seen.get_comm_counts()


@contextmanager
def zeros_own(optimizer: Any) -> Iterator[None]:
    """Every parameter is broadcast once, and ranks tell each other nothing else."""
    told: list[Any] = []
    broadcast = dist.broadcast

    def counted(*args: Any, **options: Any) -> Any:
        told.append(args)
        return broadcast(*args, **options)

    with no_collectives(("broadcast",)), mock.patch.object(dist, "broadcast", counted):
        yield
    assert len(told) == sum(len(group["params"]) for group in optimizer.param_groups), told


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """The names under which two states do not have the same bits."""

    def same(a: Tensor | None, b: Tensor | None) -> bool:
        if a is None or b is None or (a.shape, a.dtype) != (b.shape, b.dtype):
            return False
        return (
            torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)) if a.dim() else bool(a == b)
        )

    return sorted(name for name in one.keys() | other.keys() if not same(one.get(name), other.get(name)))
