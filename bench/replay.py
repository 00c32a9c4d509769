"""How long base and log take to recover, against the base alone; on a CPU.

    python bench/replay.py                       all
    python bench/replay.py --sizes 10 --steps 20

The base alone is the least that loading can be: parameters and optimizer state copied from memory into a program that
has them already; no disk, no checksum, no fresh memory. Records are dense gradients in memory, as they are when a log
is mapped; what a compressor left of them is dense again when an optimizer sees it. Every way is checked against the
bits of the sequential replay.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import Report, Stat, Table, Target, machine, timed
from merge_sgd import merge_sgd_lossy
from torch import Tensor, nn, optim

from everstep.capture.layout import Subjects
from everstep.capture.update import Call, Consumed
from everstep.recover import replay as module
from everstep.recover.replay import replay
from everstep.topology import Topology

HELD = 4  # different gradients: enough to leave every cache, few enough for memory
ALONE = Topology(rank=0, world=1, node="here")
KINDS: dict[str, Any] = {
    "AdamW": (optim.AdamW, {"lr": 1e-3}), "SGD, momentum": (optim.SGD, {"lr": 1e-3, "momentum": 0.9}),
}  # fmt: skip


def program(millions: int, kind: str) -> Subjects:
    """A model of square layers, after its first step."""
    torch.manual_seed(0)
    side = 1024
    model = nn.ModuleList(nn.Linear(side, side) for _ in range(max(1, millions * 1_000_000 // (side * side))))
    make, options = KINDS[kind]
    optimizer = make(model.parameters(), **options)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    optimizer.zero_grad()
    return Subjects(models=[model], optimizers=[optimizer])


def records(subjects: Subjects, count: int) -> list[Consumed]:
    names = subjects.names()
    generator = torch.Generator().manual_seed(1)
    held = [
        {names[id(p)]: torch.randn(p.shape, generator=generator) * 1e-2 for p in subjects.models[0].parameters()}
        for _ in range(min(HELD, count))
    ]
    groups = [{k: v for k, v in g.items() if k != "params"} for g in subjects.optimizers[0].param_groups]

    def rows(i: int) -> Any:
        return lambda name, first, rows: held[i % len(held)][name][first : first + rows]

    call = Call(optimizer=0, groups=groups, absent=frozenset())
    return [Consumed(step=i + 1, calls=[call], gradient=rows(i)) for i in range(count)]


def tensors(subjects: Subjects) -> dict[str, Tensor]:
    return {entry.name: entry.tensor.detach() for entry in subjects.listing().entries}


def loaded(subjects: Subjects, base: dict[str, Tensor]) -> float:
    """Put the base back; the seconds that takes."""
    current = tensors(subjects)
    with timed() as timer, torch.no_grad():
        torch._foreach_copy_([current[name] for name in base], list(base.values()))
    return timer.seconds


def same(subjects: Subjects, wanted: dict[str, Tensor]) -> str:
    found = tensors(subjects)
    if all(torch.equal(found[name], tensor) for name, tensor in wanted.items()):
        return "the bits"
    far = max(float((found[n] - t).norm() / t.norm().clamp_min(1e-30)) for n, t in wanted.items())
    return f"off by {far:.1e}"


def sequentially(subjects: Subjects, steps: list[Consumed]) -> None:
    """Whole parameters, one step after another: what a loop over the log would do."""
    module._whole(subjects, [0], steps, ALONE, module._Proof(steps))


def as_rank(rank: int, store: str, millions: int, kind: str, count: int, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    subjects = program(millions, kind)
    steps = records(subjects, count)
    subjects.models = [nn.parallel.DistributedDataParallel(subjects.models[0])]
    dist.barrier()
    with timed() as timer:
        replay(subjects, steps, Topology(rank=rank, world=2, node="here"))
    results.put((rank, timer.seconds, sum(float(t.double().sum()) for t in tensors(subjects).values())))
    results.close()
    results.join_thread()
    dist.destroy_process_group()


def over_two_ranks(millions: int, kind: str, count: int) -> tuple[float, float]:
    """The slower rank's seconds, and a sum of its state."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as directory:
        arguments = (str(Path(directory) / "store"), millions, kind, count, results)
        ranks = [context.Process(target=as_rank, args=(rank, *arguments)) for rank in range(2)]
        for rank in ranks:
            rank.start()
        ended = [results.get(timeout=600) for _ in ranks]
        for rank in ranks:
            rank.join()
    return max(seconds for _, seconds, _ in ended), ended[0][2]


