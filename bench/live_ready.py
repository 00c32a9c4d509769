"""What being ready for a loss costs in a good step, in processor time, on a machine that others use too.

    python bench/live_ready.py [--rounds N] [--steps N] [--before SRC] [--out DIR]

The loop of `bench/live.py`, in short jobs that take turns, many times. Beside the time of a step, which depends on the
neighbours, stands the processor time of a step by all ranks, which does so less. Every job is compared with the one
without on_loss of its own round. `--before`: the sources of another Everstep, whose "forward" takes turns too.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from common import Report, Stat, Table, Target, machine
from live import BEFORE, HERE, Jobs, over, steady


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--before", help="the sources of another Everstep")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    given = parser.parse_args()
    command = f"python bench/live_ready.py --rounds {given.rounds} --steps {given.steps}"
    report = Report("Being ready for a loss", command + " --before SRC" * bool(given.before), machine())
    ways = ["guard", "rollback", "forward", *([f"forward{BEFORE}"] if given.before else [])]
    jobs = Jobs(None, given.before)
    table = Table(
        "A good step, over capturing alone",
        ["ranks", "way", "processor time, ms", "over guard", "middle half", "step, ms", "over guard", "middle half"],
        note="guard: every step captured, nobody ready for a loss. Processor time is that of all ranks together. "
        "Medians and ranges over jobs, and the middle half of the ratios. The machine was shared: see the log.",
    )  # fmt: skip
    for count in (1, 2):
        found = {way: (Stat(), Stat()) for way in ways}
        for number in range(given.rounds):
            for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
                job = steady(jobs, count, way, given.steps)
                found[way][0].values.append(job.processor_s)
                found[way][1].values.append(job.step_s)
        for way, measured in found.items():
            cells = []
            for mine, plain in zip(measured, found["guard"], strict=True):
                ratio = over(mine, plain)
                cells += [mine.text(1e3), ratio.text(100) + " %", _half(ratio)]
            table.rows.append([str(count), way, *cells])
            print(*table.rows[-1], sep=" | ", flush=True)
            if way == "forward":
                ratio = over(measured[0], found["guard"][0])
                name = f"{way}: processor time, {count} ranks, over guard"
                report.targets.append(Target(name, "<= 1 %", ratio.text(100) + " %", ratio.median <= 0.01))
    report.tables.append(table)
    report.save(given.out, "live-ready")
    print(report.markdown())


def _half(ratio: Stat) -> str:
    """Between the quartiles, which a few unlucky jobs do not move."""
    low, _, high = statistics.quantiles(ratio.values, n=4)
    return f"{low * 100:.2g} to {high * 100:.2g} %"


if __name__ == "__main__":
    main()
