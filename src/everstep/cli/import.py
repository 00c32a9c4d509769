"""`everstep import`: the weights of another tool's checkpoint as step 0 of a new run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from everstep.cli.output import Directory, Json, human_bytes, print_json


def command(
    source: Annotated[Path, typer.Argument(help="A torch.save or safetensors file, a DCP directory or an HF folder.")],
    directory: Directory,
    key: Annotated[str | None, typer.Option("--key", help="Where in it the model's state_dict is, as a.b.c.")] = None,
    optimizer: Annotated[
        str | None, typer.Option("--optimizer", help="Also take the optimizer's state, of this class: AdamW.")
    ] = None,
    json: Json = False,
) -> None:
    """Make a run whose step 0 is what a file of another tool holds; nothing of the file is executed."""
    from rich.console import Console
    from rich.progress import Progress

    from everstep.integrations.adopt import adopt

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("importing", total=None)
        adopted = adopt(
            source, directory, key=key, optimizer=optimizer,
            watch=lambda done, total: progress.update(task, completed=done, total=total),
        )  # fmt: skip
    if json:
        print_json(adopted)
        return
    for note in adopted.notes:
        print(f"everstep: {note}", file=sys.stderr)
    taken = f" and the state of {adopted.optimizer}" if adopted.optimizer else ""
    size = human_bytes(adopted.bytes)
    print(f"{adopted.kind} is step 0 of {directory}: {adopted.tensors} tensors{taken}, {size}")
