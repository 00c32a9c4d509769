"""Everstep beside its peers on a CPU: what the loop pays, when it is durable, how it comes back.

    python bench/cpu.py [--quick] [--out DIR] [--scratch DIR]

Each part runs in a process of its own and prints a line per finished unit, which moves the progress bar. What is timed
is never the first of its kind: the first round warms up and has its memory watched.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from common import MB, Report, Stat, Table, Target, machine, timed
from torch import Tensor, nn

HERE = Path(__file__).parent

# -- states


def gpt2_shapes() -> dict[str, tuple[int, ...]]:
    """The 148 tensors of GPT-2 124M."""
    d = 768
    layer = {
        "ln1w": (d,), "ln1b": (d,), "attnw": (d, 3 * d), "attnb": (3 * d,), "projw": (d, d), "projb": (d,),
        "ln2w": (d,), "ln2b": (d,), "fcw": (d, 4 * d), "fcb": (4 * d,), "fc2w": (4 * d, d), "fc2b": (d,),
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {"wte": (50257, d), "wpe": (1024, d), "lnfw": (d,), "lnfb": (d,)}
    return shapes | {f"h{i}_{name}": shape for i in range(12) for name, shape in layer.items()}


def even_shapes(tensors: int, size: int) -> dict[str, tuple[int, ...]]:
    return {f"t{i}": (size // 4 // tensors,) for i in range(tensors)}


# -- memory


def memory_bytes(pids: list[int]) -> int:
    """What these processes hold: private pages of each, and shared pages once."""
    private = sum(_status(pid, "RssAnon") for pid in pids)
    return private + max(_status(pid, "RssShmem") for pid in pids)


def _status(pid: int, field: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":")), 0)


@contextmanager
def watched(pids: Any) -> Iterator[list[int]]:
    """The highest memory while inside, in the first place of the list."""
    peak, ending = [memory_bytes(pids())], threading.Event()

    def look() -> None:
        while not ending.wait(0.005):
            peak[0] = max(peak[0], memory_bytes(pids()))

    thread = threading.Thread(target=look)
    thread.start()
    yield peak
    ending.set()
    thread.join()


# -- part: states

ROUNDS_S = 0.8
WARM_STEPS = 500  # until buffers of all threads have had their size


def rounds(most: int) -> Iterator[int]:
    """Once at least, and again while there is time: the slowest peers shall not take the whole five minutes."""
    end = time.monotonic() + ROUNDS_S
    for count in range(most):
        if count and time.monotonic() > end:
            return
        yield count


def compute(seconds: float) -> None:
    """Something that keeps all cores busy, as a forward and backward pass does."""
    a = torch.randn(512, 512)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        a = torch.tanh(a @ a)


def bench_state(name: str, scratch: Path, reps: int) -> dict[str, Any]:
    import peers

    big = name == "gpt2"
    shapes = gpt2_shapes() if big else even_shapes(int(name), 256 * MB)
    subject = peers.Subject(shapes, adam=big)
    results: dict[str, Any] = {}
    for kind in [*peers.PEERS, peers.Everstep]:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        before = memory_bytes([os.getpid()])
        saver = kind(subject, scratch)
        ours = isinstance(saver, peers.Everstep)
        try:
            results[saver.name] = _bench_saver(saver, scratch / "peer", reps, 1.0 if big else 0.3, before)
            if ours:
                results["raw"] = bench_raw(saver, scratch, 4)
        finally:
            saver.close()
        del saver
        peers.empty(scratch / "peer")
        unit(f"{name}: {kind.name}")
    return results


def _bench_saver(saver: Any, where: Path, reps: int, compute_s: float, memory_before: int) -> dict[str, Any]:
    import peers

    blocked, at_once, durable, restore = Stat(), Stat(), Stat(), Stat()
    with watched(saver.pids) as peak:
        saver.save(peers.empty(where))
        saver.step()
        saver.durable(where)
        saver.warm_up()
    for _ in rounds(reps):
        if saver.asynchronous:
            with timed() as call:
                saver.save(peers.empty(where))
            compute(compute_s)
            blocked.values.append(call.seconds + saver.step())
            saver.durable(where)
        with timed() as whole:
            with timed() as call:
                saver.save(peers.empty(where))
            waited = saver.step() if saver.asynchronous else 0.0
            saver.durable(where)
        at_once.values.append(call.seconds + waited)
        durable.values.append(whole.seconds)
        if not saver.asynchronous:
            saver.step()
    files = saver.files(where)
    size = sum(path.stat().st_size for path in files)
    for _ in rounds(reps):
        peers.drop_cache(files)
        saver.subject.optimizer.state.clear()  # as after a restart
        peers.touch(2 * size)  # for what is read, and what it is read into
        with timed() as whole:
            saver.restore(where)
        restore.values.append(whole.seconds)
    return {
        "blocked": blocked.values or at_once.values, "at_once": at_once.values, "durable": durable.values,
        "restore": restore.values, "bytes": size, "memory": peak[0] - memory_before,
    }  # fmt: skip


def bench_raw(saver: Any, scratch: Path, reps: int) -> dict[str, Any]:
    """Everstep's write and read beside the disk's own, each first in turn."""
    import peers

    found: dict[str, list[float]] = {key: [] for key in ("write", "raw_write", "read", "raw_read")}
    data = memoryview(saver.run._capture.arena().slots[0])

    def write() -> float:
        with timed() as timer:
            saver.run.wait("durable")
        return timer.seconds

    def read() -> float:
        with timed() as timer:
            image = saver.fetch()
        del image
        return timer.seconds

    def settle() -> None:
        """Neither shall pay for what the other left: the keeper deletes the step before, the bench its raw file."""
        (scratch / "raw.bin").unlink(missing_ok=True)
        time.sleep(0.3)
        peers.sync_folder(scratch)
        time.sleep(0.1)

    for rep in range(reps + 1):
        saver.step()
        saver.save(scratch)
        saver.run.wait("sealed")
        settle()
        turns = [("write", write), ("raw_write", lambda: peers.raw_write(scratch / "raw.bin", data))]
        for key, turn in turns if rep % 2 else reversed(turns):
            found[key].append(turn())
            settle()
        file = max(saver.files(scratch), key=lambda path: path.stat().st_size)
        turns = [("read", read), ("raw_read", lambda file=file: peers.raw_read(file))]
        for key, turn in turns if rep % 2 else reversed(turns):
            peers.touch(len(data))
            found[key].append(turn())
    return {**{key: values[1:] for key, values in found.items()}, "bytes": len(data)}


# -- part: training


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(seen.transpose(1, 2).reshape(b, t, c))
        return x + self.down(nn.functional.gelu(self.up(self.ln2(x))))


class Gpt(nn.Module):
    def __init__(self, *, vocab: int, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.ln, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        return self.head(self.ln(self.blocks(x)))


TURNS = ("none", "copy", "memory", "disk")


def bench_training(scratch: Path, turns: int) -> dict[str, Any]:
    """Short blocks of steps take turns: no capture, a plain copy of all state by the loop, captures that stay in
    memory, and captures one of which is written to disk."""
    import everstep

    torch.set_flush_denormal(True)
    torch.manual_seed(0)
    model = Gpt(vocab=256, width=384, layers=6, heads=6, length=128)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    steps, vocab = 4, 256
    run = everstep.guard(
        model, optimizer, dir=scratch / "run", tiers=[everstep.Disk(every=2 * steps)], linger="1s", keeper="process"
    )

    def one_step() -> None:
        tokens = torch.randint(0, vocab, (8, 129))
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    one_step()
    run.done()
    live = [p.detach() for p in model.parameters()]
    live += [t for state in optimizer.state.values() for t in state.values()]
    copies = [torch.empty_like(t).copy_(t) for t in live]

    def block(kind: str) -> list[float]:
        seconds = []
        for _ in range(steps):
            with timed() as timer:
                one_step()
                if kind == "copy":
                    torch._foreach_copy_(copies, live)
                elif kind != "none":
                    run.done()
            seconds.append(timer.seconds)
        if kind == "disk":
            run.wait("durable")  # nothing of ours is under way when the next block begins
        elif kind == "memory":
            run.wait("sealed")
        return seconds

    while run.step % (2 * steps):
        one_step()
        run.done()
    run.wait("durable")
    found: dict[str, list[float]] = {kind: [] for kind in TURNS}
    stall_before, captures_before = run.status()["stall_s"], run.step
    for turn in range(turns + 1):  # "memory" is always the next capture after "disk": the eighth step is written
        for place in range(len(TURNS)):
            kind = ("none", "memory", "copy", "disk")[place] if turn % 2 else ("memory", "none", "disk", "copy")[place]
            seconds = block(kind)
            if turn:
                found[kind] += seconds
        unit(f"training: turn {turn}")
    stall = (run.status()["stall_s"] - stall_before) / (run.step - captures_before)  # type: ignore[operator]
    size = run.status()["arena_bytes"] / 3  # type: ignore[operator]
    run.close()
    return {
        "parameters": sum(p.numel() for p in model.parameters()), "bytes": size, "steps": steps, "stall": stall,
        "seconds": found,
    }  # fmt: skip


# -- part: memory over many steps, and the command line


def bench_memory(scratch: Path, steps: int) -> dict[str, Any]:
    import everstep
    from everstep.keeper.client import keeper_pid

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    run = everstep.guard(model, optimizer, dir=scratch / "run", tiers=[everstep.Disk(every=10)], linger="1s")
    found: dict[str, dict[str, int]] = {}
    for step in range(1, steps + 1):
        model(torch.randn(32, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        run.done()
        if step in (WARM_STEPS, steps):
            run.wait("durable")
            keeper = keeper_pid(str(run.status()["run"])) or 0
            found[str(step)] = {
                "trainer": _status(os.getpid(), "RssAnon"), "keeper": _status(keeper, "RssAnon"),
                "shared": _status(os.getpid(), "RssShmem"),
            }  # fmt: skip
    run.close()
    unit("memory over many steps")
    found["ls"] = _bench_ls(scratch / "run")  # type: ignore[assignment]
    unit("everstep ls")
    return found


def _bench_ls(directory: Path) -> list[float] | str:
    """As an installed package has it: with its bytecode, which the first round writes, whatever this shell forbids."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    ls = [sys.executable, "-m", "everstep.cli", "ls", str(directory)]
    seconds = []
    for _ in range(6):
        with timed() as timer:
            answer = subprocess.run(ls, env=kept, capture_output=True, text=True)
        if answer.returncode != 0:
            return (answer.stderr.strip().splitlines() or ["it failed"])[-1].replace(sys.executable, "python")
        seconds.append(timer.seconds)
    return seconds[1:]


