"""What the log costs on one CUDA device: dense, and behind a compressor. The door is bench/log.py --gpu.

Plain blocks and guarded ones take turns on one model in one process (bench/log_turns.py). The models are those of
bench/gpu_models.py.
"""

from __future__ import annotations

import gc
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import gpu_models
import torch
from common import MB, Report, Stat, Table, Target
from gpu_models import Case, sync
from log_turns import ADAM_BYTES, Turns, Watched, Way, over, sizes, steps_between_values, take_turns, troubles

import everstep
from everstep.capture.compress import TopK

RATIO = 0.01
PLAIN, LOG, ALONE, PER_TENSOR = "plain", "log", "compressor alone", "torch.topk per tensor"
BLOCK_S = 1.0
SHM = Path("/dev/shm")
SHM_ROOM_BYTES = 48 * 2**30  # for a log of half a gigabyte a step

# The dense log needs more than most disks take, and then steps are kept by bases. A folder in shared memory stands for
# a disk that is fast enough; only for GPT-2, since the records of BERT-large would fill it.
KINDS = {"gpt2": ("dense", "dense, disk in memory", "topk"), "bert": ("dense", "topk")}


@dataclass
class Found:
    """One model with one kind of log."""

    ways: dict[str, Any] = field(default_factory=dict)
    cuts: int = 0
    missed: int = 0  # steps that have no record
    stall_s: float = 0.0  # host time in cuts and gates, per step that the log saw
    values_apart: int = 0
    steps_per_base: int = 0
    bytes: dict[str, float] = field(default_factory=dict)
    troubles: list[str] = field(default_factory=list)
    error: str = ""

    def over(self, way: str, base: str) -> Stat:
        return over({name: Turns(**values) for name, values in self.ways.items()}, way, base)

    def step_s(self, way: str) -> float:
        return Stat(self.ways[way]["step_s"]).median


