"""What capturing every step costs on one CUDA device, and whether a killed run ends with the same bits there.

    python bench/gpu.py [--quick] [--only resnet18,gpt2] [--out DIR] [--scratch DIR]      the overhead, six models
    python bench/gpu.py --exact                                                           kill -9, resume, compare bits

Blocks of steps with and without captures take turns on one model in one process, so every ratio comes from one run.
Random weights and inputs; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import MB, Report, Stat, Table, Target, machine, timed
from torch import Tensor, nn

import everstep
from everstep.events import Degraded, Skipped, read_events

HERE = Path(__file__).parent
DEVICE = "cuda"
BLOCK_S = 0.6  # a block of steps takes about this long,
LEAD = 3  # after as many that nobody times
MODES = ("host", "device", "disk", "log")  # disk: host, with the keeper writing all the time; log: dense records
PROTOTYPE = {"resnet18": 0.1, "vgg16": 1.8, "inception": 0.0, "alexnet": 2.3, "gpt2": 0.8}

# -- the six models of the LightCheck table, with state near its sizes


@dataclass
class Case:
    title: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[], Tensor]

    def step(self) -> None:
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def _vision(title: str, model: nn.Module, batch: int, size: int) -> Case:
    model = model.to(DEVICE, memory_format=torch.channels_last).train()
    images = torch.randn(batch, 3, size, size, device=DEVICE).to(memory_format=torch.channels_last)

    def loss() -> Tensor:
        labels = torch.randint(0, 1000, (batch,), device=DEVICE)
        return nn.functional.cross_entropy(model(images), labels)

    return Case(title, model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), loss)


def _language(title: str, model: nn.Module, batch: int, length: int, vocab: int) -> Case:
    model = model.to(DEVICE).train()

    def loss() -> Tensor:
        tokens = torch.randint(0, vocab, (batch, length), device=DEVICE)
        return model(input_ids=tokens, labels=tokens).loss

    return Case(title, model, torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True), loss)


def make_case(name: str) -> Case:
    torch.manual_seed(0)
    if name in ("gpt2", "bert"):
        import transformers

        if name == "gpt2":
            config = transformers.GPT2Config(use_cache=False)
            return _language("GPT-2 124M, AdamW, 32 x 1024", transformers.GPT2LMHeadModel(config), 32, 1024, 50257)
        config = transformers.BertConfig(
            hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
        )
        return _language("BERT-large, AdamW, 16 x 512", transformers.BertForMaskedLM(config), 16, 512, 30522)
    import torchvision.models as vision

    match name:
        case "resnet18":
            return _vision("ResNet-18, SGD momentum, 256", vision.resnet18(), 256, 224)
        case "vgg16":
            return _vision("VGG-16, SGD momentum, 128", vision.vgg16(init_weights=False), 128, 224)
        case "inception":
            model = vision.inception_v3(aux_logits=False, init_weights=False)
            return _vision("Inception-V3, SGD momentum, 128", model, 128, 299)
        case "alexnet":
            return _vision("AlexNet, SGD momentum, 1024", vision.alexnet(), 1024, 224)
    raise ValueError(f"no model is called {name}")


CASES = ("resnet18", "vgg16", "inception", "alexnet", "gpt2", "bert")

# -- overhead


@dataclass
class Row:
    """One model in one mode."""

    state_bytes: int = 0
    off_s: list[float] = field(default_factory=list)  # a step without captures, per block
    on_s: list[float] = field(default_factory=list)
    done_s: list[float] = field(default_factory=list)  # one call of run.done()
    stall_s: float = 0.0  # host time in cut and gate, per step
    skipped: int = 0
    troubles: list[str] = field(default_factory=list)
    error: str = ""

    @property
    def overhead(self) -> Stat:
        return Stat([on / off - 1 for on, off in zip(self.on_s, self.off_s, strict=True)])


def bench_mode(case: Case, mode: str, directory: Path, pairs: int) -> Row:
    row = Row()
    disk = everstep.Disk(every=1 if mode == "disk" else "1h")
    run = everstep.guard(
        case.model, case.optimizer, dir=directory, mode="device" if mode == "device" else "host",
        strategy="log" if mode == "log" else "snapshot", tiers=[disk], linger="1s", keep=1,
    )  # fmt: skip
    try:
        for _ in range(6):  # the first captures make the arena and are watched for writes that pass by the gates
            case.step()
            run.done()
        run.wait("durable")
        with timed() as timer:
            _steps(case, 5)
        steps = max(5, min(60, round(BLOCK_S / (timer.seconds / 5))))
        before = run.status()
        for pair in range(pairs):
            for capture in (pair % 2 == 0, pair % 2 == 1):
                if capture:
                    row.on_s.append(_block(case, steps, partial(_done, run, row.done_s)))
                    run.wait("durable" if mode == "disk" else "sealed")
                else:
                    row.off_s.append(_block(case, steps, lambda: None))
        after = run.status()
        row.stall_s = (after["stall_s"] - before["stall_s"]) / max(1, after["step"] - before["step"])  # type: ignore[operator]
        row.state_bytes = run._capture.arena().slot_bytes  # type: ignore[union-attr]
    finally:
        run.close()
    events = read_events(directory)
    row.skipped = sum(isinstance(event, Skipped) for event in events)
    row.troubles = sorted({f"{event.what}: {event.reason}" for event in events if isinstance(event, Degraded)})
    return row


def _steps(case: Case, steps: int) -> None:
    torch.cuda.synchronize()
    for _ in range(steps):
        case.step()
    torch.cuda.synchronize()


def _done(run: everstep.Run, done_s: list[float]) -> None:
    with timed() as call:
        run.done()
    done_s.append(call.seconds)


def _block(case: Case, steps: int, after: Callable[[], None]) -> float:
    """Seconds a step of the training stream, from the middle of a loop: the first steps fill its queue, untimed."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    for at in range(LEAD + steps):
        if at == LEAD:
            begin.record()
        case.step()
        after()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / steps


