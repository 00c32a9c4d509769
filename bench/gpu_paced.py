"""What captures do to a step that is bound by its all-reduce: two ranks on one device, DDP over gloo.

The door is bench/gpu.py paced. Blocks with capture off, unpaced and paced take turns in one pair of processes, each of
which is this file. Unpaced: copies of others wait behind all that are queued. Paced: as Everstep does it, they pass.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu_models
import torch
import torch.distributed as dist
from common import MB, Report, Stat, Table, free_port
from gpu_merge import each
from gpu_methods import Host
from gpu_models import Case, make_case
from gpu_ways import step_seconds
from peers import end_keeper
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import everstep
from everstep.capture import shape

OFF, UNPACED, PACED = "capture off", "unpaced", "paced"
WAYS = (OFF, UNPACED, PACED)
ROUNDS, BLOCK_S, MOST_STEPS = 5, 1.5, 60
WORLD = 2
TOKENS = (2, 128)  # a batch: few, so that a step is mostly its all-reduce


class Reducing:
    """A hook of DDP that reduces as DDP does, and notes from when to when it did in each step."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._ended = 0.0
        self.spans_s: list[float] = []  # of a step: from the first bucket's launch to the end of the last

    def hook(self, _, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
        if self._began is None:
            self._began = time.perf_counter()
        buffer = bucket.buffer().div_(WORLD)
        future = dist.all_reduce(buffer, async_op=True).get_future()

        def ended(done: torch.futures.Future[list[Tensor]]) -> Tensor:
            self._ended = time.perf_counter()
            return done.value()[0]

        return future.then(ended)

    def end_step(self, *_: object) -> None:
        """Before the update: by then all buckets have come back."""
        if self._began is not None:
            self.spans_s.append(self._ended - self._began)
            self._began = None


@contextmanager
def unpaced() -> Iterator[None]:
    """No copy of others passes those of a capture."""
    copy = shape.Lane.copy

    def straight(_: shape.Lane, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        torch._foreach_copy_(list(targets), list(sources), non_blocking=True)

    shape.Lane.copy = straight  # type: ignore[method-assign]
    try:
        yield
    finally:
        shape.Lane.copy = copy  # type: ignore[method-assign]


def reduced_case(name: str) -> tuple[Case, Reducing]:
    """The model under DDP, with so few tokens that reducing is most of a step."""
    case = make_case(name, light=True)
    model, reducing = DistributedDataParallel(case.model), Reducing()
    model.register_comm_hook(None, reducing.hook)
    vocab, (batch, length) = (50257, TOKENS) if gpu_models.DEVICE == "cuda" else (64, (4, 16))

    def loss() -> Tensor:
        tokens = torch.randint(0, vocab, (batch, length), device=gpu_models.DEVICE)
        if gpu_models.DEVICE == "cuda":
            return model(input_ids=tokens, labels=tokens).loss  # type: ignore[no-any-return]
        return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    case.optimizer.register_step_pre_hook(reducing.end_step)
    return replace(case, title=f"{name}, {batch} x {length} a rank", model=model, loss=loss), reducing


class OneOfTwo(Host):
    """Everstep in mode host, on one of the ranks that share a keeper."""

    def close(self) -> None:
        if self.run.give_up():
            dist.barrier()  # nobody is left who would start a new one
            if dist.get_rank() == 0:
                end_keeper(str(self.run.status()["run"]))


def train(name: str, root: Path) -> None:
    """One rank. Its last line is what it has seen."""
    everstep.init_process_group("gloo")
    case, reducing = reduced_case(name)
    step_s = torch.tensor([step_seconds(case)])
    dist.broadcast(step_s, 0)
    steps = max(3, min(MOST_STEPS, round(BLOCK_S / step_s.item())))
    case.lead = 1  # all ranks have blocks of the same length
    way = OneOfTwo(case, root, 1)
    run: dict[str, Callable[[int], float]] = {OFF: way.plain, UNPACED: way.block, PACED: way.block}
    found: dict[str, Any] = {way_: {"step_s": [], "reduce_s": []} for way_ in WAYS}
    for round_ in range(ROUNDS):
        at = round_ % len(WAYS)
        for how in WAYS[at:] + WAYS[:at]:
            with unpaced() if how == UNPACED else nullcontext():
                dist.barrier()
                before = len(reducing.spans_s)
                found[how]["step_s"].append(run[how](steps))
                extra = len(reducing.spans_s) - before - steps
                assert extra >= case.lead
                found[how]["reduce_s"].append(Stat(reducing.spans_s[before + extra :]).median)
    dist.barrier()
    kept = way.result()
    dist.barrier()  # both have counted
    way.close()
    sizes = [p.nbytes for p in case.model.parameters()]
    print(json.dumps({
        "title": case.title, "ways": found, "steps": steps, "kept": kept.kept, "of": kept.steps,
        "troubles": kept.troubles, "gradient_bytes": sum(sizes), "moved_bytes": kept.bytes_moved,
    }))  # fmt: skip


# -- both ranks


def bench_paced(names: list[str], scratch: Path, deadline: float) -> Iterator[tuple[str, dict[str, Any]]]:
    def one(name: str) -> Iterator[dict[str, Any]]:
        root = scratch / f"paced-{name}"
        root.mkdir()
        ranks = _ranks(name, root, deadline)
        entry = {**ranks[0], "ways": {}}
        for how in WAYS:  # a step is over when the slower rank has it
            both = [rank["ways"][how] for rank in ranks]
            entry["ways"][how] = {
                what: [max(pair) for pair in zip(*(rank[what] for rank in both), strict=True)] for what in both[0]
            }
        yield entry

    for name in names:
        yield from each(name, one)


def _ranks(name: str, root: Path, deadline: float) -> list[dict[str, Any]]:
    """What each said at its end; if one fails, the other would wait for ever."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": str(WORLD)}
    processes = []
    for rank in range(WORLD):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(WORLD)}
        words = [sys.executable, __file__, name, str(root), "--device", gpu_models.DEVICE]
        with (root / f"said-{rank}").open("w") as out:
            processes.append(subprocess.Popen(words, stdout=out, env={**os.environ, **meeting, **place}))
    try:
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes):
                raise RuntimeError("a rank failed: what it said is above")
            if time.monotonic() > deadline:
                raise TimeoutError("the ranks did not end in time")
            time.sleep(0.2)
        if any(process.returncode for process in processes):
            raise RuntimeError("a rank failed: what it said is above")
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    return [json.loads((root / f"said-{rank}").read_text().splitlines()[-1]) for rank in range(WORLD)]


# -- what is said about it


def paced_report(report: Report, models: dict[str, Any]) -> None:
    for entry in models.values():
        if "ways" not in entry:
            continue
        table = Table(
            f"Captures beside an all-reduce: {entry['title']}",
            ["", "ms/step", "over capture off %", "all-reduce ms/step", "over capture off %"],
            note=f"Two ranks on one device, DDP over gloo, {entry['gradient_bytes'] / MB:.0f} MB of gradients a step; "
            f"every step captured in mode host, {entry['moved_bytes'] / MB:.0f} MB by each rank, {entry['kept']} of "
            f"{entry['of']} kept. {ROUNDS} rounds in which each has {entry['steps']} steps. all-reduce: from the "
            "launch of the first bucket to the end of the last, the wait for their gradients included. unpaced: "
            "whoever copies to the host waits behind all that captures have queued. paced: as Everstep does it, behind "
            "a part of that; it does not ask whether an all-reduce is under way. " + "; ".join(entry["troubles"]),
        )
        off = entry["ways"][OFF]
        for how in WAYS:
            found = entry["ways"][how]
            row = [how]
            for what in ("step_s", "reduce_s"):
                over = Stat([on / plain - 1 for on, plain in zip(found[what], off[what], strict=True)])
                row += [Stat(found[what]).text(1e3), "-" if how == OFF else over.text(100, 2)]
            table.rows.append(row)
        report.tables.append(table)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("root", type=Path)
    parser.add_argument("--device", required=True)
    given = parser.parse_args()
    gpu_models.DEVICE = given.device
    if given.device == "cpu":
        torch.set_num_threads(1)
    train(given.model, given.root)


if __name__ == "__main__":
    main()