# -- the parts together


def unit(text: str) -> None:
    print(f"unit {text}", flush=True)


def parts(quick: bool) -> dict[str, int]:
    """Part -> units of work that it reports."""
    states = {"64": 6, "1024": 6, "8192": 6} if not quick else {"64": 6}
    return ({} if quick else {"gpt2": 6}) | states | {"training": 3 if quick else 5, "memory": 2}


def run_part(part: str, scratch: Path, quick: bool) -> dict[str, Any]:
    if part == "training":
        return bench_training(scratch, 2 if quick else 4)
    if part == "memory":
        return bench_memory(scratch, WARM_STEPS + (400 if quick else 2000))
    return bench_state(part, scratch, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a minute: one small state, few steps")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--scratch", type=Path, default=None, help="a directory on the disk to measure")
    parser.add_argument("--only", default="", help="parts, with commas between; prints their data and writes nothing")
    parser.add_argument("--part", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part:
        result = run_part(given.part, given.scratch, given.quick)
        print("result " + json.dumps(result), flush=True)
        return
    wanted = {k: v for k, v in parts(given.quick).items() if not given.only or k in given.only.split(",")}
    with tempfile.TemporaryDirectory(prefix="everstep-bench-", dir=given.scratch) as scratch:
        data = run_all(wanted, Path(scratch), given.quick)
    if given.only:
        print(json.dumps(data, indent=1))
        return
    report = make_report(data, given.quick)
    report.save(given.out, "cpu" if not given.quick else "cpu-quick")
    print(report.markdown())


def run_all(wanted: dict[str, int], scratch: Path, quick: bool) -> dict[str, Any]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    data: dict[str, Any] = {}
    with Progress(TextColumn("{task.description:45}"), BarColumn(), TimeElapsedColumn()) as progress:
        task = progress.add_task("starting", total=sum(wanted.values()))
        for part in wanted:
            folder = scratch / part
            folder.mkdir()
            arguments = ["--part", part, "--scratch", str(folder), *(["--quick"] if quick else [])]
            child = subprocess.Popen(
                [sys.executable, __file__, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            assert child.stdout is not None and child.stderr is not None
            for line in child.stdout:
                word, _, rest = line.strip().partition(" ")
                if word == "unit":
                    progress.update(task, advance=1, description=rest)
                elif word == "result":
                    data[part] = json.loads(rest)
            if child.wait() != 0:
                raise SystemExit(f"part {part} failed (exit {child.returncode}):\n{child.stderr.read()}")
    return data


# -- what is said about it


def make_report(data: dict[str, Any], quick: bool) -> Report:
    report = Report(
        title="Everstep and its peers on a CPU",
        command="make bench" if not quick else "python bench/cpu.py --quick",
        machine=machine(),
        data=data,
    )
    for part in ("gpt2", "64", "1024", "8192"):
        if part in data:
            report.tables.append(_state_table(part, data[part]))
    report.tables += [_raw_table(data), _training_table(data["training"]), _memory_table(data["memory"])]
    report.targets = _targets(data)
    return report


def _state_table(part: str, found: dict[str, Any]) -> Table:
    title = "1.5 GB: 124M float32 parameters with AdamW" if part == "gpt2" else f"256 MB in {int(part):,} tensors"
    table = Table(
        title,
        ["", "blocked ms", "blocked ms, no compute between", "durable s", "restore s", "MB", "peak extra MB"],
        note="" if part != "gpt2" else _STATE_NOTE,
    )
    for name, row in found.items():
        if name != "raw":
            table.rows.append([
                name, Stat(row["blocked"]).text(1e3), Stat(row["at_once"]).text(1e3), Stat(row["durable"]).text(),
                Stat(row["restore"]).text() + ("" if name == "Everstep" else " (unverified)"),
                f"{row['bytes'] / MB:.0f}", f"{row['memory'] / MB:.0f}",
            ])  # fmt: skip
    return table


_STATE_NOTE = (
    "Medians, with the lowest and highest. Blocked: the call, and what the next optimizer step then waits for the copy "
    "(Everstep: done() and the gate; asynchronous staging: its staging future), with compute on all cores between the "
    "two (1 s; 0.3 s for 256 MB), and with none. Durable: from the call until the bytes and their names are synced "
    "(torch.save and safetensors are synced by the bench, DCP's metadata and directory too). Restore: from the disk, "
    "page cache dropped, into the model and optimizer, after so much memory was taken and freed that nobody waits for "
    "the host of a virtual machine; only Everstep checks the bytes. Peak extra: private memory of trainer and keeper "
    "and shared memory, beyond the state itself; Everstep's is its three slots, taken once."
)


def _raw_table(data: dict[str, Any]) -> Table:
    table = Table(
        "The disk's own speed",
        [
            "bytes",
            "Everstep write GB/s",
            "raw write GB/s",
            "share",
            "Everstep verified read GB/s",
            "raw read GB/s",
            "share",
        ],
        note="Taking turns in one run. Raw: O_DIRECT, 4 MiB at a time, four threads, fsync; reads into fresh memory "
        "in large pages, as ours do. Before each read as much memory was taken and freed, so that nobody waits for "
        "the host of a virtual machine. "
        "Everstep: from wait() on a sealed step until it is committed; from a survey until every byte is checked.",
    )
    for part in ("gpt2", "64", "1024", "8192"):
        if part in data:
            raw = data[part]["raw"]
            speed = {key: Stat([raw["bytes"] / 1e9 / s for s in raw[key]]) for key in _RAW_KEYS}
            table.rows.append([
                f"{raw['bytes'] / MB:.0f} MB" + ("" if part == "gpt2" else f" in {int(part):,} tensors"),
                speed["write"].text(), speed["raw_write"].text(), _share(raw, "write").text(100) + " %",
                speed["read"].text(), speed["raw_read"].text(), _share(raw, "read").text(100) + " %",
            ])  # fmt: skip
    return table


_RAW_KEYS = ("write", "raw_write", "read", "raw_read")


def _share(raw: dict[str, Any], key: str) -> Stat:
    return Stat([theirs / ours for ours, theirs in zip(raw[key], raw[f"raw_{key}"], strict=True)])


def _overheads(found: dict[str, Any], kind: str) -> Stat:
    """Of each turn, one: its block against the block without anything."""
    n = found["steps"]
    with_, without = (
        [sum(found["seconds"][k][i : i + n]) for i in range(0, len(found["seconds"][k]), n)] for k in (kind, "none")
    )
    return Stat([a / b - 1 for a, b in zip(with_, without, strict=True)])


def _overhead(found: dict[str, Any], kind: str) -> float:
    """The median over all steps is the first word on it; single turns show the spread."""
    return Stat(found["seconds"][kind]).median / Stat(found["seconds"]["none"]).median - 1


def _training_table(found: dict[str, Any]) -> Table:
    names = {
        "none": "no capture", "copy": "a plain copy by the loop", "memory": "Everstep, in memory",
        "disk": "Everstep, one of four to disk",
    }  # fmt: skip
    rows = []
    for kind in TURNS:
        turns = sorted(_overheads(found, kind).values)
        quarter = len(turns) // 4
        over = [f"{_overhead(found, kind):.1%}", f"{turns[quarter]:.1%} to {turns[-1 - quarter]:.1%}"]
        rows.append([names[kind], Stat(found["seconds"][kind]).text(1e3), *(over if kind != "none" else ["", ""])])
    return Table(
        f"Capturing every step of a GPT with {found['parameters'] / MB:.1f}M parameters",
        ["", "ms a step", "overhead", "middle half of turns"],
        rows,
        note=f"Blocks of {found['steps']} steps take turns in one process, {len(turns)} times. Overhead: median step "
        f"against median step without captures. A capture is {found['bytes'] / MB:.0f} MB and blocks the loop "
        f"{found['stall'] * 1e3:.2g} ms. Fresh tokens each step, denormals flushed.",
    )


def _memory_table(found: dict[str, Any]) -> Table:
    rows = [
        [step, *(f"{found[step][key] / MB:.1f}" for key in ("trainer", "keeper", "shared"))]
        for step in found
        if step != "ls"
    ]
    return Table("Memory over many steps of a tiny model", ["step", "trainer MB", "keeper MB", "shared MB"], rows)


def _targets(data: dict[str, Any]) -> list[Target]:
    targets = []
    sizes = [part for part in ("gpt2", "64", "1024", "8192") if part in data]
    for part in sizes:
        ours, theirs = (Stat(data[part][name]["blocked"]).median for name in ("Everstep", "DCP async_save"))
        label = "1.5 GB" if part == "gpt2" else f"{int(part):,} tensors"
        targets.append(
            Target(
                f"blocked per capture, {label}",
                "<= 1/20 of DCP async_save",
                f"1/{theirs / ours:.0f}",
                ours * 20 <= theirs,
            )
        )
    if "8192" in data:
        few, many = (Stat(data[part]["Everstep"]["blocked"]).median for part in ("64", "8192"))
        targets.append(Target("blocked, 8,192 against 64 tensors", "<= 2x", f"{many / few:.2f}x", many <= 2 * few))
    raw = data[sizes[0]]["raw"]
    for key, name, least in (("write", "durable write", 0.9), ("read", "verified restore", 0.9)):
        share = _share(raw, key)
        targets.append(Target(f"{name} against raw", f">= {least:.0%}", f"{share.median:.0%}", share.median >= least))
    ours, copy = (_overhead(data["training"], kind) for kind in ("memory", "copy"))
    targets.append(
        Target("every step of a 10M GPT, in memory", "1-4 %, as a plain copy", f"{ours:.1%} ({copy:.1%})", ours <= 0.04)
    )
    first, last = list(data["memory"])[:2]
    grown = sum(data["memory"][last].values()) - sum(data["memory"][first].values())
    targets.append(Target(f"memory flat, step {first} to {last}", "< 2 MB", f"{grown / MB:+.1f} MB", grown < 2 * MB))
    ls = data["memory"]["ls"]
    known = isinstance(ls, list)
    targets.append(
        Target(
            "everstep ls", "< 0.3 s", Stat(ls).text() + " s" if known else ls, Stat(ls).median < 0.3 if known else None
        )
    )
    return targets


if __name__ == "__main__":
    main()
