"""How busy the device is while every step is kept, with each method. The door is bench/gpu.py utilisation.

Some seconds a method in at least three blocks, put together to one line; then as many blocks without it, for the
overhead.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import gpu_models
import torch
from common import Report, Stat, Table
from gpu_merge import each, one_line
from gpu_methods import Kept, Method, timed_steps
from gpu_models import CASES, Case, let_go, make_case
from gpu_svg import Row, write_rows
from gpu_ways import METHODS, Ways, step_seconds

PLAIN = "nothing kept"
BLOCKS, MOST_BLOCKS, BLOCK_S, PLAIN_S = 3, 9, 0.9, 0.4
OFTEN_S = 0.25  # samples that come less often are not finer than what is asked for


class Plain(Method):
    """Nobody keeps anything."""

    name = PLAIN

    def block(self, steps: int) -> float:
        self.found.steps += steps
        return timed_steps(self.case, steps)

    def result(self) -> Kept:
        return self.found


@dataclass
class Line:
    """What was seen with one method."""

    values: list[tuple[float, float]] = field(default_factory=list)  # seconds of its blocks, per cent
    source: str = ""
    kept_s: list[float] = field(default_factory=list)  # a step
    plain_s: list[float] = field(default_factory=list)
    kept: int = 0
    steps: int = 0
    error: str = ""

    @property
    def mean(self) -> float:
        return mean(percent for _, percent in self.values)

    @property
    def lowest_second(self) -> float:
        """The mean of the second with the least, or of all where there is not a whole one."""
        last = self.values[-1][0]
        windows = [
            [percent for when, percent in self.values if begin <= when < begin + 1.0]
            for begin, _ in self.values
            if begin + 1.0 <= last
        ]
        return min((mean(window) for window in windows), default=self.mean)


class Sampler:
    """The process that asks (bench/gpu_sampler.py)."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "sampled"
        words = ["--pid", str(os.getpid())]
        if gpu_models.DEVICE == "cuda":
            words += ["--uuid", str(torch.cuda.get_device_properties(0).uuid)]
        with self._path.open("w") as out:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("gpu_sampler.py")), *words],
                stdin=subprocess.PIPE, stdout=out,
            )  # fmt: skip
        deadline = time.monotonic() + 60
        while "ready" not in self._path.read_text():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the sampler did not begin: what it said is above")
            time.sleep(0.05)

    def values(self, spans: list[tuple[float, float]]) -> tuple[list[tuple[float, float]], str]:
        """Those of some spans of time, put together without gaps, and where they come from."""
        time.sleep(0.3)  # the driver hands its samples out late
        if self._process.poll() is not None:
            raise RuntimeError("the sampler has ended: what it said is above")
        found: dict[str, list[tuple[float, float]]] = {}
        for words in map(str.split, self._path.read_text().splitlines()):
            if len(words) == 3:
                found.setdefault(words[0], []).append((float(words[1]), float(words[2])))
        joined = {source: _joined(values, spans) for source, values in found.items()}
        gaps = {source: _gap_s(values) for source, values in joined.items()}
        source = "samples" if gaps.get("samples", 1.0) <= OFTEN_S else min(gaps.keys() - {"samples"}, default="")
        if not joined.get(source):
            raise RuntimeError(f"nobody said how busy the device was: {gaps}")
        return joined[source], f"{source}, every {1e3 * gaps[source]:.0f} ms"

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=20)


