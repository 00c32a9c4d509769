"""`everstep rewind`: back to an earlier step."""

from __future__ import annotations

from typing import Annotated

import typer

from everstep.archive import open
from everstep.cli.output import Directory, Json, print_json
from everstep.errors import BadConfig
from everstep.recover.reach import in_words


def command(
    directory: Directory,
    step: Annotated[int | None, typer.Argument(help="The step that the next life goes on from.")] = None,
    undo: Annotated[bool, typer.Option("--undo", help="Go on from the newest step, as if nobody had asked.")] = False,
    json: Json = False,
) -> None:
    """Have the next life go on from an earlier step, which then sets aside what is newer."""
    if (step is None) is not undo:
        raise BadConfig("give a step to go back to, or --undo")
    newer = open(directory).rewind(step)
    if json:
        print_json({"step": step, "newer": newer})
    elif step is None:
        print("the next life goes on from the newest step")
    else:
        gone = f"; {'step' if len(newer) == 1 else 'steps'} {in_words(newer)} will be set aside" if newer else ""
        print(f"the next life goes on from step {step}{gone}")
