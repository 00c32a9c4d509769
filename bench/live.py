"""What it costs to be ready for a loss, and how long one takes: from SIGKILL to the next finished step.

    python bench/live.py [--quick] [--out DIR] [--torchft PYTHON]

One training loop (DDP over gloo) in processes of one machine, which share its cores. A rank ends itself by SIGKILL
before its backward pass, so that nobody can finish the step with it, and notes the time; the others note when each of
their steps is finished. Going on in the loop stands beside a restart of the job by torchrun, which resumes from memory
too, and beside torchft, where an interpreter that has it is named.
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
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from common import Report, Stat, Table, Target, free_port, machine
from live_loop import (
    BATCH,
    DIES_AT,
    Shape,
    commits_in,
    data_of,
    is_noted_death,
    model_of,
    note,
    note_death,
    processor_time,
    steps_in,
    times_of_one,
)
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import everstep
from everstep.events import Called, RanksLost, WentOn, read_events

HERE = Path(__file__).parent
BOUNDS_S = {"rollback": 1.0, "forward": 1.0, "spare": 2.0}
FIRST = 5  # steps, which warm up
BEFORE = ", before"  # after a way: as it was


def train(folder: Path, steps: int, way: str, shape: Shape, *, dies: bool) -> None:
    """One worker. `way`: plain (without Everstep), guard (without on_loss), or a policy."""
    torch.set_num_threads(1)
    everstep.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(model_of(shape))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = TensorDataset(data_of(shape))
    loader = DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data))

    def step(x: torch.Tensor, number: int) -> None:
        loss = model(x).square().mean()
        if dies and dist.get_rank() == 1 and number == DIES_AT and not is_noted_death(folder):
            note_death(folder)
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        note(folder, number + 1)

    if way == "plain":
        number = 0
        while number < steps:
            for (x,) in loader:
                step(x, number)
                number += 1
        return
    run = everstep.guard(
        model, optimizer, loader, dir=folder / "run", epochs=None, steps=steps, strategy="snapshot", linger="30s",
        on_loss=(way,) if way in BOUNDS_S else (),
    )  # fmt: skip
    if way in BOUNDS_S:
        for one in run.live():
            with one as (x,):
                step(x, run.step)
    else:
        for (x,) in run:
            step(x, run.step)


class Jobs:
    """Starts them. `torchft`: an interpreter that has it; `python`: for the rest; `before`: another's sources."""

    def __init__(
        self, torchft: str | None, before: str | None, *, python: str = sys.executable, shape: Shape | None = None
    ) -> None:
        self.torchft, self.before, self.python, self.shape = torchft, before, python, shape or Shape()

    def work(self, folder: Path, way: str, count: int, steps: int, *, dies: bool = False) -> None:
        """A job, from its beginning to its end."""
        words = [str(folder), "--steps", str(steps), "--shape", str(self.shape), *(["--dies"] if dies else [])]
        if way == "torchrun":
            torchrun = [self.python, "-m", "torch.distributed.run", "--nproc-per-node", str(count)]
            worker = [str(HERE / "live.py"), "--worker", *words, "--way", "guard"]
            _finish([subprocess.Popen([*torchrun, "--max-restarts", "3", *worker], stderr=subprocess.DEVNULL)])
        elif way.startswith("torchft"):
            assert self.torchft is not None
            with _lighthouse(self.torchft) as address:
                between = ["--between"] if way == "torchft, between steps" else []
                worker = [self.torchft, str(HERE / "live_torchft.py"), *words, *between, "--lighthouse", address]
                _finish(_start(worker, count, 0))
        else:
            policy, _, is_before = way.partition(BEFORE)
            worker = [self.python, str(HERE / "live.py"), "--worker", *words, "--way", policy]
            if is_before:
                worker = ["env", f"PYTHONPATH={self.before}", *worker]
            _finish(_start(worker, count, int(way == "spare" and dies)))


def _start(command: list[str], count: int, spares: int) -> list[subprocess.Popen[bytes]]:
    """Workers that nobody restarts."""
    base = {**os.environ, "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    return [
        subprocess.Popen(
            command, env={**base, "RANK": str(rank), "EVERSTEP_SPARE": "1" if rank >= count else ""},
            stderr=subprocess.DEVNULL,
        )
        for rank in range(count + spares)
    ]  # fmt: skip


def _finish(workers: list[subprocess.Popen[bytes]], timeout_s: float = 180.0) -> None:
    deadline = time.monotonic() + timeout_s
    try:
        for worker in workers:
            worker.wait(max(0.1, deadline - time.monotonic()))
    finally:
        for worker in workers:
            worker.kill()


