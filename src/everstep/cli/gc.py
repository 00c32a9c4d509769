"""`everstep gc`: remove what crashes and dead runs left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from everstep.archive import open
from everstep.cli.output import Json, MemoryPath, human_bytes, print_json, print_table
from everstep.config import Keep
from everstep.errors import EverstepError
from everstep.keeper.scavenge import give_back, look


def command(
    directory: Annotated[
        Path | None, typer.Argument(help="A run's directory; without it only memory is cleaned.")
    ] = None,
    keep: Annotated[int | None, typer.Option("--keep", help="Also delete all but this many newest steps.")] = None,
    guests: Annotated[bool, typer.Option("--guests", help="Also give up what is held for other nodes.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what is there.")] = False,
    json: Json = False,
    memory: MemoryPath = None,
) -> None:
    """Free the memory of dead runs (after saving what only it holds), and tidy a run's directory."""
    archive = open(directory, memory=memory) if directory is not None else None
    policy = Keep(last=keep) if keep is not None else None
    left = look(memory)
    done = {}
    for one in left:
        try:
            done[one.run] = one.state if dry_run else give_back(one, memory, guests=guests)
        except (EverstepError, OSError) as error:
            done[one.run] = f"kept: {error}"
    cleaned = {}
    if archive is not None and not dry_run:
        cleaned = archive.clean(policy)
    if json:
        print_json(
            {"memory": [{"run": o.run, "bytes": o.bytes, "outcome": done[o.run]} for o in left], "disk": cleaned}
        )
        return
    if left:
        rows = [[o.run, str(o.directory or "gone"), human_bytes(o.bytes), done[o.run]] for o in left]
        print_table(["run", "directory", "size", "outcome"], rows)
    for what, steps in cleaned.items():
        if steps:
            print(f"{what}: {', '.join(map(str, steps))}")
    if not left and not any(cleaned.values()):
        print("nothing to remove")
