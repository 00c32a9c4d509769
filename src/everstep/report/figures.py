"""The pictures of a report, by plotly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from everstep.events import RanksLost, Started, WentOn
from everstep.report.rows import ROWS, called, row_of
from everstep.report.series import Line, Steps, exposure, occupancy, utilisation
from everstep.report.story import Story
from everstep.timeline import Kind, Span

MOST_SPANS = 20_000  # in one picture; a browser becomes slow with more
_SHOWN_STEPS = 8  # that the timeline shows at first
_LOST = "lost"
_COLOURS = {
    Kind.DATA: "#b9a44c", Kind.COMPUTE: "#4c78a8", Kind.FORWARD: "#4c78a8",
    Kind.BACKWARD: "#2f5d8a", Kind.COMMUNICATION: "#72b7b2", Kind.GATE: "#e45756", Kind.UPDATE: "#54a24b",
    Kind.RECORD: "#f58518", Kind.CUT: "#b279a2", Kind.COPY: "#f2cf9b", Kind.BUCKET: "#f58518", Kind.DRAIN: "#f58518",
    Kind.PERSIST: "#9d755d", Kind.APPEND: "#79706e", Kind.PROTECT: "#83bcb6", Kind.FLUSH: "#d67195",
    Kind.RECOVERY: "#fbd1d1", Kind.LOAD: "#e45756", Kind.REPLAY: "#ff9da6",
}  # fmt: skip
LINES = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#9d755d", "#79706e")
_THICK = {Kind.BUCKET: 0.4, Kind.RECORD: 0.4, Kind.LOAD: 0.5, Kind.REPLAY: 0.5}  # what lies inside another


def blank(height: int, **layout: Any) -> go.Figure:
    font = {"family": "system-ui, sans-serif", "size": 13, "color": "#24292f"}
    figure = go.Figure()
    figure.update_layout(
        height=height, font=font, paper_bgcolor="white", plot_bgcolor="white", modebar={"orientation": "v"},
        margin={"l": 150, "r": 45, "t": 40, "b": 50},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0}, hovermode="closest", **layout,
    )  # fmt: skip
    figure.update_xaxes(gridcolor="#eef0f3", zeroline=False, title="seconds since the run began")
    figure.update_yaxes(gridcolor="#eef0f3", zeroline=False)
    return figure


def timeline(story: Story) -> tuple[go.Figure, str]:
    """Rank by rank, and what of it is shown."""
    spans = [(track.name, span) for track in story.tracks for span in track.spans]
    spans.sort(key=lambda pair: pair[1].begin)
    left_out, spans = max(0, len(spans) - MOST_SPANS), spans[-MOST_SPANS:]
    used = {(name, row_of(span)) for name, span in spans}
    places = [f"{t.name} · {row}" for t in story.tracks for row in ROWS if (t.name, row) in used]
    figure = blank(130 + 26 * len(places), barmode="overlay", bargap=0.15, dragmode="pan")
    by_kind: dict[int, list[tuple[str, Span]]] = {}
    for name, span in spans:
        by_kind.setdefault(span.kind, []).append((f"{name} · {row_of(span)}", span))
    for kind in sorted(by_kind):
        of_kind = by_kind[kind]
        figure.add_bar(
            y=[place for place, _ in of_kind], base=[round(s.begin - story.began, 6) for _, s in of_kind],
            x=[round(s.seconds, 6) for _, s in of_kind], orientation="h", name=called(kind),
            width=_THICK.get(Kind(kind), 0.8) if kind in set(Kind) else 0.8,
            customdata=[(s.step, round(1000 * s.seconds, 3), s.part, s.pid) for _, s in of_kind],
            hovertemplate=f"{called(kind)}, step %{{customdata[0]}}: %{{customdata[1]}} ms<br>"
            "part %{customdata[2]}, process %{customdata[3]}<extra></extra>",
            marker={"color": _colours(of_kind), "line": {"width": 0}},
        )  # fmt: skip
    figure.update_yaxes(categoryorder="array", categoryarray=places[::-1], fixedrange=True)
    shown = _first_view(story, [span for _, span in spans if span.kind == Kind.STEP])
    if shown:
        figure.update_xaxes(range=[shown[0].begin - story.began, max(s.end for s in shown) - story.began])
    mark_losses(figure, story)
    said = f"The {len(spans)} newest spans; {left_out} older ones are in `everstep trace`." if left_out else ""
    return figure, said


def _first_view(story: Story, steps: list[Span]) -> list[Span]:
    """The steps around the first loss that was survived; else some in the middle."""
    count = _SHOWN_STEPS * max(1, sum(track.name.startswith("rank") for track in story.tracks))
    back = next((when for when, word, _ in _turns(story) if word != _LOST), None)
    if back is not None:
        before, after = [s for s in steps if s.begin < back], [s for s in steps if s.begin >= back]
        if before and after:
            return before[-count // 2 :] + after[: count // 2]
    return steps[len(steps) // 2 :][:count]


def _colours(of_kind: list[tuple[str, Span]]) -> str | list[str]:
    """Steps follow each other without a gap, so every second one is darker."""
    kind = of_kind[0][1].kind
    if kind == Kind.STEP:
        return ["#d7dce2" if span.step % 2 else "#bcc5cf" for _, span in of_kind]
    return _COLOURS[Kind(kind)] if kind in set(Kind) else "#888"


def step_times(stories: Sequence[tuple[str, Story, list[Steps]]]) -> go.Figure:
    """Those with a base being copied beside them are filled, others are hollow."""
    figure = blank(340)
    number = 0
    for label, story, ranks in stories:
        for one in ranks:
            colour = LINES[number % len(LINES)]
            number += 1
            symbols = ["circle" if captured else "circle-open" for captured in one.captured]
            figure.add_scattergl(
                x=[round(end - story.began, 4) for end in one.ends], y=[round(1000 * s, 4) for s in one.seconds],
                mode="markers", name=f"{label}{one.name}", marker={"color": colour, "size": 5, "symbol": symbols},
                customdata=one.steps, hovertemplate="step %{customdata}: %{y:.2f} ms<extra></extra>",
            )  # fmt: skip
        mark_losses(figure, story)
    figure.update_xaxes(range=[0, max(story.seconds for _, story, _ in stories)])
    round_numbers = [number * 10**power for power in range(-3, 7) for number in (1, 2, 5)]
    figure.update_yaxes(title="step, milliseconds", type="log", tickvals=round_numbers)
    return figure


def exposed(story: Story) -> go.Figure:
    figure = _lines(exposure(story), story, 300)
    figure.update_yaxes(title="steps that would be lost", rangemode="tozero")
    mark_losses(figure, story)
    return figure


def occupied(story: Story) -> go.Figure:
    lines = {name: [(when, size / 1e6) for when, size in line] for name, line in occupancy(story).items()}
    figure = _lines(lines, story, 280)
    figure.update_yaxes(title="megabytes", rangemode="tozero")
    return figure


def utilised(story: Story) -> go.Figure:
    figure = blank(260)
    for number, (name, line) in enumerate(utilisation(story).items()):
        figure.add_scattergl(
            x=[round(when - story.began, 4) for when, _ in line], y=[percent for _, percent in line], mode="lines",
            line={"width": 1.5, "color": LINES[number % len(LINES)]}, name=name,
        )  # fmt: skip
    figure.update_xaxes(range=[0, story.seconds])
    figure.update_yaxes(title="busy, per cent", range=[0, 102])
    mark_losses(figure, story)
    return figure


def _lines(lines: dict[str, Line], story: Story, height: int) -> go.Figure:
    """Each value holds until the next; all lines end together."""
    figure = blank(height)
    figure.update_xaxes(range=[0, story.seconds])
    end = max((when for line in lines.values() for when, _ in line), default=0.0)
    for number, (name, line) in enumerate(lines.items()):
        points = [*line, (end, line[-1][1])]
        figure.add_scatter(
            x=[round(when - story.began, 4) for when, _ in points], y=[value for _, value in points], mode="lines",
            line={"shape": "hv", "width": 2, "color": LINES[number % len(LINES)]}, name=name,
        )  # fmt: skip
    return figure


def _turns(story: Story) -> list[tuple[float, str, str]]:
    """When ranks were lost and when it went on, in words and colours, in the order of time."""
    started = [event for event in story.events if isinstance(event, Started) and event.rank == 0]
    found = [(e.time, _LOST, "#e45756") for e in story.events if isinstance(e, RanksLost)]
    found += [(e.time, "went on", "#54a24b") for e in story.events if isinstance(e, WentOn) and e.rank == 0]
    found += [(e.time, "started again", "#54a24b") for e in started[1:] if not _is_live(e, story)]
    return sorted(found)


def mark_losses(figure: go.Figure, story: Story) -> None:
    """Where a rank was lost, and where it went on."""
    for when, word, colour in _turns(story)[:40]:
        figure.add_vline(x=round(when - story.began, 4), line={"color": colour, "width": 1, "dash": "dot"})
        figure.add_annotation(
            x=round(when - story.began, 4), y=1, yref="paper", text=word, showarrow=False, textangle=-90,
            xanchor="right", yanchor="top", font={"size": 11, "color": colour},
        )  # fmt: skip


def _is_live(started: Started, story: Story) -> bool:
    """Whether a life was begun without leaving its process, which another event tells."""
    return any(isinstance(e, WentOn) and abs(e.time - started.time) < 1.0 and e.rank == 0 for e in story.events)
