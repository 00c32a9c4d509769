"""Bytes a step of TopK(0.01) with one, two and four ranks, and what it costs to write indices as gaps.

The door is bench/log.py. Bytes are counted where they lie; how often residuals are saved is seen, not computed.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from common import MB, Report, Table, Target
from log_gpu import RATIO
from log_turns import ADAM_BYTES, newest_log, sizes, steps_between_values
from torch import Tensor, nn

import everstep
from everstep.capture import compress
from everstep.capture.form import PACKED
from everstep.store.disk import DiskTier
from everstep.store.gaps import from_gaps, to_gaps
from everstep.store.manifest import values_steps

WORLDS = (1, 2, 4)
_SAVES = 4  # of residuals, that are waited for,
_MOST_STEPS = 2000  # but not longer than this
_TOGETHER = 10  # steps, after which ranks ask the first one whether to go on
_LOOKS = 25  # merges, of which one is looked at


# -- ranks


def bench_ranks(scratch: Path, quick: bool) -> dict[str, Any]:
    return {str(world): _with_ranks(world, scratch, 2 if quick else _SAVES) for world in WORLDS}


def _with_ranks(world: int, scratch: Path, saves: int) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    root = Path(tempfile.mkdtemp(dir=scratch))
    ranks = [context.Process(target=_as_rank, args=(rank, world, str(root), saves, answers)) for rank in range(world)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(900)
    if any(rank.exitcode != 0 for rank in ranks):
        raise RuntimeError(f"with {world} ranks, they ended with {[rank.exitcode for rank in ranks]}")
    found: dict[str, Any] = answers.get(timeout=10)
    return found


def _as_rank(rank: int, world: int, root: str, saves: int, answers: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{root}/store", world), rank=rank, world_size=world)
    torch.manual_seed(0)
    layers = [nn.Linear(512, 2048), nn.Tanh(), nn.Linear(2048, 512), nn.Tanh()] * 2
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers))
    torch.manual_seed(rank)  # ranks see other samples, or they would choose the same entries
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    directory, unions = Path(root) / "run", _count_unions()
    run = everstep.guard(model, optimizer, dir=directory, strategy="log", compress=compress.TopK(RATIO), linger="1s")
    seen: set[int] = set()
    go_on = torch.ones(1)
    while go_on.item() and run.step < _MOST_STEPS:
        for _ in range(_TOGETHER):
            model(torch.randn(8, 512)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            run.done()
            seen |= set(values_steps(DiskTier(directory))) if rank == 0 else set()
        go_on.fill_(len(seen) < saves)
        dist.broadcast(go_on, 0)
    run.wait("durable")
    dist.barrier()
    if rank == 0:
        answers.put(_left(directory, world, sum(p.numel() for p in model.parameters()), sorted(seen), unions))
        answers.close()
        answers.join_thread()
    dist.barrier()
    run.close()
    dist.destroy_process_group()


def _count_unions() -> list[float]:
    """From now on: how many entries all ranks together sent, over those that are kept, in some of the merges."""
    found: list[float] = []
    merge, calls = compress._merge, 0

    def counted(indices: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal calls
        calls += 1
        if calls % _LOOKS == 0:
            found.append(indices.unique().numel() / indices.shape[1])
        return merge(indices, values)

    compress._merge = counted
    return found


def _left(directory: Path, world: int, parameters: int, seen: list[int], unions: list[float]) -> dict[str, Any]:
    tier = DiskTier(directory)
    logs = [log for rank in range(world) if (log := newest_log(tier, rank)) is not None]
    packed = [p for log in logs if log.layout is not None for p in log.layout.pieces if p.name.startswith(PACKED)]
    gaps = sum(stored for log in logs for _, _, stored in log.records[-1].frame.gaps)
    indices = sum(piece.length for piece in packed if piece.name.endswith(".indices"))
    return {
        **sizes(directory, world), "parameters": parameters, "packed": sum(piece.length for piece in packed),
        "indices": indices, "gaps": gaps, "union": statistics.median(unions) if unions else 1.0,
        "saves": seen, "apart": (seen[-1] - seen[0]) / (len(seen) - 1), "rule": steps_between_values(directory),
    }  # fmt: skip


def ranks_report(report: Report, found: dict[str, Any]) -> None:
    table = Table(
        "Bytes a step of TopK(0.01), over all ranks",
        ["ranks", "sent by all ranks", "packed kB", "with gaps kB", "own of each rank kB", "records kB",
         "of an Adam checkpoint", "steps between saves", "residuals kB", "with residuals"],
        note=f"DDP over gloo, {found['1']['parameters'] / MB:.1f}M parameters. Sent by all ranks: the union of what "
        "they chose, over the entries that are kept, which are as many as one rank chose. Packed: their indices and "
        "values; with gaps: the same as it lies in the log. Own of each rank: its random state, scalars, frame and "
        "padding, which are as large beside a model of any size. Records: all of this on the disk. Residuals are state "
        "of each rank: one save of all of them, over the steps that were seen between two saves (in brackets: by the "
        "rule).",
    )  # fmt: skip
    shares = {}
    for world, row in found.items():
        whole, values = ADAM_BYTES * row["parameters"], row["values"] / row["apart"]
        shares[world] = row["record"] / whole, (row["record"] + values) / whole
        gradient = row["packed"] - row["indices"] + row["gaps"]
        table.rows.append([
            world, f"{row['union']:.2f}x", f"{row['packed'] / 1e3:.1f}", f"{gradient / 1e3:.1f}",
            f"{(row['record'] - gradient) / int(world) / 1e3:.1f}", f"{row['record'] / 1e3:.1f}",
            f"{shares[world][0]:.2%}", f"{row['apart']:.0f} ({row['rule']})", f"{values / 1e3:.1f}",
            f"{shares[world][1]:.2%}",
        ])  # fmt: skip
    report.tables.append(table)
    report.targets += [
        Target(f"bytes a step, two ranks, {what}", "<= 1.2 % of an Adam checkpoint", f"{part:.2%}", part <= 0.012)
        for what, part in zip(("records", "records and residuals"), shares["2"], strict=True)
    ]
    several = {world: row for world, row in found.items() if world != "1"}  # of one, the ring may decide
    report.targets += [
        _growth("packed bytes", {world: row["packed"] for world, row in found.items()}),
        _growth("residuals a step", {world: row["values"] / row["apart"] for world, row in several.items()}),
        _growth("records and residuals", {world: share for world, (_, share) in shares.items()}),
    ]


def _growth(what: str, by_world: dict[str, float]) -> Target:
    few, many = (f(by_world, key=int) for f in (min, max))
    grown = by_world[many] / by_world[few]
    return Target(f"{what}, {many} ranks against {few}", "1x", f"{grown:.2f}x", grown <= 1.05)


# -- gaps


def bench_gaps(scratch: Path, quick: bool) -> dict[str, Any]:
    return {str(ratio): _gaps(ratio, 10 if quick else 50) for ratio in (0.05, 0.01, 0.001)}


def _gaps(ratio: float, rounds: int) -> dict[str, float]:
    """A million indices at random, written and read in one thread."""
    count = 1_000_000
    chosen = np.random.default_rng(0).choice(int(count / ratio), count, replace=False)
    indices = np.sort(chosen).astype(np.int32)
    data, took = indices.data.cast("B"), {"write_s": list[float](), "read_s": list[float]()}
    stored = b""
    for _ in range(rounds):
        began = time.process_time()
        stored = to_gaps(data, 4) or b""
        between = time.process_time()
        again = from_gaps(memoryview(stored), 4, len(data))
        took["write_s"].append(between - began)
        took["read_s"].append(time.process_time() - between)
        assert again == data
    return {"bytes": len(stored) / count, **{what: statistics.median(some) for what, some in took.items()}}


def gaps_report(report: Report, found: dict[str, Any]) -> None:
    table = Table(
        "Indices as gaps: a million of them",
        ["ratio", "bytes each", "writing, ms of a processor", "reading, ms of a processor"],
        note="Indices drawn at random, 4 bytes each as they are packed. The keeper writes, off the training path; "
        "recovery reads. Medians.",
    )
    for ratio, row in found.items():
        times = [f"{row[what] * 1e3:.1f}" for what in ("write_s", "read_s")]
        table.rows.append([ratio, f"{row['bytes']:.3f}", *times])
    report.tables.append(table)
