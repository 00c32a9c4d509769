"""One training, two failures, not a bit of difference.

torchrun trains a small GPT on two ranks with every step captured. Twice, at a random moment, a rank gets SIGKILL.
torchrun restarts the ranks, Everstep brings them back to the step, and at the end the result is compared, bit for bit,
with the same training without failures.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import everstep
from everstep.events import Started, read_events

STEPS = 240
FAILURES = 2
console = Console()


@dataclass(slots=True)
class Failure:
    killed_at: float
    step: int  # steps that were done when the rank died
    rank_pid: int
    resumed_at: float = 0.0
    resumed_from: int = 0


def start(directory: Path, log: Path) -> subprocess.Popen[bytes]:
    """torchrun on two ranks; restarts them as often as needed."""
    train = Path(__file__).with_name("train_gpt.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", str(FAILURES + 1), str(train), "--dir", str(directory), "--steps", str(STEPS)]
    return subprocess.Popen(
        command, stdout=log.open("wb"), stderr=subprocess.STDOUT, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )


def status(directory: Path) -> dict[str, object]:
    try:
        return everstep.open(directory).status()
    except everstep.EverstepError:
        return {"step": 0, "trainers": []}


def train(progress: Progress, title: str, directory: Path, kill_at: list[int]) -> list[Failure]:
    """Run to the end, killing a random rank when each of these steps is reached."""
    log = directory.with_suffix(".log")
    job = start(directory, log)
    bar = progress.add_task(title, total=STEPS)
    failures: list[Failure] = []
    while job.poll() is None:
        time.sleep(0.05)
        now = status(directory)
        progress.update(bar, completed=int(now["step"]))
        trainers = list(now["trainers"])
        if len(failures) < len(kill_at) and int(now["step"]) >= kill_at[len(failures)] and len(trainers) == 2:
            time.sleep(random.random() * 0.1)
            victim = random.choice(trainers)
            os.kill(victim, signal.SIGKILL)
            failures.append(Failure(time.time(), int(status(directory)["step"]), victim))
            progress.console.print(f"  SIGKILL to process {victim} at step {failures[-1].step}")
    progress.update(bar, completed=int(status(directory)["step"]))
    if job.returncode != 0:
        console.print(log.read_text()[-4000:])
        raise SystemExit(f"the training ended with exit code {job.returncode}")
    for failure in failures:
        again = [
            e for e in read_events(directory) if isinstance(e, Started) and e.rank == 0 and e.time > failure.killed_at
        ]
        failure.resumed_at, failure.resumed_from = again[0].time, again[0].step
    return failures


def same(one: object, two: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        return (
            one.dtype == two.dtype
            and one.shape == two.shape
            and torch.equal(one.view(-1).view(torch.uint8), two.view(-1).view(torch.uint8))
        )
    return one == two


def main() -> None:
    begun = time.time()
    random.seed()
    columns = (
        TextColumn("{task.description:24}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeElapsedColumn(),
    )
    with (
        tempfile.TemporaryDirectory(prefix="everstep-demo-") as folder,
        Progress(*columns, console=console) as progress,
    ):
        broken, reference = Path(folder, "with-failures"), Path(folder, "without")
        kill_at = [random.randint(30, 90), random.randint(130, 210)]
        failures = train(progress, "two ranks, two failures", broken, kill_at)
        train(progress, "the same, undisturbed", reference, [])
        ours, theirs = everstep.open(broken).load(STEPS), everstep.open(reference).load(STEPS)

    table = Table(title="What the failures cost", title_justify="left")
    for column in ("failure", "killed at step", "resumed from", "steps lost", "recovery, with restart by torchrun"):
        table.add_column(column, justify="right")
    for number, f in enumerate(failures, 1):
        table.add_row(
            str(number),
            str(f.step),
            str(f.resumed_from),
            str(f.step - f.resumed_from),
            f"{f.resumed_at - f.killed_at:.1f} s",
        )
    console.print(table)

    weights = [name for name in ours if name.startswith("model.")]
    moments = [name for name in ours if name.startswith("optimizer.")]
    verdicts = {
        f"final weights ({len(weights)} tensors)": ours.keys() == theirs.keys()
        and all(same(ours[n], theirs[n]) for n in weights),
        f"optimizer state ({len(moments)} tensors)": all(same(ours[n], theirs[n]) for n in moments),
        f"loss curve ({len(ours['extra']['losses']['value'])} values)": same(ours["extra"], theirs["extra"]),
        "scheduler and random state": same(ours["schedulers"], theirs["schedulers"])
        and same(ours["random"]["torch"], theirs["random"]["torch"]),
    }
    losses = ours["extra"]["losses"]["value"]
    for what, equal in verdicts.items():
        console.print(f"{what:32} {'identical, bit for bit' if equal else '[red]DIFFERENT[/red]'}")
    console.print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; {time.time() - begun:.0f} s in all")
    lost = [f.step - f.resumed_from for f in failures]
    if not all(verdicts.values()) or len(failures) != FAILURES or any(n not in (0, 1) for n in lost):
        raise SystemExit("the demo did not keep its promise")


if __name__ == "__main__":
    main()
