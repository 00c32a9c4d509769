"""What Everstep's costs grow with on a device: bytes and tensors. The door is bench/gpu.py scaling.

As bench/scaling.py has it for a CPU, whose points, fits and targets these are. A state is nothing but parameters, with
an optimizer that has no state of its own; all are measured in one process, one after another, the largest last.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cpu
import gpu_models
import peers
import torch
from common import Report, Stat, Table, Target, timed
from gpu_merge import LEFT_OUT, each
from gpu_methods import slots_for
from gpu_models import let_go, link_bytes_s
from gpu_ways import limited
from scaling import GB, Point, blocked_cells, captures, fit_targets, fits_table, missing, torch_loads

STATES = {
    **{f"{size:g} GB": (256, size) for size in (0.1, 0.3, 1.0, 3.0)},
    **{f"{count} tensors": (count, 1.0) for count in (64, 1024, 16384)},
    "20 GB": (256, 20.0),
}  # tensors, GB
MANY, MANY_TIMES = 10_000, 2  # tensors, that keep a host so busy that captures are told apart only by more of them
STAND_IN = 0.01  # of the bytes, without a device
# Of a kernel. A queue has room for a thousand launches: whoever launches more waits in the driver, and nobody else can
# launch a copy beside it. Products instead of it differed by 20 ms in 600 among themselves.
SPIN_CYCLES = 2_500_000
# Forward and backward of many tensors launch several times as much as their update does. In a step that the host fills
# by itself nothing can be hidden: with 58 ms of kernels for 16,384 tensors, 25 to 48 were those of the plain update.
UPDATES = 4  # as long as the host takes for so many is computed at least
BLOCKED = (
    f"kernels that only take time, no less than the host takes for {UPDATES} plain updates, and the update after them "
    "took on the device than their neighbours"
)
BLOCKED_BEFORE = "matrix products and the update after them took on the device than some"  # in an earlier form of this
RAW_BYTES = 4 * 10**9  # that the plainest program writes at most; of more it reads all, once
RAW = (
    "Raw writes of 4 GB at most, raw reads of the same bytes into large pages, of more than 4 GB after ours; before "
    "each read and restore as much memory was taken and freed (memory taken: how fast), so that nobody waits for what "
    "a machine's host has to give it"
)
RAW_BEFORE = "Raw of 4 GB at most"  # in an earlier form of this: a disk may be slower for 20 GB
FIRST_BASE_S = 90.0
GRACE_S = 40.0  # that the last state may take longer than there is time


class Training:
    """Something to compute between a cut and the next update, on the device; how much longer that update came."""

    def __init__(self, saver: peers.Everstep, least_s: float) -> None:
        self._saver = saver
        self.update_s = [self._on_host() for _ in range(5)]  # a plain update, processor time
        self.compute_s = max(least_s, UPDATES * Stat(self.update_s).median)
        self.plain_s: list[float] = []  # steps without a capture, on the device
        if gpu_models.DEVICE == "cuda":
            self._count = 16
            sixteen_s = Stat([self._on_device(lambda: None) for _ in range(3)]).median
            self._count = max(1, round(16 * self.compute_s / sixteen_s))
            self._step()

    def _on_host(self) -> float:
        gpu_models.sync()
        began = time.thread_time()
        self._saver.step()
        return time.thread_time() - began

    def _step(self) -> float:
        self.plain_s.append(self._on_device(self._saver.step))
        return self.plain_s[-1]

    def _on_device(self, update: Callable[[], object]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(self._count):
            torch.cuda._sleep(SPIN_CYCLES)
        update()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def gate(self) -> float:
        if gpu_models.DEVICE != "cuda":
            cpu.compute(self.compute_s)
            return self._saver.step()
        before_s, kept_s = self.plain_s[-1], self._on_device(self._saver.step)
        self._saver.run.wait("sealed")
        return kept_s - (before_s + self._step()) / 2  # clocks change: neighbours are compared


def measure_on_device(tensors: int, size: int, scratch: Path) -> dict[str, Any]:
    subject = peers.Subject(cpu.even_shapes(tensors, size), adam=False, device=gpu_models.DEVICE)
    saver = peers.Everstep(subject, scratch, slots=slots_for(size), keep=1)
    try:
        for _ in range(5):  # the first ones are watched for writes that pass by the gates
            saver.save(scratch)
            saver.step()
        saver.run.wait("sealed")
        deadline = time.monotonic() + FIRST_BASE_S
        while (
            saver.run.status()["durable_step"] is None
        ):  # the keeper begins with one base, and writes no other unasked
            if time.monotonic() > deadline:
                raise TimeoutError(f"no base was on the disk after {FIRST_BASE_S:.0f} s")
            time.sleep(0.02)
        training = Training(saver, 0.03 + size / (35 * GB))
        often = MANY_TIMES if tensors >= MANY else 1
        times = captures(saver, scratch, training.gate, gpu_models.sync, times=often)
        times |= _disk(saver, scratch, 2 if size <= GB else 1)
        times |= {"plain_s": training.plain_s, "update_s": training.update_s, "recall_s": _recalls(saver, scratch)}
        times["load_s"] = torch_loads(subject, scratch, 2, gpu_models.sync) if size <= GB else []
        return vars(Point(tensors=tensors, bytes=size, **times))
    finally:
        if saver.run.give_up():
            peers.end_keeper(str(saver.run.status()["run"]))


def _disk(saver: peers.Everstep, scratch: Path, turns: int) -> dict[str, list[float]]:
    """Ours between two of the plainest program: writes of a part, as seconds for the whole."""
    keys = ("write", "raw_write", "read", "raw_read", "restore_s", "touch_s")
    found: dict[str, list[float]] = {key: [] for key in keys}
    raw, arena = scratch / "raw.bin", saver.run._capture.arena()
    assert arena is not None
    most = min(arena.slot_bytes, RAW_BYTES // 4096 * 4096)
    whole = arena.slot_bytes / most

    def raw_write() -> float:
        seconds = whole * peers.raw_write(raw, memoryview(arena.slots[0])[:most])
        raw.unlink()
        peers.sync_folder(scratch)
        return seconds

    def raw_read(file: Path) -> float:
        peers.drop_cache([file])
        found["touch_s"].append(peers.touch(arena.slot_bytes))
        return _timed(lambda: peers.raw_read(file))  # until its memory is free again, as with ours

    for _ in range(turns):
        saver.step()
        saver.save(scratch)
        saver.run.wait("sealed")
        before = raw_write()
        found["write"].append(_timed(lambda: saver.run.wait("durable")))
        _until_retired(saver)
        found["raw_write"].append((before + raw_write()) / 2)
        file = max(saver.files(scratch), key=lambda path: path.stat().st_size)
        raw_reads = [raw_read(file)] if most == arena.slot_bytes else []
        peers.drop_cache([file])
        found["touch_s"].append(peers.touch(arena.slot_bytes))
        found["restore_s"].append(_timed(lambda: _restored(saver, scratch, "disk")))
        raw_reads.append(raw_read(file))
        found["raw_read"].append(sum(raw_reads) / len(raw_reads))
    found["read"] = found["restore_s"]  # what is read goes into the model
    return found


def _until_retired(saver: peers.Everstep) -> None:
    """The base before is removed beside the next, and some disks take 0.3 s to free a gigabyte: raw ones would wait."""
    deadline = time.monotonic() + FIRST_BASE_S
    while sum(path.is_dir() for path in (saver.root / "run").glob("step-*")) > 1:
        if time.monotonic() > deadline:
            raise TimeoutError(f"a base that may go was there after {FIRST_BASE_S:.0f} s")
        time.sleep(0.02)


def _recalls(saver: peers.Everstep, scratch: Path) -> list[float]:
    """From memory; none where the arena lies in files of nobody, which only the keeper gives out."""
    try:
        saver.fetch("memory")
    except ValueError:
        return []
    return [_timed(lambda: _restored(saver, scratch, "memory")) for _ in range(3)]


def _restored(saver: peers.Everstep, scratch: Path, source: str) -> None:
    saver.restore(scratch, source)
    gpu_models.sync()


def _timed(what: Callable[[], object]) -> float:
    with timed() as whole:
        what()
    return whole.seconds


def bench_scaling(names: list[str], scratch: Path, deadline: float) -> Iterator[tuple[str, dict[str, Any]]]:
    on_device = gpu_models.DEVICE == "cuda"
    link = {"out": link_bytes_s() if on_device else 0.0, "back": link_bytes_s(back=True) if on_device else 0.0}
    let_go()

    def one(name: str) -> Iterator[dict[str, Any]]:
        began = time.monotonic()
        if began > deadline:
            raise TimeoutError("no time was left for it")
        tensors, size = STATES[name][0], round(STATES[name][1] * GB * (1 if on_device else STAND_IN))
        slots = slots_for(size) or 3
        why = missing(size, scratch, slots=slots, memory_times=slots + 1.2, disk_times=2.1 + min(1, RAW_BYTES / size))
        folder = scratch / name.replace(" ", "-")
        folder.mkdir()
        title = name if on_device else f"stand-in for {name}"
        entry = {"title": title, "link": link, "blocked": BLOCKED, "raw": RAW, "whole": True}
        if why:
            entry["left_out"] = LEFT_OUT + why
        else:
            with limited(deadline + GRACE_S - began):
                entry["point"] = measure_on_device(tensors, size, folder)
        peers.empty(folder)
        let_go()
        print(f"{name:14} {time.monotonic() - began:5.1f} s  {_line(entry)}", flush=True)
        yield entry

    for name in names:
        yield from each(name, one)


def _line(entry: dict[str, Any]) -> str:
    if "point" not in entry:
        return str(entry["left_out"])
    point = Point(**entry["point"])
    return (
        f"blocked {Stat(point.blocked_s).text(1e3)} ms, of it the cut {Stat(point.call_s).text(1e3)}; sealed "
        f"{point.speed('seal_s').text()}, written {point.speed('write').text()}, from memory "
        f"{point.speed('recall_s').text()}, from disk {point.speed('restore_s').text()} GB/s"
    )


# -- what is said about it


def scaling_report(report: Report, models: dict[str, Any]) -> None:
    entries = [models[name] for name in STATES if "title" in models.get(name, {})]
    blocked = ", or ".join(sorted({entry.get("blocked", BLOCKED_BEFORE) for entry in entries}))
    raw = "; or: ".join(sorted({entry.get("raw", RAW_BEFORE) for entry in entries}))
    table = Table(
        "What bytes and tensors cost on a device",
        ["state", "tensors", "GB", "a plain step, ms", "its update, ms of the host", "blocked a capture, ms",
         "of it the cut, ms", "cut, ms of a processor", "copied and sealed, GB/s", "of the link", "write GB/s",
         "of raw", "from memory GB/s", "of the link", "from disk GB/s", "of raw", "memory taken, GB/s",
         "by torch.load GB/s"],
        note="Medians, with the lowest and highest. Parameters of an SGD without momentum. Blocked: run.done(), and by "
        f"how much longer {blocked} without captures, with 30 ms and a second for 35 GB of them; what copies cost "
        "kernels that compute is in gpu-frequency.md. Sealed: from the cut on, with nothing else to do. Write: "
        "from wait() on a sealed step until it is committed; raw: O_DIRECT, four threads, fsync. From memory and from "
        "disk: into the parameters on the device, what is read is checked; raw: O_DIRECT, four threads, into fresh "
        f"memory of the host. {raw}. "
        "torch.load: a file of the same state, unchecked. Of 3 GB and more one turn on the disk; 20 GB have "
        "Memory(slots=2).",
    )  # fmt: skip
    for entry in entries:
        if "point" not in entry:
            table.rows.append([entry["title"], *["-"] * (len(table.headers) - 2), entry["left_out"]])
            continue
        table.rows.append(_row(entry, Point(**entry["point"])))
    report.tables.append(table)
    points = [Point(**entry["point"]) for entry in entries if "point" in entry]
    if len(points) > 2:
        report.tables.append(fits_table(points))
        report.targets += fit_targets(points)
    if points:
        report.targets += _targets(max((e for e in entries if "point" in e), key=lambda e: e["point"]["bytes"]))


def _row(entry: dict[str, Any], point: Point) -> list[str]:
    def of_link(key: str, way: str) -> str:
        return Stat([rate * GB / entry["link"][way] for rate in point.speed(key).values]).text(100) + " %"

    has_link = bool(entry["link"]["out"])
    return [
        entry["title"], f"{point.tensors:,}", f"{point.bytes / GB:.2g}",
        *(Stat(values).text(1e3) for values in (point.plain_s, point.update_s)), *blocked_cells(point),
        point.speed("seal_s").text(), of_link("seal_s", "out") if has_link else "-",
        point.speed("write").text(), f"{point.share('write').text(100)} %",
        point.speed("recall_s").text(), of_link("recall_s", "back") if has_link and point.recall_s else "-",
        point.speed("restore_s").text(), f"{point.share('read').text(100)} %",
        point.speed("touch_s").text(), point.speed("load_s").text(),
    ]  # fmt: skip


def _targets(entry: dict[str, Any]) -> list[Target]:
    """Of the largest state."""
    large, link = Point(**entry["point"]), entry["link"]["back"]
    name = f"{large.bytes / GB:.2g} GB"
    cut = Stat(large.cut_s)
    targets = [Target(f"processor time of a cut, {name}", "<= 1 ms", f"{cut.text(1e3)} ms", cut.median <= 1e-3)]
    for key, word in (("write", "durable write"), ("read", "restore from the disk")):
        share = large.share(key)
        said = f"{share.text(100)} %"
        if key == "read" and link:  # raw ends in the host, and ours crosses the link once all is checked
            both = [(raw + large.bytes / link) / ours for raw, ours in zip(large.raw_read, large.read, strict=True)]
            said += f"; {Stat(both).text(100)} % of raw and the link one after the other"
        targets.append(Target(f"{word} of {name} against raw", ">= 90%", said, share.median >= 0.9))
    return targets