def link_bytes_s() -> float:
    """Device to pinned host memory, as fast as it goes."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    rates = []
    for _ in range(4):
        torch.cuda.synchronize()
        with timed() as timer:
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
        rates.append(source.nbytes / timer.seconds)
    return max(rates)


def bench_overhead(names: list[str], scratch: Path, pairs: int, budget_s: float) -> dict[str, Any]:
    deadline = time.monotonic() + budget_s
    found: dict[str, Any] = {"link_bytes_s": link_bytes_s(), "models": {}}
    print(f"link: {found['link_bytes_s'] / 1e9:.1f} GB/s", flush=True)
    for name in names:
        modes: dict[str, Any] = {}
        title = name
        try:
            case = make_case(name)
            title = case.title
            torch.backends.cudnn.benchmark = True
            _steps(case, 5)
            for mode in MODES:
                if time.monotonic() > deadline:
                    modes[mode] = asdict(Row(error="no time was left"))
                    continue
                modes[mode] = _bench_or_say(case, mode, scratch / f"{name}-{mode}", pairs)
                print(f"{title:34} {mode:7} {_line(Row(**modes[mode]))}", flush=True)
            del case
        except Exception as error:
            traceback.print_exc()
            modes = {mode: asdict(Row(error=f"{type(error).__name__}: {error}")) for mode in MODES}
        found["models"][name] = {"title": title, "modes": modes}
        gc.collect()
        torch.cuda.empty_cache()
    return found


def _bench_or_say(case: Case, mode: str, directory: Path, pairs: int) -> dict[str, Any]:
    try:
        return asdict(bench_mode(case, mode, directory, pairs))
    except Exception as error:
        traceback.print_exc()
        return asdict(Row(error=f"{type(error).__name__}: {error}"))


def _line(row: Row) -> str:
    if row.error:
        return row.error
    return (
        f"{row.state_bytes / MB:6.0f} MB  {Stat(row.off_s).median * 1e3:7.2f} ms a step  overhead "
        f"{row.overhead.text(100, 2)} %  done() {Stat(row.done_s).median * 1e3:.2f} ms  "
        f"host {row.stall_s * 1e3:.2f} ms  skipped {row.skipped}  {'; '.join(row.troubles)}"
    )


def overhead_report(report: Report, found: dict[str, Any]) -> None:
    link = found["link_bytes_s"]
    table = Table(
        "Overhead of capturing every step",
        ["model", "state MB", "ms/step", "link ms", *(f"{m} %" for m in MODES), "prototype %", "done() ms", "host ms"],
        note=f"bf16 autocast. Median over pairs of neighbouring blocks, with the lowest and highest, by events on the "
        f"training stream; each block begins with {LEAD} steps that nobody times, so that it is a part of a long loop. "
        f"The link moves {link / 1e9:.1f} GB/s. Modes: host; device (through spare device memory); disk (host, the "
        "keeper writing all the time). done() is its median call; host is all time in cut and gate a step, in which "
        "the device may still have work queued.",
    )  # fmt: skip
    for name, entry in found["models"].items():
        rows = {mode: Row(**values) for mode, values in entry["modes"].items()}
        base = rows["host"]
        cells = [_cell(rows[mode]) for mode in MODES]
        if base.error:
            table.rows.append([entry["title"], "-", "-", "-", *cells, str(PROTOTYPE.get(name, "-")), "-", "-"])
            continue
        step, link_s = Stat(base.off_s).median, base.state_bytes / link
        table.rows.append([
            entry["title"], f"{base.state_bytes / MB:.0f}", f"{step * 1e3:.1f}", f"{link_s * 1e3:.1f}", *cells,
            str(PROTOTYPE.get(name, "-")), f"{Stat(base.done_s).median * 1e3:.2f}", f"{base.stall_s * 1e3:.2f}",
        ])  # fmt: skip
        fits = link_s <= 0.8 * step
        best = min((row for row in rows.values() if not row.error), key=lambda row: row.overhead.median)
        least = 0.01 if fits else 0.03
        report.targets.append(
            Target(
                entry["title"],
                f"<= {least:.0%}" + ("" if fits else ", at the link's limit"),
                f"host {base.overhead.median:.1%}, best mode {best.overhead.median:.1%}",
                base.overhead.median <= least,
            )
        )
    report.tables.append(table)


def _cell(row: Row) -> str:
    if row.error:
        return row.error
    remarks = [f"{row.skipped} skipped"] * bool(row.skipped) + row.troubles
    return row.overhead.text(100, 2) + (f" [{'; '.join(remarks)}]" if remarks else "")


# -- exactness

STEPS, KILLED_IN = 20, 13


class Examples(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, vision: bool) -> None:
        generator = torch.Generator().manual_seed(1)
        shape, count = ((3, 224, 224), 64) if vision else ((64,), 256)
        self.inputs = (
            torch.randn(count, *shape, generator=generator)
            if vision
            else torch.randint(0, 1000, (count, *shape), generator=generator)
        )
        self.labels = torch.randint(0, 1000, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.labels[index]


def _small(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Small enough for seconds; dropout is on, so that random state counts."""
    if name in ("gpt2", "bert"):
        import transformers

        config: Any
        if name == "gpt2":
            config = transformers.GPT2Config(
                vocab_size=1000, n_embd=256, n_layer=4, n_head=4, n_positions=64, use_cache=False
            )
            config._attn_implementation = "eager"
            model: nn.Module = transformers.GPT2LMHeadModel(config)
        else:
            config = transformers.BertConfig(
                vocab_size=1000, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024
            )
            config._attn_implementation = "eager"
            model = transformers.BertForMaskedLM(config)
        model = model.to(DEVICE).train()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=name == "bert")
    import torchvision.models as vision

    model = vision.resnet18() if name == "resnet18" else vision.alexnet()
    if name == "alexnet":
        model.avgpool = nn.Identity()  # it pools 6 x 6 to 6 x 6, with a backward that has no deterministic form
    model = model.to(DEVICE).train()
    return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


