"""What Everstep's costs grow with: tensors, bytes, ranks. It must be bytes only.

    python bench/scaling.py [tensors|bytes|ranks] [--largest GB] [--out DIR] [--scratch DIR]

Every state is measured in a process of its own, by the clock and, since machines are shared, by processor time. Costs
are fitted as a + b x bytes + c x tensors. A state needs five times its size of memory (itself, three slots, and once
more while it is restored) and four times of disk; one that does not fit is named and left out.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import MB, Report, Stat, Table, Target, machine, short, timed

from everstep.capture.host import free_memory

HERE = Path(__file__).parent
GB = 1000 * MB
PARTS = ("tensors", "bytes", "ranks")
TENSORS, TENSORS_BYTES = (64, 256, 1024, 4096, 16384), 256 * MB
SIZES, SIZES_TENSORS = (0.1, 0.3, 1.0, 3.0), 256
WORLDS = (1, 2, 4, 8)
MEMORY_TIMES, DISK_TIMES = 5.3, 4.2  # of a state's bytes, that measuring it takes
_CAPTURES, _FEWEST, _CAPTURES_S = 15, 5, 4.0
_SEALS = 5
_DRAWS = 200


@dataclass(kw_only=True)
class Point:
    """One state. Seconds by the clock, if nothing else is said."""

    tensors: int
    bytes: int
    call_s: list[float]  # the cut
    gate_s: list[float]  # what the next update waits for the copy
    cut_s: list[float]  # the cut, in processor time of the training thread
    looks_s: list[float]  # processor time in which the copier sees whether all tensors are where they were,
    held_s: list[float]  # and the longest part of it in which nobody else has the interpreter
    seal_s: list[float]  # from the cut on, nothing else computing
    restore_s: list[float]  # from the disk into the model, every byte checked
    write: list[float]
    raw_write: list[float]
    read: list[float]
    raw_read: list[float]
    recall_s: list[float] = field(default_factory=list)  # from memory into the model; of a device only
    plain_s: list[float] = field(default_factory=list)  # steps without a capture, on a device,
    update_s: list[float] = field(default_factory=list)  # and processor time of the host for the update in them
    load_s: list[float] = field(default_factory=list)  # the same state from a file by torch.load, nothing checked
    touch_s: list[float] = field(default_factory=list)  # to have as much memory, before each read of a device's state

    @property
    def blocked_s(self) -> list[float]:
        return [call + gate for call, gate in zip(self.call_s, self.gate_s, strict=True)]

    def share(self, key: str) -> Stat:
        """Of what the disk does for the plainest program, turn by turn."""
        ours, raw = getattr(self, key), getattr(self, f"raw_{key}")
        return Stat([b / a for a, b in zip(ours, raw, strict=True)])

    def speed(self, key: str) -> Stat:
        return Stat([self.bytes / seconds / GB for seconds in getattr(self, key)])


def _rounds(times: int) -> Iterator[int]:
    end = time.monotonic() + times * _CAPTURES_S
    for count in range(times * _CAPTURES):
        if count >= _FEWEST and time.monotonic() > end:
            return
        yield count


def measure(tensors: int, size: int, scratch: Path) -> Point:
    import cpu
    import peers

    subject = peers.Subject(cpu.even_shapes(tensors, size), adam=False)
    for parameter in subject.model.parameters():
        parameter.grad = torch.full((1,), 1e-3).expand_as(parameter)  # takes no memory
    saver = peers.Everstep(subject, scratch)
    saver.save(scratch)
    saver.step()
    saver.durable(scratch)
    saver.warm_up()

    def gate() -> float:
        cpu.compute(0.3 + size / (2 * GB))
        return saver.step()

    times = captures(saver, scratch, gate) | {"restore_s": []}
    turns = 3 if size < GB else 2  # on the disk, of which each takes seconds then
    raw = cpu.bench_raw(saver, scratch, turns)
    for _ in range(turns):
        peers.drop_cache(saver.files(scratch))
        peers.touch(size)
        with timed() as whole:
            saver.restore(scratch)
        times["restore_s"].append(whole.seconds)
    saver.close()
    return Point(tensors=tensors, load_s=torch_loads(subject, scratch, turns), **times, **raw)


def torch_loads(subject: Any, scratch: Path, turns: int, settle: Callable[[], None] = lambda: None) -> list[float]:
    """From the disk into the model."""
    import peers

    folder, seconds = scratch / "torch", []
    size = sum(parameter.nbytes for parameter in subject.model.parameters())
    folder.mkdir()
    other = peers.TorchSave(subject, folder)
    other.save(folder)
    other.durable(folder)
    for _ in range(turns):
        peers.drop_cache(other.files(folder))
        peers.touch(size)
        with timed() as whole:
            other.restore(folder)
            settle()
        seconds.append(whole.seconds)
    peers.empty(folder)
    return seconds


def captures(
    saver: Any, scratch: Path, gate: Callable[[], float], settle: Callable[[], None] = lambda: None, *, times: int = 1
) -> dict[str, list[float]]:
    """What a capture takes. `gate`: compute, then the next update; how long that had to wait for the copy.

    `settle`: until an update is done, where it is only launched. `times`: as many captures as else.
    """
    found: dict[str, list[float]] = {
        key: [] for key in ("call_s", "gate_s", "cut_s", "looks_s", "held_s", "seal_s")
    }  # fmt: skip
    for _ in _rounds(times):
        began = time.thread_time()
        with timed() as call:
            saver.save(scratch)
        found["cut_s"].append(time.thread_time() - began)
        found["call_s"].append(call.seconds)
        found["gate_s"].append(gate())
    for _ in range(_SEALS):
        settle()
        with timed() as whole:
            saver.save(scratch)
            saver.run.wait("sealed")
        found["seal_s"].append(whole.seconds)
        saver.step()
        for key, seconds in zip(("looks_s", "held_s"), _looks(saver), strict=True):
            found[key].append(seconds)
    return found


def _looks(saver: Any) -> tuple[float, float]:
    """What the copier asks before it copies, asked here while it has nothing to do: in all, and the longest part."""
    moments = [time.thread_time()]
    assert saver.run._capture.shape.listing.unchanged(lambda: moments.append(time.thread_time()))
    moments.append(time.thread_time())
    return moments[-1] - moments[0], max(end - begin for begin, end in pairwise(moments))


# -- the points, each in a process of its own


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=PARTS, help="one of them; all if none is named")
    parser.add_argument("--largest", type=float, default=0.0, metavar="GB", help="one more state, of this size")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--scratch", type=Path, default=None, help="a directory on the disk to measure")
    parser.add_argument("--point", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.point:
        print("result " + json.dumps(_measure_point(given.point, given.scratch)), flush=True)
        return
    words = " ".join([*([given.part] if given.part else []), *([f"--largest {given.largest:g}"] * (given.largest > 0))])
    sizes = sorted({*SIZES, *([given.largest] if given.largest else [])})
    plan = {
        "tensors": [f"{count}:{TENSORS_BYTES}" for count in TENSORS],
        "bytes": [f"{SIZES_TENSORS}:{round(size * GB)}" for size in sizes],
        "ranks": [f"ranks:{world}" for world in WORLDS],
    }
    data: dict[str, Any] = {}
    for part in [given.part] if given.part else PARTS:
        data[part] = {point: _apart(point, given.scratch) for point in plan[part]}
    report = Report("What costs grow with", f"python bench/scaling.py {words}".strip(), machine(), data=data)
    fill(report)
    report.save(given.out, f"scaling-{given.part}" if given.part else "scaling")
    print(report.markdown())


def _measure_point(point: str, scratch: Path) -> Any:
    kind, _, number = point.partition(":")
    if kind == "ranks":
        from scaling_ranks import measure_ranks

        return measure_ranks(int(number), scratch)
    return vars(measure(int(kind), int(number), scratch))


def _apart(point: str, scratch: Path | None) -> Any:
    """What was measured, or in words why nothing was."""
    kind, _, number = point.partition(":")
    with tempfile.TemporaryDirectory(prefix="everstep-bench-", dir=scratch, ignore_cleanup_errors=True) as folder:
        if kind != "ranks" and (why := missing(int(number), Path(folder))):
            return why
        with timed() as whole:
            child = subprocess.run(
                [sys.executable, __file__, "--point", point, "--scratch", folder], stdout=subprocess.PIPE, text=True
            )
    print(f"{point}: {whole.seconds:.0f} s", file=sys.stderr, flush=True)
    if child.returncode != 0:
        raise SystemExit(f"point {point} failed (exit {child.returncode})")
    return next(json.loads(line[7:]) for line in child.stdout.splitlines() if line.startswith("result "))


def missing(
    size: int, folder: Path, *, slots: int = 3, memory_times: float = MEMORY_TIMES, disk_times: float = DISK_TIMES
) -> str:
    """What there is too little of for a state, in words."""
    memory = min(free_memory(None), shutil.disk_usage("/dev/shm").free / slots * memory_times)
    for what, times, free in (("memory", memory_times, memory), ("disk", disk_times, shutil.disk_usage(folder).free)):
        if times * size > free:
            return f"not measured: needs {times * size / GB:.1f} GB of {what}, and {free / GB:.1f} are free"
    return ""


# -- what is said about it


def fill(report: Report) -> None:
    data = report.data
    by_part = {
        part: [Point(**found) for found in data.get(part, {}).values() if not isinstance(found, str)]
        for part in ("tensors", "bytes")
    }
    if by_part["tensors"]:
        report.tables.append(_tensors_table(by_part["tensors"]))
    if by_part["bytes"]:
        report.tables.append(_bytes_table(by_part["bytes"], data["bytes"]))
    points = [point for part in by_part.values() for point in part]
    if len(points) > 2:
        report.tables.append(fits_table(points))
        report.targets += fit_targets(points)
    if by_part["tensors"]:
        report.targets += _tensors_targets(by_part["tensors"])
    if by_part["bytes"]:
        report.targets += _bytes_targets(by_part["bytes"])
    if "ranks" in data:
        from scaling_ranks import Rank, ranks_table, ranks_targets

        found = {int(point.partition(":")[2]): [Rank(**one) for one in ranks] for point, ranks in data["ranks"].items()}
        report.tables.append(ranks_table(found))
        report.targets += ranks_targets(found)


def _tensors_table(points: list[Point]) -> Table:
    table = Table(
        f"Tensors: {points[0].bytes / MB:.0f} MB in so many of them",
        ["tensors", "blocked a capture, ms", "of it the cut, ms", "cut, ms of a processor",
         "copier looks, ms of a processor", "at a time, ms", "seal, ms", "write GB/s", "of raw", "restore s",
         "torch.load s"],
        note="Medians, with the lowest and highest. Blocked: run.done(), and what the next optimizer step then waits "
        "for the copy, with compute on all cores between the two. Parameters of an SGD without momentum: a tensor "
        "each. Before it copies, the copier thread looks whether every tensor is still where it was; a loop that "
        "needs the interpreter then waits until the copier lets go of it, which it does between parts. Seal: from "
        "the cut on, with nothing else to do. Write: from wait() on a sealed step until it is committed; raw: "
        "O_DIRECT, four threads, fsync, in turns. Restore: from the disk into the model, every byte checked; "
        "torch.load: the same state, unchecked. Before each, as much memory was taken and freed.",
    )  # fmt: skip
    for point in points:
        table.rows.append([
            f"{point.tensors:,}", *blocked_cells(point), Stat(point.looks_s).text(1e3), Stat(point.held_s).text(1e3),
            Stat(point.seal_s).text(1e3), point.speed("write").text(), f"{point.share('write').text(100)} %",
            Stat(point.restore_s).text(), Stat(point.load_s).text() if point.load_s else "-",
        ])  # fmt: skip
    return table


def _bytes_table(points: list[Point], found: dict[str, Any]) -> Table:
    table = Table(
        f"Bytes: in {points[0].tensors} tensors",
        ["GB", "blocked a capture, ms", "of it the cut, ms", "cut, ms of a processor", "copied and sealed, GB/s",
         "write GB/s", "raw write GB/s", "share", "verified read GB/s", "raw read GB/s", "share",
         "restore into the model, GB/s"],
        note="As above. With 0.3 s and half a second a GB of compute between a cut and the next update. Raw "
        "reads: O_DIRECT, four threads, into large pages, as ours.",
    )  # fmt: skip
    for point in points:
        table.rows.append([
            f"{point.bytes / GB:.1f}", *blocked_cells(point), point.speed("seal_s").text(),
            point.speed("write").text(), point.speed("raw_write").text(), f"{point.share('write').text(100)} %",
            point.speed("read").text(), point.speed("raw_read").text(), f"{point.share('read').text(100)} %",
            point.speed("restore_s").text(),
        ])  # fmt: skip
    for point, why in found.items():
        if isinstance(why, str):
            table.rows.append([f"{int(point.partition(':')[2]) / GB:.1f}", why, *[""] * (len(table.headers) - 2)])
    return table


def blocked_cells(point: Point) -> list[str]:
    return [Stat(values).text(1e3) for values in (point.blocked_s, point.call_s, point.cut_s)]


# -- fits

COSTS: dict[str, Callable[[Point], list[float]]] = {
    "blocked a capture": lambda point: point.blocked_s,
    "cut, processor time": lambda point: point.cut_s,
    "copier looks, processor time": lambda point: point.looks_s,
    "copier holds the interpreter": lambda point: point.held_s,
    "seal": lambda point: point.seal_s,
    "write": lambda point: point.write,
    "restore": lambda point: point.restore_s,
}
FIT = ("a", "per GB", "per 10,000 tensors")


def fits(points: list[Point], cost: Callable[[Point], list[float]]) -> dict[str, Stat]:
    """Least squares through the medians of measurements drawn anew, many times: how far to trust each number."""
    columns = {
        "a": [1.0] * len(points), "per GB": [point.bytes / GB for point in points],
        "per 10,000 tensors": [point.tensors / 10_000 for point in points],
    }  # fmt: skip
    known = [name for name, values in columns.items() if name == "a" or len({round(v, 1) for v in values}) > 1]
    matrix = np.array([columns[name] for name in known]).T
    drawn, found = random.Random(0), {name: Stat() for name in known}
    for _ in range(_DRAWS):
        medians = [Stat(drawn.choices(cost(point), k=len(cost(point)))).median for point in points]
        for name, value in zip(known, np.linalg.lstsq(matrix, np.array(medians))[0], strict=True):
            found[name].values.append(float(value))
    return found


def _spread(stat: Stat) -> str:
    low, high = np.percentile(stat.values, [5, 95])
    return f"{short(stat.median * 1e3, 3)} ({short(low * 1e3, 3)} to {short(high * 1e3, 3)})"


def fits_table(points: list[Point]) -> Table:
    table = Table(
        "Costs as a + b x bytes + c x tensors",
        ["cost, ms", *FIT],
        note=f"Least squares over all {len(points)} states above. In brackets, nine tenths of {_DRAWS} fits through "
        "measurements that were drawn anew.",
    )
    for name, cost in COSTS.items():
        found = fits(points, cost)
        table.rows.append([name, *(_spread(found[one]) if one in found else "-" for one in FIT)])
    return table


def fit_targets(points: list[Point]) -> list[Target]:
    """Met or missed only if nine tenths of the fits say so."""
    targets, largest = [], max(point.bytes for point in points)
    for name in ("blocked a capture", "cut, processor time", "copier holds the interpreter"):
        found = fits(points, COSTS[name])
        for what, column, times in (
            ("for 10,000 tensors", "per 10,000 tensors", 1),
            (f"for 20 GB, by the fit up to {largest / GB:.1f}", "per GB", 20),
        ):
            if column in found:
                more = Stat([value * times for value in found[column].values])
                low, high = map(float, np.percentile(more.values, [5, 95]))
                met = high <= 1e-3 if (high <= 1e-3) == (low <= 1e-3) else None
                targets.append(Target(f"{name}: more {what}", "<= 1 ms", f"{_spread(more)} ms", met))
    return targets


def _tensors_targets(points: list[Point]) -> list[Target]:
    few, many = points[0], points[-1]
    found = fits(points, COSTS["blocked a capture"])
    at = {count: found["a"].median + found["per 10,000 tensors"].median * count / 10_000 for count in (100, 10_000)}
    numbers = f"{many.tensors:,} against {few.tensors:,} tensors"
    cut = Stat(many.cut_s)
    blocked = Stat(many.blocked_s).median / Stat(few.blocked_s).median
    writes = many.share("write").median / few.share("write").median
    restores = Stat(many.restore_s).median / Stat(few.restore_s).median
    return [
        Target(
            f"processor time of a cut, {many.tensors:,} tensors", "<= 1 ms", f"{cut.text(1e3)} ms", cut.median <= 1e-3
        ),
        Target(
            "blocked a capture, 100 and 10,000 tensors, by the fit", "<= 1 ms, <= 2x",
            " and ".join(f"{seconds * 1e3:.2f} ms" for seconds in at.values()),
            max(at.values()) <= 1e-3 and at[10_000] <= 2 * at[100],
        ),
        Target(f"blocked a capture, {numbers}", "<= 2x", f"{blocked:.2f}x", blocked <= 2),
        Target(f"write against raw, {numbers}", ">= 0.8x", f"{writes:.2f}x", writes >= 0.8),
        Target(f"restore, {numbers}", "<= 2x", f"{restores:.2f}x", restores <= 2),
    ]  # fmt: skip


def _bytes_targets(points: list[Point]) -> list[Target]:
    small, large = points[0], points[-1]
    name = f"{large.bytes / GB:.1f} GB"
    more = Stat(large.blocked_s).median - Stat(small.blocked_s).median
    what = f"blocked a capture, {name} against {small.bytes / GB:.1f}"
    targets = [Target(what, "<= 1 ms more", f"{more * 1e3:+.2f} ms", more <= 1e-3)]
    for key, word, least in (("write", "durable write", 0.9), ("read", "verified read", 0.9)):
        share = large.share(key)
        measured = f"{share.text(100)} %"
        targets.append(Target(f"{word} of {name} against raw", f">= {least:.0%}", measured, share.median >= least))
    return targets


if __name__ == "__main__":
    main()
