"""What it costs to be ready for a loss, and how long one takes: from SIGKILL to the next finished step.

    python bench/live.py [--quick] [--out DIR]

One training loop (DDP over gloo) in processes of one machine, which share its cores. A rank ends itself by SIGKILL in a
step and notes the time; the others note when each of their steps is finished. Going on in the loop stands beside a
restart of the whole job by torchrun, which resumes from memory too.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import Report, Stat, Table, Target, machine
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import everstep
from everstep.events import Called, RanksLost, WentOn, read_events

WIDTH, DEPTH, BATCH, DIES_AT = 384, 6, 16, 12


def train(directory: Path, steps: int, *, live: bool, dies: bool, policies: list[Any]) -> None:
    """One worker; notes when its steps were finished."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    everstep.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.randn(4096, WIDTH))
    loader = DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data))
    run = everstep.guard(
        model, optimizer, loader, dir=directory, epochs=None, steps=steps, strategy="snapshot", linger="30s",
        on_loss=policies if live else (),
    )  # fmt: skip
    notes = directory.parent / f"steps-{os.getpid()}"
    mark = directory.parent / "killed"

    def step(x: torch.Tensor) -> None:
        loss = model(x).square().mean()
        loss.backward()
        if dies and dist.get_rank() == 1 and run.step == DIES_AT and not mark.exists():
            mark.write_text(repr(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        optimizer.zero_grad()
        with notes.open("a") as file:
            file.write(f"{run.step + 1} {time.time()!r}\n")

    if live:
        for one in run.live():
            with one as (x,):
                step(x)
    else:
        for (x,) in run:
            step(x)


def start(directory: Path, count: int, spares: int, arguments: list[str]) -> list[subprocess.Popen[bytes]]:
    """Workers that nobody restarts."""
    port = _free_port()
    base = {**os.environ, "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, __file__, "--worker", str(directory), *arguments]
    return [
        subprocess.Popen(
            command, env={**base, "RANK": str(rank), "EVERSTEP_SPARE": "1" if rank >= count else ""},
            stderr=subprocess.DEVNULL,
        )
        for rank in range(count + spares)
    ]  # fmt: skip


def finish(workers: list[subprocess.Popen[bytes]], timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    try:
        for worker in workers:
            worker.wait(max(0.1, deadline - time.monotonic()))
    finally:
        for worker in workers:
            worker.kill()


def steps_of(folder: Path) -> list[tuple[int, float]]:
    lines = [line.split() for path in folder.glob("steps-*") for line in path.read_text().splitlines()]
    return sorted(((int(step), float(when)) for step, when in lines), key=lambda item: item[1])


def steady(count: int, live: bool, steps: int) -> float:
    """The median step of a job that nothing happens to."""
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as folder:
        arguments = ["--steps", str(steps), *(["--live"] if live else [])]
        finish(start(Path(folder, "run"), count, 0, arguments))
        path = next(iter(sorted(Path(folder).glob("steps-*"))))
        times = [float(line.split()[1]) for line in path.read_text().splitlines()]
    return statistics.median(b - a for a, b in pairwise(times[5:]))


def recovery(count: int, policy: str) -> tuple[float, dict[str, float]]:
    """Seconds from SIGKILL to the next finished step, less one step; and how long each phase took."""
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as folder:
        directory = Path(folder, "run")
        arguments = ["--steps", str(DIES_AT + 8), "--dies"]
        if policy == "torchrun":
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count)]
            command = [*torchrun, "--max-restarts", "3", __file__, "--worker", str(directory), *arguments]
            finish([subprocess.Popen(command, stderr=subprocess.DEVNULL)])
        else:
            spares = int(policy == "spare")
            finish(start(directory, count, spares, [*arguments, "--live", "--policy", policy]))
        killed = float(Path(folder, "killed").read_text())
        steps = steps_of(Path(folder))
        before = [when for step, when in steps if step <= DIES_AT]
        step_s = (max(before) - min(before)) / DIES_AT
        after = min(when for _, when in steps if when > killed + 1e-3)
        return after - killed - step_s, _phases(directory, killed)


def _phases(directory: Path, killed: float) -> dict[str, float]:
    events = read_events(directory)
    lost = next((event.time for event in events if isinstance(event, RanksLost)), None)
    called = next((event for event in events if isinstance(event, Called)), None)
    went_on = [event for event in events if isinstance(event, WentOn)]
    if lost is None or called is None or not went_on:
        return {}
    return {
        "noticed": lost - killed,
        "all stood": called.waited_s,
        "met": max(event.met_s for event in went_on),
        "restored": max(event.restored_s for event in went_on),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=40, help=argparse.SUPPRESS)
    parser.add_argument("--live", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--dies", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--policy", default="rollback", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker is not None:
        train(given.worker, given.steps, live=given.live, dies=given.dies, policies=[given.policy])
        return
    report = Report("Going on after a loss", f"python bench/live.py{' --quick' * given.quick}", machine())
    rounds = 2 if given.quick else 5
    report.tables += [steady_table(rounds, report), recovery_table(rounds, report)]
    report.save(given.out, "live")
    print(report.markdown())


def steady_table(rounds: int, report: Report) -> Table:
    table = Table(
        "Being ready: a step that nothing happens to",
        ["ranks", "step, ms", "ready for a loss, ms", "more"],
        note="The same loop under guard(), without on_loss and with it, in jobs that take turns. Median step of each "
        "job; median and range over jobs.",
    )
    for count in (1, 2):
        plain, ready = Stat(), Stat()
        for _ in range(rounds):
            plain.values.append(steady(count, False, 120))
            ready.values.append(steady(count, True, 120))
        more = Stat([b / a - 1 for a, b in zip(plain.values, ready.values, strict=True)])
        table.rows.append([str(count), plain.text(1e3), ready.text(1e3), more.text(100) + " %"])
        print(*table.rows[-1], flush=True)
        report.targets.append(
            Target(f"ready for a loss, {count} ranks", "<= 1 %", more.text(100) + " %", more.median <= 0.01)
        )
    return table


def recovery_table(rounds: int, report: Report) -> Table:
    headers = ["way", "seconds, less one step", "noticed, ms", "all stood, ms", "met, ms", "restored, ms"]
    table = Table(
        "From SIGKILL of one of four ranks to the next finished step", headers,
        note="Medians and ranges over jobs that take turns. torchrun: all are started again and resume from memory.",
    )  # fmt: skip
    bounds = {"rollback": 1.0, "spare": 2.0}
    found: dict[str, tuple[Stat, dict[str, Stat]]] = {way: (Stat(), {}) for way in ("rollback", "spare", "torchrun")}
    for _ in range(rounds):
        for way, (total, phases) in found.items():
            seconds, parts = recovery(4, way)
            total.values.append(seconds)
            for name, value in parts.items():
                phases.setdefault(name, Stat()).values.append(value)
            print(way, f"{seconds:.3f}", {name: round(value, 4) for name, value in parts.items()}, flush=True)
    for way, (total, phases) in found.items():
        names = ("noticed", "all stood", "met", "restored")
        cells = [phases[name].text(1e3) if name in phases else "" for name in names]
        table.rows.append([way, total.text(), *cells])
        if way in bounds:
            wanted = f"<= {bounds[way]:.0f} s and a step"
            report.targets.append(Target(f"{way}, 4 ranks", wanted, total.text() + " s", total.median <= bounds[way]))
    return table


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
