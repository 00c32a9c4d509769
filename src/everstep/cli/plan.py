"""`everstep plan`: what a restart would do, and why not otherwise."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from everstep.archive import open
from everstep.cli.output import Directory, Json, MemoryPath, human_bytes, note, print_json, print_table
from everstep.recover.reach import records_of


def command(
    directory: Directory,
    lost: Annotated[list[str] | None, typer.Option("--lost", help="Taken to be lost: memory, disk, or a node.")] = None,
    json: Json = False,
    memory: MemoryPath = None,
) -> None:
    """Show which step a restart would take, from where, and why every newer one was passed over."""
    plan = open(directory, memory=memory).plan(lost or ())
    if json:
        print_json({**msgspec.structs.asdict(plan), "base": plan.base})
        return
    if plan.step is None:
        print("nothing can be restored")
    else:
        rows = [
            [str(p.rank), p.source + note(p.replica), p.node, human_bytes(p.bytes), "yes" if p.checked else "seal only"]
            for p in plan.parts
        ]
        print_table(["rank", "from", "node", "size", "checksums"], rows, title=f"step {plan.step} would be restored")
    if plan.records:
        steps, size = records_of(plan)
        print(f"base {plan.base}, then {steps} step(s) repeated from {human_bytes(size)} of records")
        runs = [
            [str(r.rank), r.source, r.node, f"{r.first}-{r.last}", human_bytes(r.bytes * (r.last - r.first + 1))]
            for r in plan.records
        ]
        print_table(["rank", "from", "node", "steps", "size"], runs)
    if plan.rejections:
        rejected = [[str(r.step), r.source, r.reason] for r in plan.rejections]
        print_table(["step", "source", "passed over because"], rejected)
