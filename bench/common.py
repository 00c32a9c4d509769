"""What the benches share: how a machine is described, how numbers are summed up, how tables are written.

A report is data first (`<name>.json`) and the same data as a page second (`<name>.md`). Every number is a median with
its spread; every ratio comes from one run on one machine.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import random
import socket
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))  # this tree's Everstep, installed or not

MB = 1_000_000


@dataclass
class Stat:
    """Some measurements of one thing."""

    values: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def text(self, scale: float = 1.0, digits: int = 3) -> str:
        if not self.values:
            return "-"
        low, mid, high = (short(v * scale, digits) for v in (min(self.values), self.median, max(self.values)))
        return mid if len(self.values) == 1 else f"{mid} ({low}-{high})"


def short(value: float, digits: int) -> str:
    return f"{value:.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}"


@dataclass
class Timer:
    seconds: float = 0.0


@contextmanager
def timed() -> Iterator[Timer]:
    timer = Timer()
    begin = time.perf_counter()
    yield timer
    timer.seconds = time.perf_counter() - begin


def machine() -> dict[str, str]:
    """Enough to know whether two results may be compared."""
    cpu = next(
        (line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "unknown"
    )
    memory = next((int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    found = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": f"{cpu}, {len(os.sched_getaffinity(0))} cores",
        "memory": f"{memory / 2**20:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }
    if torch.cuda.is_available():
        found["gpu"] = f"{torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}"
    return found


def free_port() -> str:
    """Below those that the system lends to whoever connects: one of those could be taken before it is used."""
    for port in random.SystemRandom().sample(range(20_000, 30_000), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return str(port)
    raise OSError("of 100 ports none is free")


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


@dataclass
class Table:
    title: str
    headers: list[str]
    rows: list[list[str]] = field(default_factory=list)
    note: str = ""

    def markdown(self) -> str:
        lines = [_row(self.headers), _row(["---"] * len(self.headers)), *map(_row, self.rows)]
        return f"## {self.title}\n\n" + (f"{self.note}\n\n" if self.note else "") + "\n".join(lines) + "\n"


@dataclass
class Target:
    what: str
    wanted: str
    measured: str
    met: bool | None  # None: could not be measured

    @property
    def verdict(self) -> str:
        return "not measured" if self.met is None else "met" if self.met else "missed"


@dataclass
class Report:
    title: str
    command: str
    machine: dict[str, str]
    tables: list[Table] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)

    def save(self, out: Path, name: str) -> None:
        out.mkdir(parents=True, exist_ok=True)
        for path, text in (
            (out / f"{name}.json", json.dumps(asdict(self), indent=1) + "\n"), (out / f"{name}.md", self.markdown())
        ):  # fmt: skip
            fresh = path.with_name(path.name + ".new")  # whoever is ended in the middle leaves the one before
            fresh.write_text(text)
            os.replace(fresh, path)

    def markdown(self) -> str:
        facts = "; ".join(f"{key}: {value}" for key, value in self.machine.items())
        parts = [f"# {self.title}\n", f"Made by `{self.command}`. {facts}.\n"]
        parts += [table.markdown() for table in self.tables]
        if self.targets:
            parts.append(targets_table(self.targets).markdown())
        return "\n".join(parts)


def targets_table(targets: Sequence[Target]) -> Table:
    rows = [[target.what, target.wanted, target.measured, target.verdict] for target in targets]
    return Table("Targets", ["target", "wanted", "measured", ""], rows)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
