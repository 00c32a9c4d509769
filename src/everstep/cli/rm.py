"""`everstep rm`: delete steps."""

from __future__ import annotations

from typing import Annotated

import typer

from everstep.archive import open
from everstep.cli.output import Directory, Json, print_json
from everstep.recover.reach import in_words


def command(
    directory: Directory,
    steps: Annotated[list[int], typer.Argument(help="The steps to delete from the disk.")],
    json: Json = False,
) -> None:
    """Delete steps from the disk; the last one that can be restored is refused, and one that the newest needs."""
    archive = open(directory)
    gone: list[int] = []
    for step in steps:
        with_it = archive.remove(step)
        gone += with_it
        if not json:
            still = "; it can still be had from elsewhere" if step in archive.steps() else ""
            print(f"step {step} is gone" + (f", and with it {in_words(with_it)} of the log" if with_it else "") + still)
    if json:
        print_json({"removed": steps, "gone_with_them": gone})
