"""`everstep show`: what one step on disk is made of."""

from __future__ import annotations

from typing import Annotated

import typer

from everstep.archive import open
from everstep.cli.output import Directory, Json, Step, ago, human_bytes, note, print_json, print_table


def command(
    directory: Directory,
    step: Step = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    json: Json = False,
) -> None:
    """Show the parts of one step on disk, and with --tensors every tensor in them."""
    commit, parts = open(directory).manifest(step)
    if json:
        print_json({"commit": commit, "parts": parts})
        return
    label = note(next((p.replica for p in parts if p.replica), ""))
    print(f"step {commit.step} of run {commit.run}, taken {ago(commit.cut_time)} by {commit.world} rank(s){label}")
    rows = [
        [str(p.rank), human_bytes(p.bytes), str(len(p.pieces)), str(len(p.chunks)), p.torch or "unknown"] for p in parts
    ]
    print_table(["rank", "size", "tensors", "checksums", "torch"], rows)
    if tensors:
        listed = [
            [
                str(p.rank),
                x.name,
                x.dtype,
                str(list(x.shape)),
                "" if x.whole else f"rows {x.start[0]} to {x.start[0] + x.extent[0]}",
            ]
            for p in parts
            for x in p.pieces
        ]
        print_table(["rank", "name", "dtype", "shape", "part"], listed)
