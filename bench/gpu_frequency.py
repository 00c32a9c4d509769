"""How often can be saved, what every step costs, how busy the device is: all methods on all models.

The door is bench/gpu.py frequency.

For each method the overhead at every step is measured first. If that is over 5 %, longer intervals are run, the first
of them where the cost of one save says that it should be, until one is good and a fifth less is not; none is computed.
"""

from __future__ import annotations

import mmap
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import accumulate
from math import ceil
from pathlib import Path
from typing import Any

import gpu_models
import torch
from common import MB, Report, Stat, Table, Target
from gpu_merge import LEFT_OUT, each, one_line
from gpu_methods import IN_MEMORY, RING_S, DenseLog, Everstep, Host, Kept, Method, Replica, TopKLog, timed_steps
from gpu_models import CASES, let_go, link_bytes_s, make_case
from gpu_utilisation import WATCHED, Sampler, busy_table, make_sampler, watched
from gpu_ways import METHODS, SPARED, Overrun, Ways, limited, step_seconds, why_left_out
from peers import raw_write

MOST = 0.05  # of the time, that a method may cost
BLOCK_S, PLAIN_S, PAIRS = 0.4, 0.3, 3  # of blocks with and without
PAIRED_S = 1.5  # a block that has to be longer than this is the only one
RUNS = 6  # of one method on one model, at most
CELL_S, LARGE_CELL_S = 9.5, 19.0  # of runs, after which a method gets no further one on a model,
LARGE = ("gpt2-xl",)  # or on one of these, where one save takes longer than that
LONGEST_S = 6.0  # of training between two saves, unless told
# Each has its time, more of it if intervals may be longer, and what those before it have left: who was seen to leave
# most comes first, and last who needs more on a slow machine.
MODELS_S = {
    "gpt2-xl": 340.0, "resnet18": 75.0, "inception": 75.0, "alexnet": 75.0, "vgg16": 90.0, "gpt2": 160.0, "bert": 150.0
}  # fmt: skip
GRACE_S = 20.0  # that the last method of a model may take longer, before it is ended
# Of a large model, as much as its time is enough for; who writes comes before who does not, since removing takes long.
LARGE_ORDER = ("Everstep, dense", "Everstep, host", "Everstep, log", "Everstep, device", "Everstep, disk", "torch.save")
CLOSE = 0.8  # a fifth shorter than the shortest that is good is not looked for
LIGHTCHECK = {
    "resnet18": 1,
    "vgg16": 6,
    "inception": 14,
    "alexnet": 8,
    "gpt2": 6,
    "bert": 10,
}  # V100, Optane; published
LOG_MOST = {"gpt2": {DenseLog.name: 0.01, TopKLog.name: 0.005}}  # of the time
FIXED = (DenseLog, TopKLog, Replica)  # a chain has no gaps: there is no other interval


@dataclass
class Run:
    """One method on one model at one interval."""

    interval: int
    plain_s: list[float] = field(default_factory=list)  # a step, per block
    kept_s: list[float] = field(default_factory=list)
    unsynced_s: list[float] = field(default_factory=list)  # the same, less what went into being durable
    kept: dict[str, Any] = field(default_factory=dict)
    date: str = ""  # of the earlier call that made it, if that is not the one of its method

    def overhead(self, *, durable: bool = True) -> Stat:
        seconds = self.kept_s if durable else self.unsynced_s
        return Stat([on / off - 1 for on, off in zip(seconds, self.plain_s, strict=True)])

    @property
    def found(self) -> Kept:
        return Kept(**self.kept)

    def apart(self, *, durable: bool = False) -> float:
        """Steps from one that was kept, or is on the disk, to the next; never less than it was asked for."""
        number = self.number(durable=durable)
        return max(self.interval, self.found.steps / number) if number else float("inf")

    def number(self, *, durable: bool) -> int:
        """How many were kept, or are on the disk."""
        return self.found.durable if durable else self.found.kept