@contextmanager
def _lighthouse(python: str) -> Iterator[str]:
    server = subprocess.Popen(
        [python, str(HERE / "live_torchft.py"), "--serve"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert server.stdout is not None
        yield server.stdout.readline().strip()
    finally:
        server.kill()
        server.wait()


class Steady(NamedTuple):
    """A job that nothing happens to."""

    step_s: float  # the median
    processor_s: float  # of a step, by all ranks
    commits_s: list[float]  # torchft's


def steady(jobs: Jobs, count: int, way: str, steps: int = 60) -> Steady:
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as name:
        folder = Path(name)
        jobs.work(folder, way, count, steps)
        step_s = statistics.median(b - a for a, b in pairwise(times_of_one(folder)[FIRST:]))
        return Steady(step_s, processor_time(folder, FIRST), commits_in(folder))


def recovery(jobs: Jobs, count: int, way: str) -> tuple[float | None, dict[str, float]]:
    """Seconds from SIGKILL to the next finished step, less one step, or None: nobody went on. How long phases took."""
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as name:
        folder = Path(name)
        jobs.work(folder, way, count, DIES_AT + 8, dies=True)
        killed = float((folder / "killed").read_text())
        steps = steps_in(folder)
        before = [when for _, when in steps if when < killed]
        step_s = (max(before) - min(before)) / (DIES_AT - 1)
        after = min((when for step, when in steps if step > DIES_AT and when > killed), default=None)
        return None if after is None else after - killed - step_s, _phases(folder / "run", killed)


def _phases(directory: Path, killed: float) -> dict[str, float]:
    events: list[Any] = read_events(directory) if directory.exists() else []
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
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--torchft", help="an interpreter that has torchft")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=40, help=argparse.SUPPRESS)
    parser.add_argument("--shape", type=Shape.of, default=Shape(), help=argparse.SUPPRESS)
    parser.add_argument("--dies", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--way", default="plain", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker is not None:
        train(given.worker, given.steps, given.way, given.shape, dies=given.dies)
        return
    command = f"python bench/live.py{' --quick' * given.quick}{' --torchft PYTHON' * bool(given.torchft)}"
    report = Report("Going on after a loss", command, machine())
    rounds, jobs = 2 if given.quick else 3, Jobs(given.torchft, None)
    report.tables += [steady_table(rounds, jobs, report), recovery_table(rounds, jobs, report)]
    report.save(given.out, "live")
    print(report.markdown())


def steady_table(rounds: int, jobs: Jobs, report: Report) -> Table:
    ways = ["plain", "guard", "rollback", "forward", *(["torchft"] if jobs.torchft else [])]
    table = Table(
        "Being ready: a step that nothing happens to", ["ranks", "way", "step, ms", "over plain", "over guard"],
        note="plain: the loop without Everstep; guard: every step captured, nobody ready for a loss; then ready by a "
        "policy. torchft: without any checkpoint. Jobs take turns; the median step of each, with its range over jobs.",
    )  # fmt: skip
    for count in (1, 2):
        found = {way: Stat() for way in ways}
        for _ in range(rounds):
            for way in ways:
                found[way].values.append(steady(jobs, count, way).step_s)
        for way in ways:
            dearer = {of: over(found[way], found[of]) for of in ("plain", "guard")}
            percent = [ratio.text(100) + " %" for ratio in dearer.values()]
            table.rows.append([str(count), way, found[way].text(1e3), *percent])
            print(*table.rows[-1], flush=True)
            if way in BOUNDS_S:
                target = f"{way}: ready, {count} ranks, over guard"
                report.targets.append(Target(target, "<= 1 %", percent[1], dearer["guard"].median <= 0.01))
    return table


def over(mine: Stat, others: Stat) -> Stat:
    return Stat([a / b - 1 for a, b in zip(mine.values, others.values, strict=True)])


def recovery_table(rounds: int, jobs: Jobs, report: Report) -> Table:
    headers = ["way", "seconds, less one step", "noticed, ms", "all stood, ms", "met, ms", "restored, ms"]
    table = Table(
        "From SIGKILL of one of four ranks to the next finished step", headers,
        note="Medians and ranges over jobs that take turns. torchrun: all are started again and resume from memory. "
        "torchft: the others go on without the lost. Where it is lost in backward, as in all rows but the last, they "
        "end with an AssertionError in the communication hook of torchft 0.2; between two steps they wait for its join "
        "timeout, 0.2 s here.",
    )  # fmt: skip
    ways = [*BOUNDS_S, "torchrun", *(["torchft", "torchft, between steps"] if jobs.torchft else [])]
    found: dict[str, tuple[Stat, dict[str, Stat]]] = {way: (Stat(), {}) for way in ways}
    for _ in range(rounds):
        for way, (total, phases) in found.items():
            seconds, parts = recovery(jobs, 4, way)
            if seconds is None:
                print(way, "nobody went on", flush=True)
                continue
            total.values.append(seconds)
            for name, value in parts.items():
                phases.setdefault(name, Stat()).values.append(value)
            print(way, f"{seconds:.3f}", {name: round(value, 4) for name, value in parts.items()}, flush=True)
    for way, (total, phases) in found.items():
        names = ("noticed", "all stood", "met", "restored")
        cells = [phases[name].text(1e3) if name in phases else "" for name in names]
        table.rows.append([way, total.text() if total.values else "nobody went on", *cells])
        if way in BOUNDS_S:
            wanted = f"<= {BOUNDS_S[way]:.0f} s and a step"
            report.targets.append(Target(f"{way}, 4 ranks", wanted, total.text() + " s", total.median <= BOUNDS_S[way]))
    return table


if __name__ == "__main__":
    main()
