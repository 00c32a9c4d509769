"""What the timeline costs a training loop: blocks with and without it take turns on one guarded loop in one process.

    python bench/timeline.py [--rounds N] [--out DIR]

For a block without it, everything that the training thread does for it is replaced by nothing. Blocks are short and
many, because a shared machine drifts; each pair of neighbours gives one ratio. Beside that, what a step's marks take by
themselves, in a loop of nothing else, while the file is written.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
from common import Report, Stat, Table, machine
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


def ratios(width: int, rounds: int, folder: Path) -> tuple[Stat, Stat]:
    """Milliseconds a step with the timeline, and the cost of it in per cent, pair by pair."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(64, width)
    loader = [batch] * (STEPS + WARM)
    run = everstep.guard(model, optimizer, loader, dir=folder, epochs=None, strategy="snapshot")
    batches, marks = iter(run), run._moments.mark

    def block(kind: type[Moments]) -> float:
        run._moments.__class__ = kind
        run._moments.mark = marks if kind is Moments else everstep.timeline.unmarked
        steps = max(10, STEPS * 128 // width)
        begin = time.perf_counter()
        for _ in range(steps):
            loss = model(next(batches)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return (time.perf_counter() - begin) / steps

    block(Moments)
    took, cost = Stat(), Stat()
    for number in range(rounds):
        order = (Moments, Silent) if number % 2 else (Silent, Moments)
        seen = {kind: block(kind) for kind in order}
        took.values.append(1000 * seen[Moments])
        cost.values.append(100 * (seen[Moments] / seen[Silent] - 1))
    run.close()
    return took, cost


def marks_alone(folder: Path, rounds: int) -> Stat:
    """Microseconds that the marks of one step take on the thread that makes them."""
    timeline = Timeline(timeline_of_rank(folder, 1))
    moments, found = Moments(timeline.mark), Stat()
    for _ in range(rounds):
        begin = time.perf_counter()
        for step in range(MARKED):
            moments.given()
            moments.updates()
            moments.updated(0)
            moments.cut(step)
            moments.kept(step)
        found.values.append(1e6 * (time.perf_counter() - begin) / MARKED)
        time.sleep(1.0)  # what has gathered is written, as between steps of a real loop
    timeline.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    table = Table("The timeline", ["what", "median (smallest-largest)"])
    report = Report("What the timeline costs", "python bench/timeline.py", machine(), [table])
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        alone = marks_alone(Path(folder), 5)
        table.rows.append(["marks of one step, alone", f"{alone.text()} us"])
        report.data["marks_us"] = alone.values
        for number, (name, width) in enumerate(WIDTHS.items()):
            took, cost = ratios(width, options.rounds, Path(folder, str(number)))
            quarters = sorted(cost.values)[len(cost.values) // 4 :: max(1, len(cost.values) // 2)][:2]
            table.rows.append([f"{name}: step", f"{took.text()} ms"])
            spread = " to ".join(f"{value:.2g}" for value in quarters)
            table.rows.append([f"{name}: cost of the timeline", f"{cost.text()} %, middle half {spread} %"])
            report.data[name] = {"step_ms": took.values, "cost_percent": cost.values}
            print(table.rows[-2:], flush=True)
    report.save(options.out, "timeline")
    print(report.markdown())


if __name__ == "__main__":
    main()