@dataclass
class Cell:
    """One method on one model: all runs, as they were made."""

    runs: list[Run] = field(default_factory=list)
    error: str = ""
    ended: bool = False  # by the limit on its time, before the shortest was known to a fifth
    took_s: float = 0.0
    busy: dict[str, Any] | None = None  # the device, with every step kept, if somebody looked

    def best(self, *, durable: bool = False) -> Run | None:
        """The shortest interval that costs little enough, if one was found."""
        good = [run for run in self.runs if run.overhead(durable=durable).median <= MOST]
        return min(good, key=lambda run: run.apart(durable=durable)) if good else None


def measure(way: Method, interval: int, step_s: float) -> Run:
    """Blocks with and without. One save that takes longer than a block is a block of its own, and the only one."""
    run = Run(interval)
    way.begin(interval)
    plain_steps = max(3, min(60, round(PLAIN_S / step_s)))

    def kept(steps: int) -> float:
        seconds = way.block(steps)
        run.kept_s.append(seconds)
        run.unsynced_s.append(seconds - way.sync_s)
        return seconds

    least, period_s = ceil(3 / interval), interval * step_s  # one step does not show what overlaps with the next
    if way.saves_when_told:
        least, period_s = 1, interval * kept(interval)
    if run.kept_s and period_s >= 2 * BLOCK_S:
        run.plain_s.append(way.plain(plain_steps))
    else:
        run.kept_s, run.unsynced_s = [], []  # it was to learn how long one takes
        steps = interval * max(least, min(60, round(BLOCK_S / period_s)), round(way.least_s / period_s))
        for pair in range(PAIRS if period_s < 2 * BLOCK_S and way.least_s <= PAIRED_S else 1):
            for is_kept in (pair % 2 == 0, pair % 2 == 1):
                if is_kept:
                    kept(steps)
                else:
                    run.plain_s.append(way.plain(plain_steps))
    run.kept = asdict(way.result())
    return run


def bench_cell(ways: Ways, step_s: float, longest_s: float, cell_s: float, sampler: Sampler | None) -> Cell:
    """Overhead at every step, and what `sampler` sees then; then the shortest interval that costs little enough."""
    cell = Cell()
    too_short, good, interval = 0, 0, 1
    longest = max(2, int(longest_s / step_s))
    began = time.monotonic()
    while len(cell.runs) < RUNS:
        before = time.monotonic()
        way = ways.at(interval)
        made_s = time.monotonic() - before
        began += made_s  # its time is that of runs
        run = measure(way, interval, step_s)
        cell.runs.append(run)
        took_s = time.monotonic() - before - (made_s if way.goes_on(interval) else 0.0)
        if sampler is not None and interval == 1:
            looked = time.monotonic()
            cell.busy = watched(way.case, way.block, Stat(run.kept_s).median, sampler)
            began += time.monotonic() - looked
        cost = run.overhead(durable=False).median
        if cost <= MOST:
            good = interval
        else:
            too_short = interval
        if ways.method in FIXED or (good and good <= too_short / CLOSE + 1):
            break
        if good:
            interval = min(max(too_short + 1, round(CLOSE * good)), good - 1)
        elif ways.method.overlaps and len(cell.runs) == 1:
            interval = ceil(1.2 * (1 + cost))  # as many steps as one save takes
        else:
            interval = max(too_short + 1, ceil(1.03 * interval * cost / MOST))
        next_s = max(interval - run.interval, 0) * step_s + took_s
        if interval > longest or time.monotonic() - began + next_s > cell_s:
            cell.ended = True
            break
    return cell


