"""`everstep verify`: read every byte and check it."""

from __future__ import annotations

from typing import Annotated

import typer

from everstep.archive import Archive, open
from everstep.cli.output import Directory, Json, MemoryPath, human_bytes, print_json, print_table
from everstep.recover.audit import Finding


def command(
    directory: Directory,
    step: Annotated[int | None, typer.Option("--step", help="A step; by default all of them.")] = None,
    replay: Annotated[
        bool, typer.Option("--replay", help="Also repeat the steps of the log and compare digests; needs torch.")
    ] = False,
    json: Json = False,
    memory: MemoryPath = None,
) -> None:
    """Read and check every byte of a step, or of all steps and the log, here and on nodes whose keepers answer.

    Exit code 4 if anything is damaged. Nodes that could not be asked are named.
    """
    findings = _watched(open(directory, memory=memory), step, replay)
    bad = [finding for finding in findings if finding.problem]
    unasked = [finding for finding in findings if not finding.asked]
    if json:
        print_json(findings)
    else:
        rows = [
            [
                str(f.step),
                f"{f.source} of {f.node}" if f.node else f.source,
                str(f.rank) if f.rank >= 0 else "all",
                human_bytes(f.bytes),
                _verdict(f),
            ]
            for f in findings
            if f.asked
        ]
        print_table(["step", "source", "rank", "size", "verdict"], rows)
        print(f"{len(findings) - len(bad) - len(unasked)} sound, {len(bad)} damaged")
        for finding in unasked:
            print(f"not asked: {finding.node}: {finding.note}")
        if bad:
            print(f"everstep plan {directory} says what a restart takes instead")
    if bad:
        raise typer.Exit(4)


def _watched(archive: Archive, step: int | None, replay: bool) -> list[Finding]:
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("verifying", total=None)
        return archive.verify(
            step, replay=replay, watch=lambda done, total: progress.update(task, completed=done, total=total)
        )


def _verdict(found: Finding) -> str:
    if found.problem:
        return found.problem
    verdict = "sound" if found.checked else "sealed, not yet checksummed"
    return f"{verdict}: {found.note}" if found.note else verdict
