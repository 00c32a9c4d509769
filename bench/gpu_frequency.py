"""How often can be saved, and what every step costs: all methods on all models. The door is bench/gpu.py frequency.

For each method the overhead at every step is measured first. If that is over 5 %, longer intervals are run, the first
of them where the cost of one save says that it should be, until one is good and a fifth less is not; none is computed.
"""

from __future__ import annotations

import gc
import mmap
import shutil
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass, field
from math import ceil
from pathlib import Path
from typing import Any

import gpu_models
import torch
from common import MB, Report, Stat, Table, Target
from gpu_methods import OTHERS, OURS, DenseLog, Everstep, Kept, Method, Replica, TopKLog
from gpu_models import Case, link_bytes_s, make_case
from peers import raw_write

MOST = 0.05  # of the time, that a method may cost
BLOCK_S = 0.8
RUNS = 6  # of one method on one model, at most
CLOSE = 0.8  # a fifth shorter than the shortest that is good is not looked for
LIGHTCHECK = {
    "resnet18": 1,
    "vgg16": 6,
    "inception": 14,
    "alexnet": 8,
    "gpt2": 6,
    "bert": 10,
}  # V100, Optane; published
PROTOTYPE = {"resnet18": 0.1, "vgg16": 1.8, "inception": 0.0, "alexnet": 2.3, "gpt2": 0.8}  # per cent, this device
METHODS = {method.name: method for method in (*OURS, *OTHERS)}
FIXED = (DenseLog, TopKLog, Replica)  # a chain has no gaps: there is no other interval


@dataclass
class Run:
    """One method on one model at one interval."""

    interval: int
    plain_s: list[float] = field(default_factory=list)  # a step, per block
    kept_s: list[float] = field(default_factory=list)
    unsynced_s: list[float] = field(default_factory=list)  # the same, less what went into being durable
    kept: dict[str, Any] = field(default_factory=dict)

    def overhead(self, *, durable: bool = True) -> Stat:
        seconds = self.kept_s if durable else self.unsynced_s
        return Stat([on / off - 1 for on, off in zip(seconds, self.plain_s, strict=True)])

    @property
    def found(self) -> Kept:
        return Kept(**self.kept)

    def apart(self, *, durable: bool = False) -> float:
        """Steps from one that was kept, or is on the disk, to the next."""
        found = self.found
        number = found.durable if durable else found.kept
        return found.steps / number if number else float("inf")


@dataclass
class Cell:
    """One method on one model: all runs, as they were made."""

    runs: list[Run] = field(default_factory=list)
    error: str = ""
    longest: bool = False  # longer intervals would have taken more time than there was

    def best(self, *, durable: bool = False) -> Run | None:
        """The shortest interval that costs little enough, if one was found."""
        good = [run for run in self.runs if run.overhead(durable=durable).median <= MOST]
        return min(good, key=lambda run: run.apart(durable=durable)) if good else None


def measure(case: Case, method: type[Method], interval: int, step_s: float, pairs: int) -> Run:
    root = Path(tempfile.mkdtemp(prefix="everstep-bench-", dir=_scratch))
    run = Run(interval)
    try:
        way = method(case, root, interval)
        try:
            period_s = interval * (way.block(2 * interval) if interval * step_s < BLOCK_S else step_s)
            steps = interval * max(1, min(60, round(BLOCK_S / period_s)))
            for pair in range(pairs if period_s < 2 * BLOCK_S else 1):
                for kept in (pair % 2 == 0, pair % 2 == 1):
                    if kept:
                        run.kept_s.append(way.block(steps))
                        run.unsynced_s.append(run.kept_s[-1] - way.sync_s)
                    else:
                        run.plain_s.append(way.plain(max(5, min(60, round(BLOCK_S / step_s)))))
        finally:
            run.kept = asdict(way.close())
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return run


_scratch: Path | None = None  # where the disk is