def bench_frequency(
    plan: dict[str, list[str]], scratch: Path, *, longest_s: float, deadline: float, spares: bool
) -> Iterator[tuple[str, Any]]:
    """Each model's entry again and again, as it grows by one method after another. `spares`: time, on large ones."""

    on_device = gpu_models.DEVICE == "cuda"
    limits = {"link_bytes_s": link_bytes_s() if on_device else 0.0}
    limits["disk_bytes_s"] = _disk_bytes_s(scratch, 2**30 if on_device else 2**26)
    print(f"link {limits['link_bytes_s'] / 1e9:.1f} GB/s, disk {limits['disk_bytes_s'] / 1e9:.2f} GB/s", flush=True)

    sampler = make_sampler(scratch) if set(plan) & set(WATCHED) else None
    ends = ends_of(list(plan), longest_s, time.monotonic(), deadline)

    def one(name: str) -> Iterator[dict[str, Any]]:
        end = ends[name]
        if time.monotonic() > end:
            raise TimeoutError("no time was left for it")
        case = make_case(name)
        torch.backends.cudnn.benchmark = True
        step_s = step_seconds(case)
        entry: dict[str, Any] = {"title": case.title, "step_s": step_s, **limits, "cells": {}}
        looks = sampler if name in WATCHED else None
        if looks is not None:
            busy = watched(case, partial(timed_steps, case), step_s, looks)
            entry |= {"busy": busy} if busy is not None else {}
        cell_s = max(LARGE_CELL_S if name in LARGE else CELL_S, 1.5 * longest_s)
        for method in ordered(name, plan[name]):
            began = time.monotonic()
            reason = SPARED.get(name, {}).get(method, "") if spares else ""
            if reason:
                reason = LEFT_OUT + reason  # which takes no time, and so is said when there is none
            elif began > end:
                raise TimeoutError(f"no time was left for {method} and what comes after it")
            else:
                reason = why_left_out(case, METHODS[method], scratch)
                if reason:
                    Ways.until_removed()  # what the method before has left may be all that is in the way
                    reason = why_left_out(case, METHODS[method], scratch)
            if reason:
                cell = Cell(error=reason)
            else:
                with limited(end + GRACE_S - began):
                    cell = _tried(Ways(case, METHODS[method], scratch), step_s, longest_s, cell_s, looks)
            cell.took_s = time.monotonic() - began
            entry["cells"][method] = asdict(cell)
            print(f"{case.title:34} {method:34} {cell.took_s:5.1f} s  {_line(cell)}", flush=True)
            yield entry
            let_go()

    try:
        for name in plan:
            yield from each(name, one)
            let_go()
    finally:
        if sampler is not None:
            sampler.close()
        Ways.until_removed()


def ends_of(models: list[str], longest_s: float, began: float, deadline: float) -> dict[str, float]:
    """Until when each model may begin measurements: its own time after the end of the one before, used or not."""
    times = (MODELS_S[name] * max(1.0, longest_s / LONGEST_S) for name in models)
    ends = list(accumulate(times, initial=began))[1:]
    return {name: min(deadline, end) for name, end in zip(models, ends, strict=True)}


def ordered(name: str, methods: list[str]) -> list[str]:
    """Of a large model those that matter most come first."""
    places = {word: at for at, word in enumerate(LARGE_ORDER if name in LARGE else ())}
    return sorted(methods, key=lambda m: min((at for w, at in places.items() if m.startswith(w)), default=len(places)))


def _tried(ways: Ways, step_s: float, longest_s: float, cell_s: float, sampler: Sampler | None) -> Cell:
    try:
        return bench_cell(ways, step_s, longest_s, cell_s, sampler)
    except Overrun:
        raise
    except Exception as error:
        traceback.print_exc()
        return Cell(error=one_line(error))
    finally:
        with suppress(Exception):
            ways.close()


def _disk_bytes_s(scratch: Path, size: int) -> float:
    data = memoryview(mmap.mmap(-1, size))
    rates = []
    for at in range(2):
        rates.append(size / raw_write(scratch / f"raw-{at}", data))
        (scratch / f"raw-{at}").unlink()
    return max(rates)


def _line(cell: Cell) -> str:
    if cell.error:
        return cell.error
    runs = "; ".join(f"every {run.interval}: {run.overhead().text(100, 2)} %" for run in cell.runs)
    first = cell.runs[0].found
    return f"{runs}; kept {first.kept} of {first.steps}, durable {first.durable}; {'; '.join(first.troubles)}"


