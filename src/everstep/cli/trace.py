"""`everstep trace`: what ranks and keepers did when, for Perfetto or Chrome."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from everstep.cli.output import Directory, watching
from everstep.report.story import read_story
from everstep.report.trace import write_trace
from everstep.report.whole import whole_file


def command(
    directory: Directory,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path("trace.json"),
) -> None:
    """Write the timeline of a run as a trace: open it at ui.perfetto.dev or in chrome://tracing."""
    with watching() as watch:
        watch(f"reading {directory}")
        story = read_story(directory)
        watch("writing the trace")
        with whole_file(output) as file:
            spans = write_trace(story, file)
    print(f"{output}: {spans} spans of {len(story.tracks)} processes and {len(story.events)} events")
    for sentence in story.missing:
        print(sentence)
