"""How copies off a device let others pass: after how many bytes, and by what. The door is bench/gpu.py turnstiles.

Everstep queues all copies of a base at once, and after every so many bytes something that is no copy to the host: a
turnstile (capture/shape.py). Here it is put after 16, 32 and 64 MB and nowhere, as a word that is copied to the device
and as a kernel of one thread. All of them take turns in one process, on one run, and each has blocks without captures
beside its own. How long a copy of the loop waits, and what turnstiles cost the link, is looked at first, without a
model.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpu_models
import torch
from common import MB, Report, Stat, Table, timed
from gpu_merge import each, one_line
from gpu_methods import DenseLog, Device, Host, Method
from gpu_models import Case, let_go, make_case
from gpu_ways import Ways, limited, step_seconds
from torch import Tensor

from everstep.capture import buckets, shape

WORD, KERNEL = "a word", "a kernel"
MODES: tuple[type[Method], ...] = (Host, Device, DenseLog)
ROUNDS, LEAST_ROUNDS = 3, 2
BLOCK_S, PLAIN_S = 0.55, 0.3
MODE_S = 32.0  # for all blocks of a mode: a further round is made only if it ends by then
BASE_BYTES, LOOKS = 1 << 30, 6  # of which one warms up


@dataclass(frozen=True)
class Turnstile:
    after_bytes: int  # 0: there is none
    what: str = WORD

    @property
    def name(self) -> str:
        return f"{self.what} after {self.after_bytes >> 20} MB" if self.after_bytes else "none"


TURNSTILES = (
    Turnstile(0), *(Turnstile(size << 20, what) for size in (16, 32, 64) for what in (WORD, KERNEL))
)  # fmt: skip


@contextmanager
def standing(turnstile: Turnstile) -> Iterator[None]:
    """For all copies that are queued meanwhile."""
    size, copy = shape.PASSING_BYTES, shape.Lane.copy
    shape.PASSING_BYTES = turnstile.after_bytes or 1 << 62  # type: ignore[misc]
    if turnstile.what == KERNEL:
        shape.Lane.copy = _copy_by_kernels  # type: ignore[method-assign]
    try:
        yield
    finally:
        shape.PASSING_BYTES, shape.Lane.copy = size, copy  # type: ignore[misc,method-assign]


def _copy_by_kernels(lane: shape.Lane, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """As Lane.copy does it, with a kernel in the place of the word."""
    into: list[Tensor] = []
    out_of: list[Tensor] = []
    for target, source in zip(targets, sources, strict=True):
        into.append(target)
        out_of.append(source)
        if sum(one.nbytes for one in out_of) >= shape.PASSING_BYTES:
            torch._foreach_copy_(into, out_of, non_blocking=True)
            lane.turnstile[0].add_(1)
            into, out_of = [], []
    if into:
        torch._foreach_copy_(into, out_of, non_blocking=True)


@contextmanager
def small_pieces() -> Iterator[None]:
    """A turnstile can only stand between pieces: they are made as small as the shortest distance."""
    size = buckets.PASSING_BYTES
    buckets.PASSING_BYTES = min(one.after_bytes for one in TURNSTILES if one.after_bytes)  # type: ignore[misc]
    try:
        yield
    finally:
        buckets.PASSING_BYTES = size  # type: ignore[misc]


# -- behind a gigabyte


def look_at_waits() -> dict[str, dict[str, list[float]]]:
    """Seconds that a copy of a few bytes waits behind a base on its way, and that the base takes."""
    source = torch.zeros(BASE_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty(BASE_BYTES, dtype=torch.uint8, pin_memory=True)
    own, small, other = torch.ones(16, device="cuda"), torch.zeros(16).pin_memory(), torch.cuda.Stream()
    lane, base = shape.make_lane(source.device), shape.Run(0, BASE_BYTES, source)
    found: dict[str, dict[str, list[float]]] = {one.name: {"waits_s": [], "base_s": []} for one in TURNSTILES}
    for look in range(LOOKS):
        for turnstile in TURNSTILES:
            torch.cuda.synchronize()
            with timed() as whole:
                with standing(turnstile), torch.cuda.stream(lane.stream):
                    base.leave(lane, target, 0, BASE_BYTES)
                with timed() as wait, torch.cuda.stream(other):
                    small.copy_(own, non_blocking=True)
                    other.synchronize()
                lane.drain()
            if look:
                found[turnstile.name]["waits_s"].append(wait.seconds)
                found[turnstile.name]["base_s"].append(whole.seconds)
    return found


# -- beside training


def bench_turnstiles(names: list[str], scratch: Path, deadline: float) -> Iterator[tuple[str, dict[str, Any]]]:
    def one(name: str) -> Iterator[dict[str, Any]]:
        entry: dict[str, Any] = {"title": name, "waits": {}, "modes": {}, "errors": {}, "whole": False}
        if gpu_models.DEVICE == "cuda":
            entry["waits"] = look_at_waits()
            for turnstile, found in entry["waits"].items():
                waits, base = Stat(found["waits_s"]), Stat(found["base_s"])
                print(f"{turnstile:22} waits {waits.text(1e3)} ms, a base {base.text(1e3)} ms", flush=True)
            let_go()
        else:
            print(NO_DEVICE, flush=True)
        case = make_case(name)
        entry["title"] = case.title
        torch.backends.cudnn.benchmark = True
        step_s = step_seconds(case)
        for mode in MODES:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no time was left for {mode.name} and what comes after it")
            ways = Ways(case, mode, scratch)
            try:
                with limited(deadline - time.monotonic() + MODE_S), small_pieces():
                    way = ways.at(1)
                yield from _beside_training(case, way, step_s, entry, deadline)
            except Exception as error:
                traceback.print_exc()
                entry["errors"][mode.name] = one_line(error)
                yield entry
            finally:
                ways.close()
            let_go()
        yield {**entry, "whole": True}

    for name in names:
        yield from each(name, one)
    Ways.until_removed()


def _beside_training(
    case: Case, way: Method, step_s: float, entry: dict[str, Any], deadline: float
) -> Iterator[dict[str, Any]]:
    steps, plain = (max(3, round(seconds / step_s)) for seconds in (BLOCK_S, PLAIN_S))
    steps = min(200, max(steps, round(way.least_s / step_s)))
    found = entry["modes"][way.name] = {one.name: {"kept_s": [], "plain_s": []} for one in TURNSTILES}
    way.begin(1)
    way.block(steps)  # the first still has what a beginning has
    began = time.monotonic()
    end = min(deadline, began + MODE_S)
    for round_ in range(ROUNDS):
        now = time.monotonic()
        if round_ >= LEAST_ROUNDS and now + (now - began) / round_ > end:
            break
        at = round_ * len(TURNSTILES) // ROUNDS
        for turnstile in TURNSTILES[at:] + TURNSTILES[:at]:
            with standing(turnstile):
                kept_s = way.block(steps)
            plain_s = way.plain(min(200, plain))
            found[turnstile.name]["kept_s"].append(kept_s)
            found[turnstile.name]["plain_s"].append(plain_s)
            said = f"{plain_s * 1e3:.2f} -> {kept_s * 1e3:.2f} ms, {kept_s / plain_s - 1:+.2%}"
            print(f"{case.title:28} {way.name:20} {turnstile.name:22} {said}", flush=True)
        yield entry
    print(f"{way.name}: {'; '.join(way.result().troubles)}", flush=True)


# -- what is said about it


NO_DEVICE = "Without a device no copy leaves one: no turnstile stands anywhere, and these numbers mean nothing. "


def turnstiles_report(report: Report, models: dict[str, Any]) -> None:
    for entry in models.values():
        if entry.get("waits"):
            report.tables.append(_waits_table(entry["waits"]))
        for mode, found in entry.get("modes", {}).items():
            table = _mode_table(entry["title"], mode, found)
            table.note = ("" if entry["waits"] else NO_DEVICE) + table.note
            report.tables.append(table)
        failed = [[mode, why] for mode, why in entry.get("errors", {}).items()]
        if failed:
            report.tables.append(Table("Modes that failed", ["mode", "why"], failed))


def _waits_table(waits: dict[str, dict[str, list[float]]]) -> Table:
    table = Table(
        f"Behind {BASE_BYTES / MB:.0f} MB on their way to the host",
        ["turnstile", "a copy of 64 bytes waits, ms", "the base takes, ms", "GB/s"],
        note="Nothing computes. The copy is queued on a stream of its own right after the base is; what the host needs "
        "to queue a base is not in its wait, and is in what the base takes. Median, lowest and highest.",
    )
    for turnstile, found in waits.items():
        rate = Stat([BASE_BYTES / seconds / 1e9 for seconds in found["base_s"]])
        table.rows.append([
            turnstile, Stat(found["waits_s"]).text(1e3), Stat(found["base_s"]).text(1e3), rate.text(),
        ])  # fmt: skip
    return table


def _mode_table(title: str, mode: str, found: dict[str, dict[str, list[float]]]) -> Table:
    table = Table(
        f"{title}: {mode}, every step",
        ["turnstile", "ms/step without", "ms/step with", "overhead %"],
        note="A block with captures and one without, next to each other, in each round; in each round another "
        "turnstile comes first. Pieces have 16 MB for all of them, in mode host; Everstep's own have 32. Median, "
        "lowest and highest.",
    )
    for turnstile, one in found.items():
        over = Stat([on / off - 1 for on, off in zip(one["kept_s"], one["plain_s"], strict=True)])
        table.rows.append([
            turnstile, Stat(one["plain_s"]).text(1e3), Stat(one["kept_s"]).text(1e3), over.text(100, 2),
        ])  # fmt: skip
    return table
