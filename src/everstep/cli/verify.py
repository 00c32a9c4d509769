"""`everstep verify`: read every byte and check it."""

from __future__ import annotations

from typing import Annotated

import typer

from everstep.archive import open
from everstep.cli.output import Directory, Json, MemoryPath, human_bytes, print_json, print_table


def command(
    directory: Directory,
    step: Annotated[int | None, typer.Option("--step", help="A step; by default all of them.")] = None,
    json: Json = False,
    memory: MemoryPath = None,
) -> None:
    """Read and check every byte of a step, or of all steps; exit code 4 if anything is damaged."""
    findings = open(directory, memory=memory).verify(step)
    bad = [finding for finding in findings if finding.problem]
    if json:
        print_json(findings)
    else:
        rows = [
            [
                str(f.step),
                f.source,
                str(f.rank) if f.rank >= 0 else "all",
                human_bytes(f.bytes),
                _verdict(f.problem, f.checked),
            ]
            for f in findings
        ]
        print_table(["step", "source", "rank", "size", "verdict"], rows)
        print(f"{len(findings) - len(bad)} sound, {len(bad)} damaged")
    if bad:
        raise typer.Exit(4)


def _verdict(problem: str, checked: bool) -> str:
    if problem:
        return problem
    return "sound" if checked else "sealed, not yet checksummed"