def bench_cell(case: Case, method: type[Method], step_s: float, pairs: int, longest_s: float) -> Cell:
    """Overhead at every step, then the shortest interval that costs little enough."""
    cell = Cell()
    too_short, good, interval = 0, 0, 1
    longest = max(2, int(longest_s / step_s))
    while len(cell.runs) < RUNS:
        run = measure(case, method, interval, step_s, pairs)
        cell.runs.append(run)
        cost = run.overhead(durable=False).median
        if cost <= MOST:
            good = interval
        else:
            too_short = interval
        cell.longest = not good and too_short >= longest
        if method in FIXED or cell.longest or (good and good <= too_short / CLOSE + 1):
            break
        if good:
            interval = min(max(too_short + 1, round(CLOSE * good)), good - 1)
        elif method.overlaps and len(cell.runs) == 1:
            interval = ceil(1.2 * (1 + cost))  # as many steps as one save takes
        else:
            interval = max(too_short + 1, ceil(1.03 * interval * cost / MOST))
        interval = min(interval, longest)
    return cell


def bench_frequency(
    names: list[str], methods: list[str], scratch: Path, *, pairs: int, longest_s: float, budget_s: float
) -> dict[str, Any]:
    global _scratch
    _scratch = scratch
    deadline = time.monotonic() + budget_s
    on_device = gpu_models.DEVICE == "cuda"
    data: dict[str, Any] = {"link_bytes_s": link_bytes_s() if on_device else 0.0, "models": {}}
    data["disk_bytes_s"] = _disk_bytes_s(scratch, 2**30 if on_device else 2**26)
    print(f"link {data['link_bytes_s'] / 1e9:.1f} GB/s, disk {data['disk_bytes_s'] / 1e9:.2f} GB/s", flush=True)
    for name in names:
        case = make_case(name)
        torch.backends.cudnn.benchmark = True
        step_s = _step_seconds(case)
        entry: dict[str, Any] = {"title": case.title, "step_s": step_s, "cells": {}}
        data["models"][name] = entry
        for method in methods:
            cell = Cell(error="no time was left")
            began = time.monotonic()
            if began < deadline:
                try:
                    cell = bench_cell(case, METHODS[method], step_s, pairs, longest_s)
                except Exception as error:
                    traceback.print_exc()
                    cell = Cell(error=f"{type(error).__name__}: {error}".splitlines()[0][:200])
            entry["cells"][method] = asdict(cell)
            print(f"{case.title:34} {method:34} {time.monotonic() - began:5.1f} s  {_line(cell)}", flush=True)
            gc.collect()
        del case
        gc.collect()
        if on_device:
            torch.cuda.empty_cache()
    return data


def _disk_bytes_s(scratch: Path, size: int) -> float:
    data = memoryview(mmap.mmap(-1, size))
    rates = []
    for at in range(3):
        rates.append(size / raw_write(scratch / f"raw-{at}", data))
        (scratch / f"raw-{at}").unlink()
    return max(rates)


def _step_seconds(case: Case) -> float:
    for _ in range(5):
        case.step()
    gpu_models.sync()
    began = time.perf_counter()
    for _ in range(8):
        case.step()
    gpu_models.sync()
    return (time.perf_counter() - began) / 8


def _line(cell: Cell) -> str:
    if cell.error:
        return cell.error
    runs = "; ".join(f"every {run.interval}: {run.overhead().text(100, 2)} %" for run in cell.runs)
    first = cell.runs[0].found
    return f"{runs}; kept {first.kept} of {first.steps}, durable {first.durable}; {'; '.join(first.troubles)}"


# -- what is said about it


def frequency_report(report: Report, data: dict[str, Any]) -> None:
    report.data = data
    models = {name: (entry, _cells(entry)) for name, entry in data["models"].items()}
    methods = list(dict.fromkeys(method for _, cells in models.values() for method in cells))
    report.tables += [
        _interval_table(models, methods, data["disk_bytes_s"], durable=False),
        _interval_table(models, methods, data["disk_bytes_s"], durable=True),
        _every_step_table(models, methods, data["link_bytes_s"]),
    ]
    for name, (entry, cells) in models.items():
        ours = {m: cell.best() for m, cell in cells.items() if issubclass(METHODS[m], Everstep) and not cell.error}
        found = {m: run.apart() for m, run in ours.items() if run is not None}
        least = min(found, key=lambda m: found[m], default="")
        report.targets.append(
            Target(
                f"{entry['title']}: steps between two that survive the process, at 5 %", "1",
                f"{found[least]:.3g} ({least})" if least else "none", bool(least) and found[least] <= 1.01,
            )
        )  # fmt: skip
        report.targets.append(_overhead_target(name, entry, cells, data["link_bytes_s"]))