EXACT = ("resnet18", "alexnet", "gpt2", "bert")


def exact_child(name: str, directory: Path, kill: bool) -> None:
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.manual_seed(0)
    model, optimizer = _small(name)
    vision = name in ("resnet18", "alexnet")
    loader = torch.utils.data.DataLoader(
        Examples(vision), batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(2)
    )
    run = everstep.guard(model, optimizer, loader, dir=directory, steps=STEPS, epochs=None, linger="30s")
    losses = {}
    for inputs, labels in run:
        inputs, labels = inputs.to(DEVICE), labels.to(DEVICE)
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = (
                nn.functional.cross_entropy(model(inputs), labels)
                if vision
                else model(input_ids=inputs, labels=inputs).loss
            )
        loss.backward()
        if kill and run.step == KILLED_IN - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        losses[run.step + 1] = loss.item().hex()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    print("result " + json.dumps({"from": run.resumed_from, "losses": losses, "digest": _digest(model, optimizer)}))


def _digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    total = hashlib.sha256()
    state = [*model.state_dict().items()]
    state += [(key, value) for p in model.parameters() for key, value in sorted(optimizer.state[p].items())]
    for key, value in state:
        total.update(key.encode())
        if isinstance(value, Tensor):
            total.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def _start(name: str, directory: Path, *, kill: bool) -> subprocess.Popen[str]:
    arguments = ["--exact-child", name, "--scratch", str(directory), *(["--kill"] if kill else [])]
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    return subprocess.Popen(
        [sys.executable, __file__, *arguments],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def _answer(child: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = child.communicate(timeout=240)
    lines = [line.removeprefix("result ") for line in out.splitlines() if line.startswith("result ")]
    return json.loads(lines[0]) if lines else {"code": child.returncode, "error": err.strip()[-1500:]}


def bench_exact(names: list[str], scratch: Path) -> dict[str, Any]:
    """All models at once: the uninterrupted run beside the one that is killed, then the one that goes on."""
    whole = {name: _start(name, scratch / f"{name}-whole", kill=False) for name in names}
    killed = {name: _start(name, scratch / f"{name}-cut", kill=True) for name in names}
    deaths = {name: _answer(child) for name, child in killed.items()}
    resumed = {name: _start(name, scratch / f"{name}-cut", kill=False) for name in names}
    found = {}
    for name in names:
        a, b = _answer(whole[name]), _answer(resumed[name])
        entry = {"whole": a, "resumed": b, "died": deaths[name].get("code") == -signal.SIGKILL}
        entry["exact"] = (
            entry["died"] and "error" not in a and "error" not in b
            and b["from"] in (KILLED_IN - 2, KILLED_IN - 1)
            and a["digest"] == b["digest"]
            and all(a["losses"][step] == loss for step, loss in b["losses"].items())
        )  # fmt: skip
        found[name] = entry
        problem = "" if entry["exact"] else json.dumps([a, b, deaths[name]])[:3000]
        print(
            f"{name:10} resumed from {b.get('from')}: {'the same bits' if entry['exact'] else 'NOT EXACT'} {problem}",
            flush=True,
        )
    return found


def exact_report(report: Report, found: dict[str, Any]) -> None:
    rows = [
        [
            name,
            f"in step {KILLED_IN}",
            str(entry["resumed"].get("from")),
            "the same bits" if entry["exact"] else "not exact",
        ]
        for name, entry in found.items()
    ]
    note = (
        f"{STEPS} steps, dropout and shuffled data, SIGKILL after a backward pass; weights, optimizer state and losses."
    )
    report.tables.append(
        Table("Killed and resumed", ["model", "killed", "resumed from", "against the uninterrupted run"], rows, note)
    )
    report.targets += [
        Target(f"{name} after kill -9", "the same bits", row[3], row[3] == "the same bits")
        for name, row in zip(found, rows, strict=True)
    ]


# -- door


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--exact", action="store_true", help="kill, resume and compare bits instead of timing")
    parser.add_argument("--quick", action="store_true", help="few blocks")
    parser.add_argument("--only", default="", help=f"some of {', '.join(CASES)}")
    parser.add_argument("--budget", type=float, default=300.0, help="seconds after which no new measurement begins")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--scratch", type=Path, default=None, help="a directory on the disk to write to")
    parser.add_argument("--exact-child", default="", help=argparse.SUPPRESS)
    parser.add_argument("--kill", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench/gpu.py needs a CUDA device, and torch sees none here. The CPU side is bench/cpu.py.")
    if given.exact_child:
        exact_child(given.exact_child, given.scratch, given.kill)
        return
    chosen = [name for name in (EXACT if given.exact else CASES) if not given.only or name in given.only.split(",")]
    flags = [f"--{name}" for name in ("exact", "quick") if getattr(given, name)]
    command = " ".join(["python bench/gpu.py", *flags, *(["--only", given.only] if given.only else [])])
    report = Report(title="Everstep on one GPU", command=command, machine=machine())
    with tempfile.TemporaryDirectory(prefix="everstep-bench-", dir=given.scratch, ignore_cleanup_errors=True) as folder:
        if given.exact:
            report.data = bench_exact(chosen, Path(folder))
            exact_report(report, report.data)
        else:
            report.data = bench_overhead(chosen, Path(folder), 3 if given.quick else 6, given.budget)
            overhead_report(report, report.data)
    report.save(given.out, "gpu-exact" if given.exact else "gpu")
    print(report.markdown())


if __name__ == "__main__":
    main()
