"""`everstep export`: a step for other tools."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Annotated

import typer

from everstep.archive import open
from everstep.cli.output import Directory, Json, MemoryPath, Step, print_json
from everstep.errors import PassedOver, ReplayedElsewhere

_TOLD = (PassedOver, ReplayedElsewhere)


def command(
    directory: Directory,
    output: Annotated[Path, typer.Argument(help="The file to write, or the directory for dcp.")],
    format: Annotated[str, typer.Option("--format", help="safetensors, torch or dcp.")] = "safetensors",
    only: Annotated[str, typer.Option("--only", help="all, or model.")] = "all",
    step: Step = None,
    json: Json = False,
    memory: MemoryPath = None,
) -> None:
    """Write a step as one safetensors file, a torch.save file or a DCP directory."""
    from rich.console import Console

    with warnings.catch_warnings(record=True) as said, Console(stderr=True).status(f"exporting to {output}"):
        for category in _TOLD:
            warnings.simplefilter("always", category)
        exported = open(directory, memory=memory).export(output, step, format=format, only=only)
    notes = [str(one.message) for one in said if issubclass(one.category, _TOLD)]
    for one in said:
        if not issubclass(one.category, _TOLD):
            warnings.showwarning(one.message, one.category, one.filename, one.lineno)
    for note in notes:
        print(f"everstep: {note}", file=sys.stderr)
    if json:
        print_json({"step": exported, "path": str(output), "format": format, "notes": notes})
    else:
        print(f"step {exported} is in {output}")
