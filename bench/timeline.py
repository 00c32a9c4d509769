"""What the timeline costs a training loop: blocks with and without it take turns on one guarded loop in one process.

    python bench/timeline.py [--rounds N] [--out DIR]

For a block without it, everything that the training thread does for it is replaced by nothing. Blocks are short and
many, because a shared machine drifts; each pair of neighbours gives one difference. What is compared is processor time,
of the training thread and of the whole process: the clock on the wall tells of the neighbours. Beside that, what a
step's marks take by themselves, in a loop of nothing else, while the file is written.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
from common import Report, Stat, Table, machine, short
from torch import nn

import everstep
from everstep.capture.moments import Moments
from everstep.timeline import Timeline, timeline_of_rank

STEPS, WARM, MARKED = 100, 50, 5_000
WIDTHS = {"a step of about 1 ms": 128, "a step of about 10 ms": 768}


class Silent(Moments):
    """Sees nothing and says nothing, but how long a step took."""

    def given(self) -> None: ...
    def reduces(self) -> None: ...
    def reduced(self) -> None: ...
    def updates(self) -> None: ...
    def waited(self, begin: float, end: float, optimizer: int) -> None: ...
    def updated(self, optimizer: int) -> None: ...
    def recorded(self, begin: float, end: float, optimizer: int) -> None: ...
    def kept(self, step: int) -> None: ...

    def cut(self, step: int) -> float:
        before, self._cut_at = self._cut_at, time.monotonic()
        return self._cut_at - before


def costs(width: int, rounds: int, folder: Path) -> dict[str, Stat]:
    """Microseconds a step without the timeline, and what it adds, pair by pair."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # more of them wait for each other where cores are shared
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(64, width)
    loader = [batch] * (STEPS + WARM)
    run = everstep.guard(model, optimizer, loader, dir=folder, epochs=None, strategy="snapshot")
    batches, marks = iter(run), run._moments.mark

    def block(kind: type[Moments]) -> tuple[float, float, float]:
        run._moments.__class__ = kind
        run._moments.mark = marks if kind is Moments else everstep.timeline.unmarked
        steps = max(10, STEPS * 128 // width)
        begin = now()
        for _ in range(steps):
            loss = model(next(batches)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        wall, thread, process = (1e6 * (b - a) / steps for a, b in zip(begin, now(), strict=True))
        return wall, thread, process

    block(Moments)
    found = {name: Stat() for name in ("step", "training thread", "whole process", "wall")}
    for number in range(rounds):
        order = (Moments, Silent) if number % 2 else (Silent, Moments)
        seen = {kind: block(kind) for kind in order}
        found["step"].values.append(seen[Silent][1])
        for place, name in enumerate(("wall", "training thread", "whole process")):
            found[name].values.append(seen[Moments][place] - seen[Silent][place])
    run.close()
    return found


def now() -> tuple[float, float, float]:
    return time.perf_counter(), time.thread_time(), time.process_time()


def marks_alone(folder: Path, rounds: int) -> Stat:
    """Microseconds that the marks of one step take on the thread that makes them."""
    timeline = Timeline(timeline_of_rank(folder, 1))
    moments, found = Moments(timeline.mark), Stat()
    for _ in range(rounds):
        begin = time.thread_time()
        for step in range(MARKED):
            moments.given()
            moments.updates()
            moments.updated(0)
            moments.cut(step)
            moments.kept(step)
        found.values.append(1e6 * (time.thread_time() - begin) / MARKED)
        time.sleep(1.0)  # what has gathered is written, as between steps of a real loop
    timeline.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    table = Table("The timeline", ["what", "median"])
    report = Report("What the timeline costs", "python bench/timeline.py", machine(), [table])
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        alone = marks_alone(Path(folder), 5)
        table.rows.append(["marks of one step, alone", f"{alone.text()} us"])
        report.data["marks_us"] = alone.values
        for number, (name, width) in enumerate(WIDTHS.items()):
            found = costs(width, options.rounds, Path(folder, str(number)))
            for what, stat in found.items():
                middle = sorted(stat.values)[len(stat.values) // 4 : -len(stat.values) // 4 or None]
                spread = f"{short(stat.median, 3)} (middle half {short(middle[0], 3)} to {short(middle[-1], 3)}) us"
                table.rows.append([f"{name}: {what if what == 'step' else f'cost, {what}'}", spread])
            report.data[name] = {what: stat.values for what, stat in found.items()}
            print(table.rows[-4:], flush=True)
    report.save(options.out, "timeline")
    print(report.markdown())


if __name__ == "__main__":
    main()
