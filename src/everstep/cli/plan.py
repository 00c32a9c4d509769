"""`everstep plan`: what a restart would do, and why not otherwise."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from everstep.archive import open
from everstep.cli.output import (
    Directory,
    Json,
    MemoryPath,
    human_bytes,
    human_seconds,
    note,
    print_json,
    print_table,
)
from everstep.recover.reach import records_of
from everstep.recover.times import Times


def command(
    directory: Directory,
    lost: Annotated[list[str] | None, typer.Option("--lost", help="Taken to be lost: memory, disk, or a node.")] = None,
    json: Json = False,
    memory: MemoryPath = None,
) -> None:
    """Show which step a restart would take, from where, and why every newer one was passed over."""
    past = open(directory, memory=memory)
    plan = past.plan(lost or ())
    times = past.times(plan)
    if json:
        print_json({**msgspec.structs.asdict(plan), "base": plan.base, "times": times})
        return
    if plan.step is None:
        print("nothing can be restored")
    else:
        rows = [
            [str(p.rank), p.source + note(p.replica), p.node, human_bytes(p.bytes), _about(took),
             "yes" if p.checked else "seal only"]
            for p, took in zip(plan.parts, times.parts, strict=True)
        ]  # fmt: skip
        columns = ["rank", "from", "node", "size", "time", "checksums"]
        print_table(columns, rows, title=f"step {plan.step} would be restored")
    if plan.records:
        steps, size = records_of(plan)
        print(f"base {plan.base}, then {steps} step(s) repeated from {human_bytes(size)} of records")
        runs = [
            [str(r.rank), r.source, r.node, f"{r.first}-{r.last}", human_bytes(r.bytes * (r.last - r.first + 1)),
             _about(took)]
            for r, took in zip(plan.records, times.records, strict=True)
        ]  # fmt: skip
        print_table(["rank", "from", "node", "steps", "size", "time"], runs)
    if plan.step is not None:
        print(_in_words(times))
    newer = [r for r in plan.rejections if plan.step is None or r.step > plan.step or r.step == 0]  # 0: not known
    if newer:
        rejected = [[str(r.step), r.source, r.reason] for r in newer]
        print_table(["step", "source", "passed over because"], rejected)


def _about(seconds: float | None) -> str:
    return "not measured" if seconds is None else human_seconds(seconds)


def _in_words(times: Times) -> str:
    said = [
        f"{source} at {human_bytes(round(rate.bytes_per_s))}/s, as it was {rate.measured}"
        for source, rate in times.rates.items()
    ]
    said += [f"{what} was not measured yet" for what in times.unmeasured]
    total = "how long it would take is not known" if times.total is None else f"about {human_seconds(times.total)}"
    return f"{total}: {'; '.join(said)}"
