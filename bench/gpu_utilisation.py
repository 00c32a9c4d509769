"""How busy the device is while every step is kept: looked at in bench/gpu.py frequency, beside what it costs.

Some seconds of a method that is there already, in blocks that are put together to one line.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import gpu_models
import torch
from common import Table
from gpu_merge import one_line
from gpu_models import CASES, Case
from gpu_svg import Row, write_rows
from gpu_ways import METHODS, Overrun

PLAIN = "nothing kept"
WATCHED = ("gpt2",)  # models; the others are left alone for want of time
BLOCK_S, WATCHED_S, MOST_BLOCKS = 0.9, 2.4, 9
OFTEN_S = 0.25  # samples that come less often are not finer than what is asked for


@dataclass
class Busy:
    """What was seen of one method."""

    values: list[tuple[float, float]]  # seconds of its blocks, per cent
    source: str

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


def watched(case: Case, block: Callable[[int], float], step_s: float, sampler: Sampler) -> dict[str, Any] | None:
    """What was seen; None, and why is printed, if nobody could look. `step_s`: of such a block, about."""
    steps, spans = max(1, round(BLOCK_S / step_s)), list[tuple[float, float]]()
    try:
        while len(spans) < MOST_BLOCKS and sum(end - begin for begin, end in spans) < WATCHED_S:
            block(steps)
            spans.append(case.timed)
        return asdict(Busy(*sampler.values(spans)))
    except Overrun:
        raise
    except Exception as error:  # what was measured before is not to be lost by it
        print(f"{case.title}: not seen how busy: {one_line(error)}", flush=True)
        return None


def make_sampler(folder: Path) -> Sampler | None:
    """None, and why is printed, where nobody can be asked."""
    try:
        return Sampler(folder)
    except RuntimeError as error:
        print(f"how busy the device is will not be known: {error}", flush=True)
        return None


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


# -- what is said about it


def busy_table(models: dict[str, Any]) -> Table | None:
    """None if nobody looked."""
    found = _found(models)
    sources = sorted({busy.source for lines in found.values() for busy in lines.values()})
    table = Table(
        "How busy the device is while every step is kept",
        ["model", "method", "mean %", "lowest second %"],
        note="Or a save begins with every step as soon as the one before is done. Busy: a kernel runs; copies to the "
        f"host do not count ({'; '.join(sources)}). Some blocks of {BLOCK_S} s or a step, {WATCHED_S} s in all. The "
        "picture: gpu-frequency.svg.",
    )
    for name, lines in found.items():
        for method, busy in lines.items():
            table.rows.append([models[name]["title"], method, f"{busy.mean:.1f}", f"{busy.lowest_second:.1f}"])
    return table if table.rows else None


def draw_busy(models: dict[str, Any], path: Path) -> None:
    parts = {
        models[name]["title"]: [
            Row(method, busy.values, f"{busy.mean:.1f} %", f"lowest second {busy.lowest_second:.1f} %")
            for method, busy in lines.items()
        ]
        for name, lines in _found(models).items()
    }
    if parts:
        write_rows(path, "How busy the device is while every step is kept", parts)


def _found(models: dict[str, Any]) -> dict[str, dict[str, Busy]]:
    """Of each model that was watched, in the order of the methods."""
    found = {}
    for name in (name for name in CASES if models.get(name, {}).get("busy")):
        cells = {method: models[name]["cells"].get(method, {}).get("busy") for method in METHODS}
        lines = {PLAIN: models[name]["busy"], **cells}
        found[name] = {method: Busy(**busy) for method, busy in lines.items() if busy}
    return found
