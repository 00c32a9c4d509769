"""`everstep report`: a run, or a simulation, as one page to look at and to show around."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from everstep.cli.output import human_bytes, watching
from everstep.errors import BadConfig
from everstep.report.outcomes import read_simulation
from everstep.report.story import Story, read_story
from everstep.report.whole import whole_file


def command(
    source: Annotated[
        Path,
        typer.Argument(help="The run's directory: the dir= of guard(); or a file that `simulate --json` has written."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path("report.html"),
    compare: Annotated[
        list[Path] | None, typer.Option("--compare", help="Another run to stand beside it; may be given several times.")
    ] = None,
) -> None:
    """Write one self-contained page.

    Of a run: timeline, step times, exposure, occupancy, failures, the tuner's decisions. Of a simulation: goodput, and
    wasted time by cause and over time.
    """
    stories = list[Story]()
    with watching() as watch:
        if source.is_file():
            if compare:
                raise BadConfig(f"{source} is a simulation: --compare is for runs")
            _draw_simulation(source, output)
        else:
            for one in (source, *(compare or ())):
                watch(f"reading {one}")
                stories.append(read_story(one))
            watch("drawing")
            _draw(stories, output)
    print(f"{output}: {human_bytes(output.stat().st_size)}; it needs no network")
    for story in stories:
        for sentence in story.missing:
            print(f"{story.directory}: {sentence}")


def _draw(stories: list[Story], output: Path) -> None:
    try:
        from everstep.report.page import write_page
    except ImportError:
        raise _no_plotly() from None
    with whole_file(output) as file:
        write_page(stories, file)


def _draw_simulation(source: Path, output: Path) -> None:
    simulated = read_simulation(source)
    try:
        from everstep.report.simulated import write_simulated
    except ImportError:
        raise _no_plotly() from None
    with whole_file(output) as file:
        write_simulated(simulated, file)


def _no_plotly() -> BadConfig:
    return BadConfig("the report needs plotly: pip install 'everstep[report]'")