def _overhead_target(name: str, entry: dict[str, Any], cells: dict[str, Cell], link: float) -> Target:
    host = cells.get("Everstep, host", Cell(error="not run"))
    if host.error or not link:
        return Target(f"{entry['title']}: every step", "<= 1 %", host.error or "no device", None)
    state = host.runs[0].found.bytes_moved
    fits = state / link <= 0.8 * entry["step_s"]
    over = {m: cells[m].runs[0] for m in cells if issubclass(METHODS[m], Everstep) and not cells[m].error}
    whole = {m: run.overhead().median for m, run in over.items() if run.apart() <= 1.01}
    least = min(whole, key=lambda m: whole[m], default="")
    wanted = 0.01 if fits else 0.03
    said = f"host {host.runs[0].overhead().median:.1%}" + (f", {least} {whole[least]:.1%}" if least else "")
    if name in PROTOTYPE:
        said += f"; a prototype {PROTOTYPE[name]} %"
    what = "<= 1 %" if fits else "<= 3 % by the log: the link is too slow for the whole"
    return Target(f"{entry['title']}: every step", what, said, bool(least) and whole[least] <= wanted)


def _cells(entry: dict[str, Any]) -> dict[str, Cell]:
    return {
        method: Cell([Run(**run) for run in cell["runs"]], cell["error"], cell["longest"])
        for method, cell in entry["cells"].items()
    }


def _interval_table(
    models: dict[str, tuple[dict[str, Any], dict[str, Cell]]], methods: list[str], disk: float, *, durable: bool
) -> Table:
    what = "on the disk and synced" if durable else "kept"
    table = Table(
        f"Steps from one that is {what} to the next, at 5 % or less",
        ["method", *(entry["title"].split(",")[0] for entry, _ in models.values())],
        note=(
            "Only what is on the disk and synced counts; Everstep's is checked as it is written. "
            if durable
            else "Everstep's survives the process (mode disk, the log and the replica: the machine, too); the others' "
            "is in a file. torch.save without its fsync. LightCheck's row is what it published, on a V100 with Optane. "
        )
        + "The shortest interval whose run cost at most 5 %, to a fifth, with that cost; `> n`: every n steps cost "
        f"more. The disk takes {disk / 1e9:.2f} GB/s (O_DIRECT, four threads).",
    )  # fmt: skip
    for method in methods:
        cells = [cells.get(method, Cell(error="-")) for _, cells in models.values()]
        table.rows.append([method, *(_interval(cell, durable=durable) for cell in cells)])
    if not durable:
        table.rows.append(["LightCheck, published", *(str(LIGHTCHECK.get(name, "-")) for name in models)])
    return table


def _interval(cell: Cell, *, durable: bool) -> str:
    if cell.error:
        return cell.error
    best = cell.best(durable=durable)
    if best is None:
        last = max(cell.runs, key=lambda run: run.interval)
        return f"> {last.interval} ({last.overhead(durable=durable).median:.1%})"
    apart = best.apart(durable=durable)
    shown = "none" if apart == float("inf") else f"{apart:.3g}"
    return f"{shown} ({best.overhead(durable=durable).median:.1%})"


def _every_step_table(
    models: dict[str, tuple[dict[str, Any], dict[str, Cell]]], methods: list[str], link: float
) -> Table:
    table = Table(
        "Every step",
        ["model", "ms/step", "method", "overhead %", "MB off the device", "MB written", "kept", "call ms", "remarks"],
        note="bf16 autocast. Overhead: median over pairs of neighbouring blocks with and without, lowest and highest, "
        f"by events on the stream of training; the log of top-k over training that compresses. The link moves "
        f"{link / 1e9:.1f} GB/s. Bytes: of one step that is kept. call: what the loop itself calls, median.",
    )  # fmt: skip
    for entry, cells in models.values():
        for method in methods:
            cell = cells.get(method)
            if cell is None or cell.error or not cell.runs:
                table.rows.append([entry["title"], "-", method, *["-"] * 5, cell.error if cell else ""])
                continue
            run = cell.runs[0]
            found = run.found
            table.rows.append([
                entry["title"], f"{Stat(run.plain_s).median * 1e3:.1f}", method, run.overhead().text(100, 2),
                f"{found.bytes_moved / MB:.0f}", f"{found.bytes_written / MB:.0f}", f"{found.kept} of {found.steps}",
                f"{Stat(found.done_s).median * 1e3:.2f}" if found.done_s else "-", "; ".join(found.troubles),
            ])  # fmt: skip
    return table
