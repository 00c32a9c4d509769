"""Three trainings, four failures, not a bit of difference.

First act: torchrun trains a small GPT on two ranks with every step captured in memory. Twice, at a random moment, a
rank gets SIGKILL. torchrun restarts the ranks, and Everstep brings them back to the step.

Second act: the same training with every step durable, by the log. At a random moment the machine "reboots": torchrun,
both ranks and the keeper are killed and shared memory is wiped. The training is started again, from its disk.

Third act: `everstep run` trains on two ranks, and a spare stands by. A rank gets SIGKILL. The other does not leave its
process: it stands still, the spare takes the place of the dead, and both go on with the step.

At the end the results are compared, bit for bit, with the same trainings without failures. The third run is drawn as a
page to be looked at in a browser.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import everstep
from everstep.events import RanksLost, Started, WentOn, read_events

STEPS = 200
LIVE_STEPS = 300
FAILURES = 2
PAGE = Path(__file__).parents[1] / "runs" / "report.html"
console = Console()


@dataclass(slots=True)
class Failure:
    what: str
    killed_at: float
    step: int  # steps that were done when the rank died
    resumed_at: float = 0.0
    resumed_from: int = 0


def start(directory: Path, log: Path, strategy: str) -> subprocess.Popen[bytes]:
    """torchrun on two ranks; restarts them as often as needed."""
    train = Path(__file__).with_name("train_gpt.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", str(FAILURES + 1), str(train), "--dir", str(directory), "--steps", str(STEPS)]
    command += ["--strategy", strategy]
    return begin(command, log)


def begin(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command, stdout=log.open("ab"), stderr=subprocess.STDOUT, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )


def status(directory: Path) -> dict[str, object]:
    try:
        return everstep.open(directory).status()
    except everstep.EverstepError:
        return {"step": 0, "trainers": []}


def train(progress: Progress, title: str, directory: Path, kill_at: list[int]) -> list[Failure]:
    """Run to the end, killing a random rank when each of these steps is reached."""
    log = directory.with_suffix(".log")
    job = start(directory, log, "snapshot")
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
            failures.append(Failure("SIGKILL to a rank", time.time(), int(status(directory)["step"])))
            progress.console.print(f"  SIGKILL to process {victim} at step {failures[-1].step}")
    progress.update(bar, completed=int(status(directory)["step"]))
    check_end(job, log)
    for failure in failures:
        look_for_return(directory, failure)
    return failures


def check_end(job: subprocess.Popen[bytes], log: Path) -> None:
    if job.returncode != 0:
        console.print(log.read_text()[-4000:])
        raise SystemExit(f"the training ended with exit code {job.returncode}")


def look_for_return(directory: Path, failure: Failure) -> None:
    """When and from where the run went on after a failure."""
    later = [e for e in read_events(directory) if isinstance(e, Started) and e.time > failure.killed_at]
    first = min((e for e in later if e.rank == 0), key=lambda e: e.time)
    failure.resumed_at, failure.resumed_from = first.time, first.step


def train_through_reboot(progress: Progress, title: str, directory: Path, reboot_at: int) -> tuple[Failure, int]:
    """Every step durable; at some step everything but the disk is lost. The failure, and the step that was durable."""
    log = directory.with_suffix(".log")
    job = start(directory, log, "log")
    bar = progress.add_task(title, total=STEPS)
    now = status(directory)
    while int(now["step"]) < reboot_at or len(list(now["trainers"])) < 2:
        if job.poll() is not None:
            check_end(job, log)
            raise SystemExit("the training ended before its reboot")
        time.sleep(0.05)
        now = status(directory)
        progress.update(bar, completed=int(now["step"]))
    time.sleep(random.random() * 0.1)
    now = status(directory)
    durable = int(now["durable_step"])
    for victim in (job.pid, int(now["keeper"]), *now["trainers"]):
        os.kill(victim, signal.SIGKILL)
    failure = Failure("reboot: all killed, memory wiped", time.time(), int(status(directory)["step"]))
    job.wait()
    shutil.rmtree(f"/dev/shm/everstep-{os.getuid()}/{everstep.open(directory).run}")
    progress.console.print(f"  reboot at step {failure.step}: torchrun, ranks and keeper killed, shared memory wiped")
    job = start(directory, log, "log")
    while job.poll() is None:
        time.sleep(0.05)
        progress.update(bar, completed=int(status(directory)["step"]))
    progress.update(bar, completed=int(status(directory)["step"]))
    check_end(job, log)
    look_for_return(directory, failure)
    return failure, durable


@dataclass(frozen=True, slots=True)
class Survival:
    """How a loss was lived through: in seconds, and who was there before and after."""

    victim: int
    killed_at: float
    step: int
    lost: RanksLost
    went_on: list[WentOn]  # of those who were there before
    before: dict[int, int]  # rank -> process
    after: dict[int, int]

    @property
    def pids_stayed(self) -> bool:
        stayed = self.before.items() & self.after.items()
        return self.before.keys() == self.after.keys() and stayed == self.before.items() - {
            (self.lost.rank, self.victim)
        }


def train_live(progress: Progress, title: str, directory: Path, kill_at: int | None) -> Survival | None:
    """Two ranks, and a spare if one of the two is to be killed."""
    spares = "0" if kill_at is None else "1"
    program = Path(__file__).with_name("train_live.py")
    command = [sys.executable, "-m", "everstep.cli", "run", "--nproc", "2", "--spares", spares, str(program)]
    command += ["--dir", str(directory), "--steps", str(LIVE_STEPS)]
    log = directory.with_suffix(".log")
    job = begin(command, log)
    bar = progress.add_task(title, total=LIVE_STEPS)
    killed: tuple[int, float, int] | None = None
    while job.poll() is None:
        time.sleep(0.02)
        now = status(directory)
        progress.update(bar, completed=int(now["step"]))
        if kill_at is not None and killed is None and int(now["step"]) >= kill_at:
            victim = random.choice([e.pid for e in read_events(directory) if isinstance(e, Started)])
            killed = victim, time.time(), int(now["step"])
            os.kill(victim, signal.SIGKILL)
            progress.console.print(f"  SIGKILL to process {victim} at step {now['step']}; a spare stands by")
    progress.update(bar, completed=int(status(directory)["step"]))
    check_end(job, log)
    return look_at_survival(directory, *killed) if killed is not None else None


def look_at_survival(directory: Path, victim: int, killed_at: float, step: int) -> Survival:
    events = read_events(directory)
    lost = next(e for e in events if isinstance(e, RanksLost))
    started = [e for e in events if isinstance(e, Started)]
    return Survival(
        victim=victim, killed_at=killed_at, step=step, lost=lost,
        went_on=[e for e in events if isinstance(e, WentOn) and e.rank != lost.rank],
        before={e.rank: e.pid for e in started if e.time < killed_at},
        after={e.rank: e.pid for e in started if e.time > killed_at},
    )  # fmt: skip


def draw(directory: Path, page: Path) -> str:
    """As `everstep report` does; where the page is, or why there is none."""
    page.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "everstep.cli", "report", str(directory), "-o", str(page)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return f"\nthe third run, to look at: {page.as_uri()}" if ended.returncode == 0 else ended.stderr.strip()


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
        broken, rebooted, reference = (Path(folder, name) for name in ("with-failures", "with-reboot", "without"))
        kill_at = [random.randint(30, 90), random.randint(130, 210)]
        failures = train(progress, "two ranks, two failures", broken, kill_at)
        reboot, durable = train_through_reboot(progress, "the log, a reboot", rebooted, random.randint(60, 180))
        train(progress, "the same, undisturbed", reference, [])
        kept = [everstep.open(one).load(STEPS) for one in (broken, rebooted, reference)]
        live, live_reference = (Path(folder, name) for name in ("live", "live-without"))
        survival = train_live(progress, "a rank is replaced", live, random.randint(60, 200))
        train_live(progress, "the same, undisturbed", live_reference, None)
        kept_live = [everstep.open(one).load(LIVE_STEPS) for one in (live, live_reference)]
        drawn = draw(live, PAGE)

    report([*failures, reboot], durable)
    verdicts = compare(kept)
    if survival is None:
        raise SystemExit("the third training ended before its failure")
    report_survival(survival)
    verdicts += compare(kept_live)
    losses = kept[0]["extra"]["losses"]["value"]
    console.print(drawn, soft_wrap=True, highlight=False, markup=False)
    console.print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; {time.time() - begun:.0f} s in all")
    lost = [f.step - f.resumed_from for f in failures]
    kept_all = len(failures) == FAILURES and all(n in (0, 1) for n in lost) and reboot.resumed_from >= durable
    if not all(verdicts) or not kept_all or not survival.pids_stayed:
        raise SystemExit("the demo did not keep its promise")


def report(failures: list[Failure], durable: int) -> None:
    table = Table(title="What the failures cost", title_justify="left")
    for column in ("failure", "at step", "resumed from", "steps lost", "recovery, with restart by torchrun"):
        table.add_column(column, justify="right")
    for f in failures:
        lost, took = str(f.step - f.resumed_from), f"{f.resumed_at - f.killed_at:.1f} s"
        table.add_row(f.what, str(f.step), str(f.resumed_from), lost, took)
    console.print(table)
    back = failures[-1].resumed_from
    console.print(f"before the reboot step {durable} was durable; the disk alone gave back step {back}")


def report_survival(survival: Survival) -> None:
    lost, went_on = survival.lost, survival.went_on
    console.print(f"\nRank {lost.rank} was killed at step {survival.step}; noticed because {lost.how}")
    for rank, pid in sorted(survival.before.items()):
        now = survival.after.get(rank)
        fate = "stayed in its process" if now == pid else f"was replaced by the spare, process {now}"
        console.print(f"  rank {rank}, process {pid}, {fate}")
    phases = {
        "until it was noticed": lost.time - survival.killed_at,
        "until the other stood still": max(e.stopped_s for e in went_on),
        "until both had met": max(e.met_s for e in went_on),
        "until the state was there": max(e.restored_s for e in went_on),
        "in all": max(e.time for e in went_on) - survival.killed_at,
    }
    for phase, seconds in phases.items():
        console.print(f"  {phase:30}{1000 * seconds:6.0f} ms")


def compare(kept: list[dict[str, Any]]) -> list[bool]:
    """The runs with failures against the one without, bit for bit."""
    *broken, reference = kept
    weights = [name for name in reference if name.startswith("model.")]
    moments = [name for name in reference if name.startswith("optimizer.")]
    parts = {
        f"final weights ({len(weights)} tensors)": lambda one: all(same(one[n], reference[n]) for n in weights),
        f"optimizer state ({len(moments)} tensors)": lambda one: all(same(one[n], reference[n]) for n in moments),
        f"loss curve ({len(reference['extra']['losses']['value'])} values)": lambda one: same(
            one["extra"], reference["extra"]
        ),
        "scheduler and random state": lambda one: (
            same(one["schedulers"], reference["schedulers"])
            and same(one["random"]["torch"], reference["random"]["torch"])
        ),
    }
    verdicts = []
    for what, holds in parts.items():
        equal = all(one.keys() == reference.keys() and holds(one) for one in broken)
        verdicts.append(equal)
        console.print(f"{what:32} {'identical, bit for bit' if equal else '[red]DIFFERENT[/red]'}")
    return verdicts


if __name__ == "__main__":
    main()
