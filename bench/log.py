"""What it costs to have every step: speed, size and recovery of the log.

    python bench/log.py [--quick] [--only durable,ranks,gaps,recovery] [--out DIR] [--scratch DIR]      on a CPU
    python bench/log.py --gpu [--quick] [--only gpt2,bert] [--budget S]                            on one CUDA device

Blocks of steps take turns in one process (bench/log_turns.py), so every ratio comes from one run.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, get_args

import gpu_models
import log_gpu
import torch
from common import MB, Report, Stat, Table, Target, machine, timed
from log_gpu import RATIO
from log_peers import CheckFreq, Differences, TorchSave
from log_ranks import bench_gaps, bench_ranks, gaps_report, ranks_report
from log_recovery import bench_recovery, recovery_report
from log_turns import (
    Loop,
    Turns,
    Watched,
    Way,
    over,
    sizes,
    steps_between_values,
    take_turns,
    troubles,
)

import everstep
from everstep.capture.compress import TopK
from everstep.config import Strategy

HERE = Path(__file__).parent
PARTS = ("durable", "ranks", "gaps", "recovery")
PLAIN, ALONE = "plain", "TopK(0.01), not kept"
DENSE, PACKED_LOG, REPLICA = "Everstep, dense log", "Everstep, log of TopK(0.01)", "Everstep, replica"
SNAPSHOT = "Everstep, snapshot on disk each step"
BLOCK = 6  # steps


# -- part: every step durable


def bench_durable(scratch: Path, quick: bool) -> dict[str, Any]:
    rounds, width = (2, 192) if quick else (3, 384)
    found = _peers(width, scratch, rounds)
    disk = [everstep.Disk(every=1)]
    found |= _guarded(SNAPSHOT, width, scratch, rounds, strategy="snapshot", tiers=disk)
    found |= _guarded(DENSE, width, scratch, 4 * rounds, strategy="log")
    found |= _guarded(PACKED_LOG, width, scratch, rounds, strategy="log", compress=TopK(RATIO))
    if "replica" in get_args(Strategy):
        found |= _guarded(REPLICA, width, scratch, 4 * rounds, strategy="replica")
    return {"parameters": Loop(width).parameters, "rows": found}


def _peers(width: int, scratch: Path, rounds: int) -> dict[str, Any]:
    loop = Loop(width)
    root = Path(tempfile.mkdtemp(dir=scratch))
    whole, frequent = (kind(loop.model, loop.optimizer, root) for kind in (TorchSave, CheckFreq))
    naive = Differences(loop.model, loop.optimizer, root, RATIO)
    ways = {
        PLAIN: Way(),
        "torch.save each step": Way(whole.done),
        "CheckFreq's way": Way(frequent.done, before=frequent.gate, behind=frequent.behind, settle=frequent.settle),
        "naive differences": Way(naive.done, settle=naive.settle),
    }
    for _ in range(3):
        loop.step()
    turns = take_turns(ways, loop.step, loop.optimizer, rounds=rounds, steps=BLOCK)
    sizes_ = {"torch.save each step": whole.bytes, "CheckFreq's way": frequent.bytes, "naive differences": naive.bytes}
    return {name: _row(turns, name, PLAIN, sizes_[name]) for name in ways if name != PLAIN}


def _guarded(name: str, width: int, scratch: Path, rounds: int, **options: Any) -> dict[str, Any]:
    loop = Loop(width)
    directory = Path(tempfile.mkdtemp(dir=scratch)) / "run"
    run = loop.guard(directory, **options)
    watched = Watched(run)
    try:
        watched.warm_up(loop.step)
        ways = {PLAIN: Way()}
        half = steps_between_values(directory) if run._keeping.compression is not None else 0
        if run._keeping.compression is not None:
            ways[ALONE] = Way(run._keeping.compression.end_step, hooks=(run._keeping.compression,))
        level = "sealed" if half else "durable"  # residuals come to the disk now and then
        ways[name] = Way(watched.done, hooks=None, behind=watched.behind, settle=partial(run.wait, level))
        if half:  # as many blocks as it takes to come to a save of them
            rounds = -(-(half + 2) // BLOCK)
        turns = take_turns(ways, loop.step, loop.optimizer, rounds=rounds, steps=BLOCK)
        status: Any = run.status()
        run.wait("durable")
        size = sizes(directory)
    finally:
        run.close()
    per_base = status["steps_per_base"]
    each = size["base"]
    if per_base:
        each = size["record"] + size["values"] / max(1, half) + size["base"] / per_base
    row = _row(turns, name, PLAIN, each)
    row |= {"missed": watched.missed, "troubles": troubles(directory), "replica": status.get("replica")}
    row |= {
        "values_apart": half,
        "steps_per_base": per_base,
        "record_bytes": size["record"],
        "values_bytes": size["values"],
    }
    if half:
        row["over_alone"] = over(turns, name, ALONE).values
        return {ALONE: _row(turns, ALONE, PLAIN, 0.0), name: row}
    return {name: row}


def _row(turns: dict[str, Turns], name: str, base: str, size: float) -> dict[str, Any]:
    return {**asdict(turns[name]), "plain_s": turns[base].step_s, "over": over(turns, name, base).values, "bytes": size}


# -- what is said about it


def durable_report(report: Report, found: dict[str, Any]) -> None:
    rows = found["rows"]
    table = Table(
        f"Every step durable: a GPT with {found['parameters'] / MB:.1f}M parameters, AdamW",
        ["way", "ms/step", "plain ms/step", "overhead", "steps behind the disk", "MB a step", "remarks"],
        note=_DURABLE_NOTE,
    )
    for name, row in rows.items():
        table.rows.append([
            name, Stat(row["step_s"]).text(1e3), Stat(row["plain_s"]).text(1e3), Stat(row["over"]).text(100) + " %",
            Stat(row["behind"]).text(), f"{row['bytes'] / MB:.3g}", _remarks(row),
        ])  # fmt: skip
    report.tables.append(table)
    packed = rows[PACKED_LOG]
    own, whole = Stat(packed["over_alone"]), Stat(packed["over"])
    times = 1 + Stat(rows["torch.save each step"]["over"]).median
    report.targets += [
        Target("log of TopK(0.01), over the compressor alone", "<= 3 %", own.text(100) + " %", own.median <= 0.03),
        Target("log of TopK(0.01), over plain", "none set", whole.text(100) + " %", None),
        Target("torch.save each step", "multiplies the step", f"{times:.2f}x", None),
    ]


_DURABLE_NOTE = (
    f"Blocks of {BLOCK} steps take turns with plain ones on the same model in one process; the peers share theirs, "
    "each way of Everstep has its own. A plain block has no hook of Everstep on the optimizer. Means over a block, "
    "medians and spread over blocks; overhead is over the plain block of the same round. Steps behind the disk: at "
    "the end of a block, before anything is waited for. torch.save and CheckFreq's way keep one file; naive "
    "differences are the largest hundredth of what changed in parameters and moments, and cannot be recovered exactly. "
    "MB a step of "
    "Everstep: a record, one save of residuals over the steps between two, and a base over the steps "
    "between two; for the snapshot, one of them. Fresh tokens each step, denormals flushed."
)


def _remarks(row: dict[str, Any]) -> str:
    said = []
    if "over_alone" in row:
        said.append(
            f"{Stat(row['over_alone']).text(100)} % over the compressor alone; residuals are saved every "
            f"{row['values_apart']} steps, so up to as many behind"
        )
    if row.get("replica"):
        replica = row["replica"]
        said.append(f"{replica['behind']} steps stale, {replica['cpu_s_per_step'] * 1e3:.1f} ms of CPU a step")
    if row.get("missed"):
        said.append(f"{row['missed']} steps without a record")
    return "; ".join(said + row.get("troubles", []))


# -- door


def run_cpu(given: argparse.Namespace, report: Report) -> None:
    torch.set_flush_denormal(True)
    wanted = [part for part in PARTS if not given.only or part in given.only.split(",")]
    parts: dict[str, tuple[Callable[..., Any], Callable[..., None]]] = {
        "durable": (bench_durable, durable_report), "ranks": (bench_ranks, ranks_report),
        "gaps": (bench_gaps, gaps_report), "recovery": (bench_recovery, recovery_report),
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="everstep-bench-", dir=given.scratch, ignore_cleanup_errors=True) as folder:
        for part in wanted:
            with timed() as timer:
                report.data[part] = parts[part][0](Path(folder), given.quick)
            print(f"{part}: {timer.seconds:.0f} s", file=sys.stderr, flush=True)
            parts[part][1](report, report.data[part])


def run_gpu(given: argparse.Namespace, report: Report) -> None:
    gpu_models.DEVICE = given.device
    names = [name for name in log_gpu.KINDS if not given.only or name in given.only.split(",")]
    kinds = {name: [kind for kind in log_gpu.KINDS[name] if not given.kind or kind == given.kind] for name in names}
    with tempfile.TemporaryDirectory(prefix="everstep-bench-", dir=given.scratch, ignore_cleanup_errors=True) as folder:
        data = log_gpu.bench(kinds, Path(folder), 3 if given.quick else 6, given.budget)
    log_gpu.report_on(report, data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="the part for one CUDA device")
    parser.add_argument("--quick", action="store_true", help="few blocks, and smaller models on a CPU")
    parser.add_argument(
        "--only", default="", help=f"some of {', '.join(PARTS)}; with --gpu, of {', '.join(log_gpu.KINDS)}"
    )
    parser.add_argument("--kind", default="", help="--gpu: dense or topk alone")
    parser.add_argument("--budget", type=float, default=180.0, help="--gpu: seconds after which nothing new begins")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--scratch", type=Path, default=None, help="a directory on the disk to write to")
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)  # cpu: a stand-in, to try the code
    given = parser.parse_args()
    if given.gpu and given.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("bench/log.py --gpu needs a CUDA device, and torch sees none here.")
    where = "one GPU" if given.gpu else "a CPU"
    command = " ".join(["python bench/log.py", *itertools.takewhile(lambda word: word != "--out", sys.argv[1:])])
    report = Report(title=f"Every step by the log, on {where}", command=command, machine=machine())
    (run_gpu if given.gpu else run_cpu)(given, report)
    parts = given.only.replace(",", "-") if given.only and not given.gpu else ""  # beside the whole, not over it
    report.save(given.out, "-".join(filter(None, ("log-gpu" if given.gpu else "log-cpu", parts))))
    print(report.markdown())


if __name__ == "__main__":
    main()