def per_tensor(optimizer: torch.optim.Optimizer) -> Callable[..., None]:
    """The usual way: a small top-k for every tensor, each with a residual of its own (as in bench/compress.py)."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    residuals = [torch.zeros_like(p).view(-1) for p in parameters]

    @torch.no_grad()
    def squeeze(*_: object) -> None:
        for parameter, residual in zip(parameters, residuals, strict=True):
            gradient = parameter.grad.view(-1)
            residual.add_(gradient)
            k = max(1, round(RATIO * residual.numel()))
            chosen = torch.topk(residual.abs(), k, sorted=False).indices
            values = residual[chosen]
            residual[chosen] = 0
            gradient.zero_()
            gradient[chosen] = values

    return squeeze


def steps_in(case: Case, block_s: float) -> int:
    began = time.perf_counter()
    for _ in range(5):
        case.step()
    sync()
    return max(5, min(40, round(block_s / ((time.perf_counter() - began) / 5))))


def bench_kind(case: Case, kind: str, directory: Path, rounds: int, block_s: float) -> Found:
    steps = steps_in(case, block_s)
    compressor = TopK(RATIO) if kind == "topk" else None
    run = everstep.guard(
        case.model, case.optimizer, dir=directory, strategy="log", compress=compressor,
        tiers=[everstep.Disk(every="1h")], linger="1s", keep=1,
    )  # fmt: skip
    watched, found = Watched(run), Found()
    try:
        watched.warm_up(case.step)
        ways = {PLAIN: Way()}
        if run._keeping.compression is None:
            ways[LOG] = Way(watched.done, hooks=None, settle=partial(run.wait, "durable", 60))
        else:
            found.values_apart = steps_between_values(directory)
            ways[PER_TENSOR] = Way(before=per_tensor(case.optimizer))
            ways[ALONE] = Way(run._keeping.compression.end_step, hooks=(run._keeping.compression,))
            # A block has one flush of records and residuals in it, as often as one comes in a long run.
            ways[LOG] = Way(
                watched.done, hooks=None, steps=max(steps, found.values_apart + 2), settle=partial(run.wait, "sealed")
            )
        stalled = watched.stall_s()
        turns = take_turns(ways, case.step, case.optimizer, rounds=rounds, steps=steps, sync=sync)
        status: Any = run.status()
        found.stall_s = (watched.stall_s() - stalled) / watched.cuts
        found.ways = {name: asdict(one) for name, one in turns.items()}
        found.cuts, found.missed = watched.cuts, watched.missed
        found.steps_per_base = status["steps_per_base"] or 0
        run.wait("durable", timeout=60)
        found.bytes = sizes(directory)
    finally:
        run.close()
    found.troubles = troubles(directory)
    return found


def bench(kinds: dict[str, list[str]], scratch: Path, rounds: int, budget_s: float) -> dict[str, Any]:
    deadline = time.monotonic() + budget_s
    on_device = gpu_models.DEVICE == "cuda"
    data: dict[str, Any] = {"link_bytes_s": gpu_models.link_bytes_s() if on_device else 0.0, "models": {}}
    for name in kinds:
        entry: dict[str, Any] = {"title": name, "parameters": 0, "kinds": {}}
        data["models"][name] = entry
        case = gpu_models.make_case(name)
        entry["title"], entry["parameters"] = case.title, sum(p.numel() for p in case.model.parameters())
        for kind in kinds[name]:
            found = _bench_or_say(case, kind, scratch, rounds, deadline)
            entry["kinds"][kind] = asdict(found)
            print(f"{case.title:34} {kind:22} {_line(found)}", flush=True)
        del case
        gc.collect()
        if on_device:
            torch.cuda.empty_cache()
    return data


def _bench_or_say(case: Case, kind: str, scratch: Path, rounds: int, deadline: float) -> Found:
    if time.monotonic() > deadline:
        return Found(error="no time was left")
    root, is_small = scratch, gpu_models.DEVICE != "cuda"
    if kind.endswith("disk in memory"):
        root = SHM
        if not is_small and (not SHM.is_dir() or shutil.disk_usage(SHM).free < SHM_ROOM_BYTES):
            return Found(error="shared memory is too small for it")
    directory = Path(tempfile.mkdtemp(prefix="everstep-bench-", dir=root))
    try:
        return bench_kind(case, kind, directory / "run", rounds, BLOCK_S if not is_small else 0.05)
    except Exception as error:
        traceback.print_exc()
        return Found(error=f"{type(error).__name__}: {error}")
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _line(found: Found) -> str:
    if found.error:
        return found.error
    shown = [f"{name} {found.step_s(name) * 1e3:.2f} ms" for name in found.ways]
    base = ALONE if ALONE in found.ways else PLAIN
    return (
        f"{', '.join(shown)}; log over {base} {found.over(LOG, base).text(100, 2)} %; {found.missed} of {found.cuts} "
        f"steps without a record; {'; '.join(found.troubles)}"
    )


# -- what is said about it


def report_on(report: Report, data: dict[str, Any]) -> None:
    report.data = data
    models = data["models"].values()
    kinds = [(entry, kind, Found(**values)) for entry in models for kind, values in entry["kinds"].items()]
    dense = [item for item in kinds if item[1] != "topk"]
    packed = [item for item in kinds if item[1] == "topk"]
    report.tables += [_dense_table(dense, data["link_bytes_s"]), _topk_table(packed), _bytes_table(kinds)]
    for entry, kind, found in dense:
        wanted, title = "<= 1 %", f"{entry['title']}: {kind} log, every step"
        if found.error or entry["title"].startswith("BERT"):
            wanted = wanted if found.error else "none set"
            report.targets.append(Target(title, wanted, found.error or _percent(found.over(LOG, PLAIN)), None))
            continue
        cost = found.over(LOG, PLAIN)
        said = _percent(cost) + (f", {found.missed} of {found.cuts} steps without a record" if found.missed else "")
        report.targets.append(Target(title, wanted, said, cost.median <= 0.01 and not found.missed))
    for entry, _, found in packed:
        _topk_targets(report, entry, found)


def _topk_targets(report: Report, entry: dict[str, Any], found: Found) -> None:
    half, own, size = (
        f"{entry['title']}: {what}"
        for what in ("compressor, of per tensor", "the log's own part", "bytes a step with residuals")
    )
    wanted = ("<= 0.5", "<= 0.5 %", "<= 1.2 % of an Adam checkpoint")
    if found.error:
        report.targets += [
            Target(what, w, found.error, None) for what, w in zip((half, own, size), wanted, strict=True)
        ]
        return
    ours, theirs = (found.over(way, PLAIN).median for way in (ALONE, PER_TENSOR))
    part = found.over(LOG, ALONE)
    share = a_step(found)["all but bases"] / (ADAM_BYTES * entry["parameters"])
    report.targets += [
        Target(
            half, wanted[0], f"{ours:.1%} of a step against {theirs:.1%}", ours <= theirs / 2 if theirs > 0 else None
        ),
        Target(own, wanted[1], _percent(part), part.median <= 0.005 and not found.missed),
        Target(size, wanted[2], f"{share:.2%}", share <= 0.012),
    ]


def a_step(found: Found) -> dict[str, float]:
    """Bytes on the disk for each step, as often as each kind of thing is written."""
    values = found.bytes["values"] / max(1, found.values_apart)
    base = found.bytes["base"] / max(1, found.steps_per_base)
    return {
        "record": found.bytes["record"], "values": values, "base": base, "all but bases": found.bytes["record"] + values
    }  # fmt: skip


def _percent(stat: Stat) -> str:
    return stat.text(100, 2) + " %"


def _dense_table(items: list[tuple[dict[str, Any], str, Found]], link: float) -> Table:
    table = Table(
        "Every step by the dense log",
        ["model", "log", "plain ms/step", "record MB", "link ms", "overhead", "host ms", "without a record", "remarks"],
        note="bf16 autocast. A plain block is the same loop in the same process with all hooks of Everstep off the "
        "optimizer and no run.done(); blocks take turns. Median over neighbouring blocks, with the lowest and highest. "
        f"The link moves {link / 1e9:.1f} GB/s. Bases among the records are in it, as often as the tuner has them. "
        "Steps without a record were kept by a base, or not at all, because the disk takes less than the log makes; "
        "`disk in memory` writes to a folder in shared memory.",
    )
    for entry, kind, found in items:
        if found.error:
            table.rows.append([entry["title"], kind, *["-"] * 6, found.error])
            continue
        size = found.bytes["record"]
        table.rows.append([
            entry["title"], kind, f"{found.step_s(PLAIN) * 1e3:.1f}", f"{size / MB:.0f}",
            f"{size / link * 1e3:.1f}" if link else "-", _percent(found.over(LOG, PLAIN)),
            f"{found.stall_s * 1e3:.2f}", f"{found.missed} of {found.cuts}", "; ".join(found.troubles),
        ])  # fmt: skip
    return table


def _topk_table(items: list[tuple[dict[str, Any], str, Found]]) -> Table:
    table = Table(
        f"Every step by the log of TopK({RATIO})",
        [
            "model", "plain ms/step", "torch.topk per tensor", "compressor alone", "compressor and log",
            "the log's own part", "without a record", "remarks",
        ],
        note="Overhead over plain blocks; the log's own part is compressor and log over the compressor alone, and has "
        "one flush of records and residuals a block in it. Per tensor: torch.topk with a residual for every tensor, "
        "nothing kept. All four take turns on one model in one process.",
    )  # fmt: skip
    for entry, _, found in items:
        if found.error:
            table.rows.append([entry["title"], *["-"] * 6, found.error])
            continue
        table.rows.append([
            entry["title"], f"{found.step_s(PLAIN) * 1e3:.1f}",
            *(_percent(found.over(way, PLAIN)) for way in (PER_TENSOR, ALONE, LOG)),
            _percent(found.over(LOG, ALONE)), f"{found.missed} of {found.cuts}", "; ".join(found.troubles),
        ])  # fmt: skip
    return table


def _bytes_table(items: list[tuple[dict[str, Any], str, Found]]) -> Table:
    table = Table(
        "Bytes a step on the disk",
        ["model", "log", "record MB", "residuals MB", "bases MB", "all MB", "all but bases, of an Adam checkpoint"],
        note="Record: as it lies in the log, frame and all. Residuals: one save of them, over the half ring of records "
        "that gather before one. Bases: one, over the steps that the tuner has between them. A checkpoint of Adam has "
        f"{ADAM_BYTES} bytes a parameter.",
    )
    for entry, kind, found in items:
        if found.error:
            table.rows.append([entry["title"], kind, *["-"] * 4, found.error])
            continue
        each = a_step(found)
        whole = ADAM_BYTES * entry["parameters"]
        table.rows.append([
            entry["title"], kind, *(f"{each[what] / MB:.3g}" for what in ("record", "values", "base")),
            f"{(each['all but bases'] + each['base']) / MB:.3g}", f"{each['all but bases'] / whole:.2%}",
        ])  # fmt: skip
    return table
