"""The same state with one rank and with several: what each is blocked, what it writes, how all come back.

The door is bench/scaling.py. DDP over gloo on loopback; ranks share the machine's cores, so beside the clock stands the
processor time of a step by all ranks, with captures and without, in blocks that take turns.
"""

from __future__ import annotations

import multiprocessing
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # once, before ranks are forked: it takes seconds
import torch.distributed as dist
from common import MB, Stat, Table, Target, timed
from peers import drop_cache
from torch import nn

import everstep
import everstep.run

WIDTH, DEPTH, BATCH = 512, 8, 64
BLOCK, TURNS, RESTORES = 5, 6, 3
_PATIENCE_S = 200.0


@dataclass(kw_only=True)
class Rank:
    """What one rank measured: of every captured step, of every block, of every restore."""

    call_s: list[float]  # on the clock,
    cut_s: list[float]  # and of the training thread's processor time
    gate_s: list[float]
    step_s: dict[str, list[float]]  # captured or plain -> a step on the clock, of each block
    processor_s: dict[str, list[float]]  # the same of processor time, by all threads of the rank
    restore_s: list[float]
    restore_processor_s: list[float]
    restored_from: str
    written: int  # bytes of its part on the disk


def measure_ranks(world: int, scratch: Path) -> list[dict[str, Any]]:
    context = multiprocessing.get_context("fork")
    answers: Any = context.Queue()
    ranks = [context.Process(target=_as_rank, args=(rank, world, scratch, answers)) for rank in range(world)]
    for rank in ranks:
        rank.start()
    found = [answers.get(timeout=_PATIENCE_S) for _ in ranks]
    for rank in ranks:
        rank.join(_PATIENCE_S)
    if any(rank.exitcode != 0 for rank in ranks):
        raise RuntimeError(f"with {world} ranks, they ended with {[rank.exitcode for rank in ranks]}")
    return [vars(one) for one in found]


