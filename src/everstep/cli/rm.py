"""`everstep rm`: delete steps."""

from __future__ import annotations

from typing import Annotated

import typer

from everstep.archive import open
from everstep.cli.output import Directory, Json, print_json


def command(
    directory: Directory,
    steps: Annotated[list[int], typer.Argument(help="The steps to delete from the disk.")],
    json: Json = False,
) -> None:
    """Delete steps from the disk; the last one that can be restored is refused."""
    archive = open(directory)
    for step in steps:
        archive.remove(step)
        if not json:
            print(f"step {step} is gone")
    if json:
        print_json({"removed": steps})