# -- what is said about it

Measured = tuple[dict[str, Any], dict[str, Cell]]  # the entry of a model, and its methods


def frequency_report(report: Report, models: dict[str, Any]) -> None:
    entries = {name: models[name] for name in CASES if "cells" in models.get(name, {})}
    measured = [(entry, _cells(entry)) for entry in entries.values()]
    methods = [name for name in METHODS if any(name in cells for _, cells in measured)]
    report.tables += [
        _interval_table(measured, methods, durable=False),
        _interval_table(measured, [m for m in methods if METHODS[m] not in (*IN_MEMORY, TopKLog)], durable=True),
        _every_step_table(measured, methods),
    ]
    busy = busy_table(models)
    report.tables += [busy] if busy is not None else []
    report.tables[0].rows.append(["LightCheck, published", *(str(LIGHTCHECK.get(name, "-")) for name in entries)])
    for name, (entry, cells) in zip(entries, measured, strict=True):
        ours = {m: cell.best() for m, cell in cells.items() if issubclass(METHODS[m], Everstep) and not cell.error}
        found = {m: run.apart() for m, run in ours.items() if run is not None}
        least = min(found, key=lambda m: found[m], default="")
        report.targets.append(
            Target(
                f"{entry['title']}: steps between two that survive the process, at 5 %", "1",
                f"{found[least]:.3g} ({least})" if least else "none", bool(least) and found[least] <= 1.01,
            )
        )  # fmt: skip
        report.targets.append(_overhead_target(entry, cells))
        report.targets += [
            _log_target(entry, m, cells[m], most) for m, most in LOG_MOST.get(name, {}).items() if m in cells
        ]


def _log_target(entry: dict[str, Any], method: str, cell: Cell, most: float) -> Target:
    what, wanted = f"{entry['title']}: every step, {method}", f"<= {100 * most:g} %"
    if cell.error:
        return Target(what, wanted, cell.error, None)
    cost = cell.runs[0].overhead()
    return Target(what, wanted, f"{cost.text(100)} %", cost.median <= most)


def _overhead_target(entry: dict[str, Any], cells: dict[str, Cell]) -> Target:
    link, host = entry["link_bytes_s"], cells.get("Everstep, host", Cell(error="not run"))
    if host.error or not link:
        return Target(f"{entry['title']}: every step", "<= 1 %", host.error or "no device", None)
    state = host.runs[0].found.bytes_moved
    fits = state / link <= 0.8 * entry["step_s"]
    ways = (Host,) if fits else (DenseLog, TopKLog)
    over = {m: cells[m].runs[0] for m in cells if METHODS[m] in ways and not cells[m].error}
    whole = {m: run.overhead().median for m, run in over.items() if run.apart() <= 1.01}
    least = min(whole, key=lambda m: whole[m], default="")
    wanted = 0.01 if fits else 0.03
    said = f"host {host.runs[0].overhead().median:.1%}" + (
        f", {least} {whole[least]:.1%}" if least and not fits else ""
    )
    what = "<= 1 %" if fits else "<= 3 % by the log: the link is too slow for the whole"
    return Target(f"{entry['title']}: every step", what, said, bool(least) and whole[least] <= wanted)


def _cells(entry: dict[str, Any]) -> dict[str, Cell]:
    return {
        method: Cell([Run(**run) for run in cell["runs"]], error=cell["error"], ended=cell["ended"])
        for method, cell in entry["cells"].items()
    }


