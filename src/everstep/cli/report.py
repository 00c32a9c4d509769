"""`everstep report`: a run as one page to look at and to show around."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from everstep.cli.output import Directory, human_bytes, watching
from everstep.errors import BadConfig
from everstep.report.story import read_story
from everstep.report.whole import whole_file


def command(
    directory: Directory,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path("report.html"),
    compare: Annotated[
        list[Path] | None, typer.Option("--compare", help="Another run to stand beside it; may be given several times.")
    ] = None,
) -> None:
    """Write one self-contained page: timeline, step times, exposure, occupancy, failures, the tuner's decisions."""
    try:
        from everstep.report.page import write_page
    except ImportError:
        raise BadConfig("the report needs plotly: pip install 'everstep[report]'") from None
    with watching() as watch:
        stories = []
        for one in (directory, *(compare or ())):
            watch(f"reading {one}")
            stories.append(read_story(one))
        watch("drawing")
        with whole_file(output) as file:
            write_page(stories, file)
    print(f"{output}: {human_bytes(output.stat().st_size)}; it needs no network")
    for story in stories:
        for sentence in story.missing:
            print(f"{story.directory}: {sentence}")
