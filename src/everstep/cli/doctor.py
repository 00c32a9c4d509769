"""`everstep doctor`: what of this machine would hinder a run, and what to do about it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from everstep.cli.environment import (
    PROBE_BYTES,
    Line,
    clock_line,
    clocks,
    disk_lines,
    is_synchronized,
    system_lines,
    torch_lines,
)
from everstep.cli.output import Json, bar, print_json, print_table

MUST_BE_FIXED = 1


def command(
    directory: Annotated[Path, typer.Argument(help="Where the run's directory is, or would be.")] = Path("."),
    torch: Annotated[
        bool, typer.Option("--torch", help="Also load torch, which takes seconds, and ask it for CUDA and NCCL.")
    ] = False,
    json: Json = False,
) -> None:
    """Look at Python, packages, memory, disk, ports and clocks, and say what to fix.

    Writes 128 MiB beside the directory, reads them back and removes them. Exit code 1 if anything must be fixed.
    """
    lines = _looked_at(directory, torch)
    if json:
        print_json(lines)
    else:
        print_table(["what", "found", "verdict", "what to do"], [[x.what, x.found, x.verdict, x.advice] for x in lines])
        count = {
            verdict: sum(line.verdict == verdict for line in lines) for verdict in ("worth a look", "must be fixed")
        }
        print(", ".join(f"{number} {verdict}" for verdict, number in count.items()))
    if any(line.verdict == "must be fixed" for line in lines):
        raise typer.Exit(MUST_BE_FIXED)


def _looked_at(directory: Path, with_torch: bool) -> list[Line]:
    before = clocks()
    lines = system_lines()
    if with_torch:
        lines += torch_lines()
    with bar("writing and reading back", PROBE_BYTES) as watch:
        lines += disk_lines(directory, watch)
    return [*lines, clock_line(before, clocks(), is_synchronized())]