def _interval_table(measured: list[Measured], methods: list[str], *, durable: bool) -> Table:
    disk = Stat([entry["disk_bytes_s"] for entry, _ in measured])
    what = "on the disk and synced" if durable else "kept"
    table = Table(
        f"Steps from one that is {what} to the next, at 5 % or less",
        ["method", *(entry["title"].split(",")[0] for entry, _ in measured)],
        note=(
            "Only what is on the disk and synced counts; Everstep's is checked as it is written. Its modes host, "
            "device and direct write a base an hour here, so they have no row; nor has the log of top-k, whose records "
            "are of use after a reboot only up to a step with saved residuals. Records of the log and the replica "
            f"count if they are there {RING_S:.0f} s after the last block: so short a run fits into their ring, and "
            "whether the disk keeps up with a long one is not said (below: how many steps it was behind). "
            if durable
            else "Kept: with Everstep, what survives the process (which of it is on the disk: the next table); with "
            "others, what is in a file, torch.save without its fsync. LightCheck's row is what it published, on a "
            "V100 with Optane, and was not measured here. "
        )
        + "The shortest interval whose run cost at most 5 %, to a fifth, with that cost: steps divided by those that "
        f"were {what}. `<= n`: there was no time for a shorter interval. `> n`: every n steps cost more than 5 %, and "
        "no longer interval was run, for want of time or because there is none (the log and the replica have every "
        "step or a gap). `k in n`: so many in a run of n steps, too short to see two. `-`: not run. "
        f"The disk takes {disk.text(1e-9)} GB/s (O_DIRECT, four threads).",
    )  # fmt: skip
    for method in methods:
        cells = [cells.get(method, Cell(error="-")) for _, cells in measured]
        table.rows.append([method, *(_interval(cell, durable=durable) for cell in cells)])
    return table


def _interval(cell: Cell, *, durable: bool) -> str:
    if cell.error:
        return cell.error
    best = cell.best(durable=durable)
    if best is None:
        last = max(cell.runs, key=lambda run: run.interval)
        return f"> {last.interval} ({last.overhead(durable=durable).median:.1%})"
    number, steps = best.number(durable=durable), best.found.steps
    if number < 2 and steps >= 2 * best.interval:
        shown = f"{number} in {steps}"
    else:
        apart = best.apart(durable=durable)
        shown = (
            f"{'<= ' if cell.ended and best.interval > 1 else ''}{f'{apart:.3g}' if apart < 1000 else f'{apart:.0f}'}"
        )
    return f"{shown} ({best.overhead(durable=durable).median:.1%})"


def _every_step_table(measured: list[Measured], methods: list[str]) -> Table:
    link = Stat([entry["link_bytes_s"] for entry, _ in measured])
    table = Table(
        "Every step",
        [
            "model", "method", "ms/step without", "overhead %", "200 steps s", "MB off the device", "link ms",
            "MB written", "kept", "call ms", "remarks",
        ],
        note="bf16 autocast. Overhead: median over pairs of neighbouring blocks with and without, lowest and highest, "
        "by events on the stream of training, and a single number where a save takes so long that there was one pair; "
        "the log of top-k over training that compresses. 200 steps: with and without, computed from the medians of "
        "the blocks. Bytes: of one step that is kept; link ms: what they take at least, at "
        f"{link.text(1e-9)} GB/s. kept: of all steps of the blocks with it, as in the first table. call: what the "
        "loop itself calls, median.",
    )  # fmt: skip
    for entry, cells in measured:
        for method in methods:
            cell = cells.get(method)
            if cell is None or cell.error or not cell.runs:
                table.rows.append([entry["title"], method, *["-"] * 8, cell.error if cell else "not run"])
                continue
            run = cell.runs[0]
            found, plain_s = run.found, Stat(run.plain_s).median
            link_ms = f"{found.bytes_moved / entry['link_bytes_s'] * 1e3:.1f}" if entry["link_bytes_s"] else "-"
            table.rows.append([
                entry["title"], method, f"{plain_s * 1e3:.1f}", run.overhead().text(100, 2),
                f"{200 * Stat(run.kept_s).median:.1f} / {200 * plain_s:.1f}", f"{found.bytes_moved / MB:.0f}", link_ms,
                f"{found.bytes_written / MB:.0f}", f"{found.kept} of {found.steps}",
                f"{Stat(found.done_s).median * 1e3:.2f}" if found.done_s else "-", "; ".join(found.troubles),
            ])  # fmt: skip
    return table
