"""`everstep scavenge`: after a job is gone for good, bring its newest step to where it stays."""

from __future__ import annotations

from typing import Annotated

import typer

from everstep.archive import open
from everstep.cli.output import Directory, Json, MemoryPath, print_json


def command(
    directory: Directory,
    to: Annotated[
        str | None, typer.Option("--to", help="A directory; by default the run's deepest tier, else its own directory.")
    ] = None,
    json: Json = False,
    memory: MemoryPath = None,
) -> None:
    """Write the newest step that all nodes together still have to one place, with what lost nodes had rebuilt."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("writing", total=None)
        step, where = open(directory, memory=memory).scavenge(
            to, watch=lambda done, total: progress.update(task, completed=done, total=total)
        )
    if json:
        print_json({"step": step, "where": where})
    else:
        print(f"step {step} is whole in {where}")