def _as_rank(rank: int, world: int, scratch: Path, answers: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{scratch}/store", world), rank=rank, world_size=world)
    model, optimizer = _subject()
    run = _guard(model, optimizer, scratch)
    found = _train(run, model, optimizer)
    run.wait("durable")
    part = next((scratch / "run").glob(f"step-{run.step:010d}/rank-{rank:05d}.safetensors"))
    found.written = part.stat().st_size
    run.finish()  # memory is let go: what comes back comes from the disk
    _restore(found, scratch)
    answers.put(found)
    answers.close()
    answers.join_thread()
    dist.barrier()
    dist.destroy_process_group()


def _subject() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def _guard(model: nn.Module, optimizer: torch.optim.Optimizer, scratch: Path) -> everstep.Run:
    tiers = [everstep.Disk(every="1h")]  # on request only: no write beside what is timed
    return everstep.guard(model, optimizer, dir=scratch / "run", strategy="snapshot", tiers=tiers, linger="1s")


def _train(run: everstep.Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> Rank:
    found = Rank(
        call_s=[], cut_s=[], gate_s=[], step_s={"plain": [], "captured": []},
        processor_s={"plain": [], "captured": []}, restore_s=[], restore_processor_s=[], restored_from="", written=0,
    )  # fmt: skip

    def one_step(*, is_captured: bool, is_counted: bool) -> None:
        model(torch.randn(BATCH, WIDTH)).square().mean().backward()
        before = run._capture.stall_s
        optimizer.step()
        waited = run._capture.stall_s - before
        optimizer.zero_grad()
        if not is_captured:
            return
        began = time.thread_time()
        with timed() as call:
            run.done()
        if is_counted:
            found.cut_s.append(time.thread_time() - began)
            found.call_s.append(call.seconds)
            found.gate_s.append(waited)

    def block(kind: str, *, is_counted: bool) -> None:
        dist.barrier()
        began = time.process_time()
        with timed() as whole:
            for _ in range(BLOCK):
                one_step(is_captured=kind == "captured", is_counted=is_counted)
            if kind == "captured":
                run.wait("sealed")
        if is_counted:
            found.processor_s[kind].append((time.process_time() - began) / BLOCK)
            found.step_s[kind].append(whole.seconds / BLOCK)

    for kind in ("captured", "plain", "captured"):  # the first captures are watched, and take memory
        block(kind, is_counted=False)
    for turn in range(TURNS):
        for kind in ("captured", "plain") if turn % 2 else ("plain", "captured"):
            block(kind, is_counted=True)
    block("captured", is_counted=False)  # the last step is one that was captured
    return found


def _restore(found: Rank, scratch: Path) -> None:
    """Resume into fresh objects, and again; timed is what every rank does between survey and the last tensor."""
    resume = everstep.run.resume

    def timed_resume(*args: Any, **words: Any) -> Any:
        dist.barrier()
        began = time.process_time()
        with timed() as whole:
            resumed = resume(*args, **words)
        found.restore_processor_s.append(time.process_time() - began)
        found.restore_s.append(whole.seconds)
        assert resumed is not None
        found.restored_from = resumed.source
        return resumed

    everstep.run.resume = timed_resume
    for _ in range(RESTORES):
        if dist.get_rank() == 0:
            drop_cache([path for path in (scratch / "run").glob("step-*/*") if path.is_file()])
        _guard(*_subject(), scratch).give_up()
        dist.barrier()


# -- what is said about it


def _all(ranks: list[Rank], key: str) -> Stat:
    return Stat([value for rank in ranks for value in getattr(rank, key)])


def _blocked(ranks: list[Rank]) -> Stat:
    return Stat([a + b for rank in ranks for a, b in zip(rank.call_s, rank.gate_s, strict=True)])


def _processor(ranks: list[Rank], kind: str) -> list[float]:
    """A step's processor time by all ranks together, of each block."""
    return [sum(of_ranks) for of_ranks in zip(*(rank.processor_s[kind] for rank in ranks), strict=True)]


def _added(ranks: list[Rank]) -> Stat:
    """Processor time of a step that captures add, by all ranks, pair by pair of blocks."""
    pairs = zip(_processor(ranks, "captured"), _processor(ranks, "plain"), strict=True)
    return Stat([captured - plain for captured, plain in pairs])


def _slower(ranks: list[Rank]) -> Stat:
    first = ranks[0].step_s  # all wait for each other
    return Stat([a / b - 1 for a, b in zip(first["captured"], first["plain"], strict=True)])


def ranks_table(found: dict[int, list[Rank]]) -> Table:
    whole = sum(rank.written for rank in found[min(found)])
    table = Table(
        "Ranks",
        ["ranks", "blocked a step, ms", "of it the cut, ms", "cut, ms of a processor", "MB written by a rank",
         "of the whole", "step, ms", "longer with captures", "step, ms of a processor, all ranks",
         "captures add, ms, all ranks", "restore s", "restore, s of a processor, each rank"],
        note=f"DDP over gloo on loopback, AdamW, {whole / MB:.1f} MB of state in all, every step captured, one thread "
        f"a rank. All ranks share this machine's cores, and with more ranks than cores the clock says how they were "
        f"scheduled: processor time does so less. Blocks of {BLOCK} steps with and without captures take turns, "
        f"{TURNS} times; a block with captures ends when its last one is sealed. Restore: survey, plan, read, check "
        "and load, from the disk (page cache dropped), by all ranks at once; each needs the whole state, so that "
        "reading is n times the bytes on the same cores.",
    )  # fmt: skip
    for world, ranks in found.items():
        parts = Stat([rank.written / MB for rank in ranks])
        table.rows.append([
            str(world), _blocked(ranks).text(1e3), _all(ranks, "call_s").text(1e3), _all(ranks, "cut_s").text(1e3),
            parts.text(), f"{max(parts.values) * MB / whole:.1%}", Stat(ranks[0].step_s["plain"]).text(1e3),
            f"{_slower(ranks).text(100)} %", Stat(_processor(ranks, "plain")).text(1e3), _added(ranks).text(1e3),
            f"{_all(ranks, 'restore_s').text()}", _all(ranks, "restore_processor_s").text(),
        ])  # fmt: skip
    return table


def ranks_targets(found: dict[int, list[Rank]]) -> list[Target]:
    few, many = min(found), max(found)
    cut = _all(found[many], "cut_s")
    whole = sum(rank.written for rank in found[few])
    largest = max(rank.written for rank in found[many])
    added = {world: _added(found[world]).median for world in (few, many)}
    each = added[many] / many
    sources = {rank.restored_from for ranks in found.values() for rank in ranks}
    return [
        Target(f"{many} ranks: processor time of a cut", "<= 1 ms", f"{cut.text(1e3)} ms", cut.median <= 1e-3),
        Target(
            f"{many} ranks: the largest part that is written", f"<= 1.1/{many} of the whole",
            f"{largest / whole * many:.2f}/{many}", largest * many <= 1.1 * whole,
        ),
        Target(
            f"processor time that captures add to a step, each of {many} ranks against one of {few}", "<= 1x",
            f"{each * 1e3:.2f} against {added[few] * 1e3:.2f} ms", each <= added[few],
        ),
        Target("all restores came from", "disk", ", ".join(sorted(sources)), sources == {"disk"}),
    ]  # fmt: skip