def in_one_process(millions: int, kind: str, count: int, repeats: int) -> tuple[dict[str, Stat], dict[str, str], float]:
    """Seconds of each way, what it gave, and a sum of the state."""
    subjects = program(millions, kind)
    steps = records(subjects, count)
    base = {name: tensor.clone() for name, tensor in tensors(subjects).items()}
    ways: dict[str, Any] = {"sequential, whole": sequentially, "slabs": lambda *what: replay(*what, ALONE)}
    if kind.startswith("SGD"):
        ways["merged, lossy"] = merge_sgd_lossy
    stats = {"base": Stat([loaded(subjects, base) for _ in range(repeats + 2)][2:])}
    checks: dict[str, str] = {}
    wanted: dict[str, Tensor] = {}
    for _ in range(repeats):
        for way, run in ways.items():
            loaded(subjects, base)
            with timed() as timer:
                run(subjects, steps)
            stats.setdefault(way, Stat()).values.append(timer.seconds)
            wanted = wanted or {name: tensor.clone() for name, tensor in tensors(subjects).items()}
            checks[way] = same(subjects, wanted)
    return stats, checks, sum(float(t.double().sum()) for t in wanted.values())


def measure(millions: int, kind: str, count: int, repeats: int) -> tuple[list[list[str]], dict[str, Stat]]:
    stats, checks, total = in_one_process(millions, kind, count, repeats)
    seconds, other = over_two_ranks(millions, kind, count)
    stats["slabs, 2 ranks"] = Stat([seconds])
    checks["slabs, 2 ranks"] = "the bits" if other == total else "other bits"
    alone = stats["base"].median
    rows = [[f"{kind}, {millions} M", "the base alone", stats["base"].text(1e3), "", "1", ""]]
    for way, check in checks.items():
        each = 1e9 * stats[way].median / count / (millions * 1e6)
        times = 1 + stats[way].median / alone
        rows.append(["", f"{count} records, {way}", stats[way].text(1e3), f"{each:.2f}", f"{times:.0f}", check])
    return rows, stats


def slab_sizes(millions: int, count: int) -> list[list[str]]:
    subjects = program(millions, "AdamW")
    steps = records(subjects, count)
    rows = []
    for bits in (14, 15, 16, 17, 18, 19, 20):
        module.SLAB_ELEMENTS = 1 << bits
        with timed() as timer:
            replay(subjects, steps, ALONE)
        rows.append([f"{1 << bits >> 10} Ki", f"{1e9 * timer.seconds / count / (millions * 1e6):.2f}"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="10,50", help="millions of parameters")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    command = f"python bench/replay.py --sizes {options.sizes} --steps {options.steps} --repeats {options.repeats}"
    report = Report("Replay of the log, on a CPU", command, machine())
    usual = module.SLAB_ELEMENTS
    report.tables.append(
        Table("Slab sizes", ["elements", "ns an element and step"], slab_sizes(10, 20), "AdamW, 10 M, 20 records.")
    )
    module.SLAB_ELEMENTS = usual
    headers = ["program", "what", "ms", "ns an element and step", "times the base", "gives"]
    table = Table(
        "Recovery", headers, note=f"One process has {torch.get_num_threads()} threads, each of two ranks one."
    )
    for kind in KINDS:
        for millions in map(int, options.sizes.split(",")):
            rows, stats = measure(millions, kind, options.steps, options.repeats)
            table.rows += rows
            report.data[f"{kind} {millions}"] = {way: stat.values for way, stat in stats.items()}
            ratio = 1 + min(s.median for w, s in stats.items() if w.startswith("slabs")) / stats["base"].median
            report.targets.append(
                Target(
                    f"base and {options.steps} records, {kind}, {millions} M",
                    "<= 2x the base",
                    f"{ratio:.0f}x",
                    ratio <= 2,
                )
            )
    report.tables.append(table)
    report.save(options.out, "replay")
    print(report.markdown())


if __name__ == "__main__":
    main()