def _joined(values: list[tuple[float, float]], spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    found, before_s = [], 0.0
    for begin, end in spans:
        found += [(round(before_s + when - begin, 4), percent) for when, percent in values if begin <= when < end]
        before_s += end - begin
    return found


def _gap_s(values: list[tuple[float, float]]) -> float:
    gaps = [after[0] - before[0] for before, after in pairwise(values)]
    return median(gaps) if gaps else float("inf")


def bench_utilisation(
    plan: dict[str, list[str]], scratch: Path, *, deadline: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each model's entry as it grows by one method after another; first comes the one that keeps nothing."""

    def one(name: str) -> Iterator[dict[str, Any]]:
        case = make_case(name)
        torch.backends.cudnn.benchmark = True
        step_s = step_seconds(case)
        entry: dict[str, Any] = {"title": case.title, "cells": {}}
        for method in (Plain, *(METHODS[method] for method in plan[name])):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no time was left for {method.name} and what comes after it")
            began = time.monotonic()
            line = _tried(case, method, step_s, scratch, sampler)
            entry["cells"][method.name] = asdict(line)
            said = line.error or f"{line.mean:.1f} %, {Stat(line.kept_s).text(1e3)} ms/step, {line.source}"
            print(f"{case.title:34} {method.name:34} {time.monotonic() - began:5.1f} s  {said}", flush=True)
            yield entry
            let_go()

    sampler = Sampler(scratch)
    try:
        for name in plan:
            yield from each(name, one)
    finally:
        sampler.close()
        Ways.until_removed()


def _tried(case: Case, method: type[Method], step_s: float, scratch: Path, sampler: Sampler) -> Line:
    ways = Ways(case, method, scratch)
    try:
        way, line, spans = ways.at(1), Line(), []
        steps = max(1, round(BLOCK_S / max(step_s, way.block(1 if way.saves_when_told else 4))))
        while len(spans) < BLOCKS or (len(spans) < MOST_BLOCKS and sum(b - a for a, b in spans) < BLOCKS * BLOCK_S):
            line.kept_s.append(way.block(steps))
            spans.append(case.timed)
        line.values, line.source = sampler.values(spans)
        for _ in spans:
            line.plain_s.append(way.plain(max(3, round(PLAIN_S / step_s))))
        found = way.result()
        line.kept, line.steps = found.kept, found.steps
    except Exception as error:
        traceback.print_exc()
        return Line(error=one_line(error))
    finally:
        ways.close()
    return line


# -- what is said about it


def utilisation_report(report: Report, models: dict[str, Any]) -> None:
    for name, lines in _lines(models).items():
        sources = sorted({line.source for line in lines.values() if line.source})
        table = Table(
            f"How busy the device is: {models[name]['title']}",
            ["method", "mean %", "lowest second %", "ms/step", "overhead %", "kept", "remarks"],
            note="Every step is kept, or a save begins with every step as soon as the one before is done. Busy: a "
            f"kernel runs; copies to the host do not count ({'; '.join(sources)}). At least "
            f"{BLOCKS} blocks of {BLOCK_S} s or a step; overhead: against blocks of the same process without the "
            "method, after them. kept: of all steps of the blocks. The picture: gpu-utilisation.svg.",
        )
        for method, line in lines.items():
            if line.error:
                table.rows.append([method, *["-"] * 5, line.error])
                continue
            over = Stat([on / off - 1 for on, off in zip(line.kept_s, line.plain_s, strict=True)])
            kept = "-" if method == PLAIN else f"{line.kept} of {line.steps}"
            table.rows.append([
                method, f"{line.mean:.1f}", f"{line.lowest_second:.1f}", Stat(line.kept_s).text(1e3),
                "-" if method == PLAIN else over.text(100, 2), kept, "",
            ])  # fmt: skip
        report.tables.append(table)


def draw_utilisation(models: dict[str, Any], path: Path) -> None:
    parts = {}
    for name, lines in _lines(models).items():
        parts[models[name]["title"]] = [
            Row(method, line.values, f"{line.mean:.1f} %", f"lowest second {line.lowest_second:.1f} %")
            if not line.error
            else Row(method, [], "-", "failed")
            for method, line in lines.items()
        ]
    write_rows(path, "How busy the device is while every step is kept", parts)


def _lines(models: dict[str, Any]) -> dict[str, dict[str, Line]]:
    """Of each model, in the order of the methods."""
    return {
        name: {m: Line(**entry["cells"][m]) for m in (PLAIN, *METHODS) if m in entry["cells"]}
        for name in CASES
        if "cells" in (entry := models.get(name, {}))
    }
