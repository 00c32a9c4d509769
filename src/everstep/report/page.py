"""One page that has everything in it: pictures, tables, and the script that draws them. It asks no network."""

from __future__ import annotations

import datetime
import html
from collections.abc import Sequence
from statistics import median
from typing import Any, TextIO

from plotly.offline import get_plotlyjs

from everstep.events import Chose, Finished, RanksLost, Replayed, Started, Tuned, WentOn
from everstep.report import figures
from everstep.report.series import Steps, exposure, incidents, steps_of
from everstep.report.story import Story
from everstep.timeline import Kind

_CONFIG = {
    "displaylogo": False,
    "responsive": True,
    "scrollZoom": True,
    "modeBarButtonsToRemove": ["lasso2d", "select2d"],
}
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #24292f; margin: 0 auto; max-width: 1280px; padding: 24px; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 36px 0 4px; } h1 + p, .note { color: #57606a; }
.note { margin: 0 0 8px; font-size: 14px; } section { margin-top: 12px; }
table { border-collapse: collapse; font-size: 13.5px; width: 100%; } .scroll { max-height: 420px; overflow: auto; }
th, td { text-align: left; padding: 4px 12px 4px 0; border-bottom: 1px solid #eaeef2; vertical-align: top; }
th { color: #57606a; font-weight: 600; position: sticky; top: 0; background: white; } td.n { text-align: right; }
.missing { background: #fff8e5; border-left: 4px solid #d4a72c; padding: 8px 12px; margin: 12px 0; }
.facts { display: flex; flex-wrap: wrap; gap: 12px; margin: 16px 0; }
.fact { border: 1px solid #d8dee4; border-radius: 8px; padding: 8px 16px; } .fact b { display: block; font-size: 20px; }
.bad { color: #b42318; } hr { border: 0; border-top: 2px solid #d8dee4; margin: 48px 0 24px; }
"""


def write_page(stories: Sequence[Story], file: TextIO) -> None:
    """The first story, and the others beside it."""
    titles = _titles(stories)
    file.write(
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{_text(titles[0])} - everstep</title>"
    )
    file.write(f"<style>{_STYLE}</style><script>{get_plotlyjs()}</script></head><body>\n")
    steps = [[one for one in map(steps_of, story.tracks) if one.steps] for story in stories]
    if len(stories) > 1:
        file.write(_compared(titles, stories, steps))
    for title, story, ranks in zip(titles, stories, steps, strict=True):
        file.write("<hr>" if len(stories) > 1 else "")
        file.write(_chapter(title, story, ranks))
    file.write("</body></html>\n")


def _titles(stories: Sequence[Story]) -> list[str]:
    names = [story.directory.name for story in stories]
    return [n if names.count(n) == 1 else str(s.directory) for n, s in zip(names, stories, strict=True)]


def _text(words: object) -> str:
    return html.escape(str(words))


def _drawn(figure: Any) -> str:
    return str(figure.to_html(full_html=False, include_plotlyjs=False, config=_CONFIG))


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    head = "".join(f"<th>{_text(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class='scroll'><table><tr>{head}</tr>{body}</table></div>\n"


def _section(title: str, note: str, body: str) -> str:
    return f"<section><h2>{_text(title)}</h2><p class='note'>{_text(note)}</p>{body}</section>\n"


def _facts(story: Story, ranks: list[Steps]) -> dict[str, str]:
    """What fits on a card."""
    newest = max((step for one in ranks for step in one.steps), default=None)
    finished = max((e.step for e in story.events if isinstance(e, Finished)), default=None)
    worst = {loss: max(steps for _, steps in line) for loss, line in exposure(story).items()}
    losses = sum(isinstance(e, RanksLost) for e in story.events)
    starts = sum(isinstance(e, Started) and e.rank == 0 for e in story.events)
    return {
        "steps": "not known" if newest is None and finished is None else str(max(newest or 0, finished or 0)),
        "ranks": str(max((e.world for e in story.events if isinstance(e, Started)), default="not known")),
        "ms a step, a base copied beside it": _middle(ranks, captured=True),
        "ms a step, none beside it": _middle(ranks, captured=False),
        "of the time went into keeping": _share(ranks),
        "ranks lost": str(losses),
        "starts of rank 0": str(starts),
        "s to recover, together": f"{_recovery_s(story):.2f}",
        "steps lost at most, if processes die": str(worst.get("the processes die", "not known")),
    }


def _middle(ranks: list[Steps], *, captured: bool) -> str:
    """Of all ranks' steps, and how many those are."""
    found = [seconds for one in ranks for seconds in one.took(captured=captured)]
    return f"{1000 * median(found):.3g} (of {len(found)})" if found else "no such step"


def _share(ranks: list[Steps]) -> str:
    found = [one.share for one in ranks if one.share is not None]
    return f"{100 * max(found):.2g} %" if found else "not known"


def _recovery_s(story: Story) -> float:
    """Of rank 0: loading and repeating in a new process, or all until it went on within one."""
    live = sum(e.stopped_s + e.met_s + e.restored_s for e in story.events if isinstance(e, WentOn) and e.rank == 0)
    spans = [s for t in story.tracks if t.name == "rank 0" for s in t.spans if s.kind == Kind.RECOVERY]
    lived = [e.time for e in story.events if isinstance(e, WentOn) and e.rank == 0]
    return live + sum(s.seconds for s in spans if not any(0 <= when - s.end < 5.0 for when in lived))


def _chapter(title: str, story: Story, ranks: list[Steps]) -> str:
    when = datetime.datetime.fromtimestamp(story.began, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    name = f"run {story.run or 'without a name'} in {story.directory}, since {when}"
    parts = [f"<h1>{_text(title)}</h1><p>{_text(name)}</p>"]
    if story.missing:
        parts.append("<div class='missing'>" + "<br>".join(map(_text, story.missing)) + "</div>")
    cards = "".join(f"<div class='fact'><b>{_text(v)}</b>{_text(k)}</div>" for k, v in _facts(story, ranks).items())
    parts.append(f"<div class='facts'>{cards}</div>")
    if any(track.spans for track in story.tracks):
        figure, said = figures.timeline(story)
        note = (
            "Drag to move, scroll to zoom, double-click to see all. Of a device these are the host's times: when work "
        )
        parts.append(_section("Timeline", f"{note}was handed over. {said}", _drawn(figure)))
    if ranks:
        note = "Filled: a base was copied beside the step. Hollow: none was."
        parts.append(_section("Step time", note, _drawn(figures.step_times([("", story, ranks)]))))
        note = "How many steps each kind of loss would have cost at that moment."
        parts.append(_section("Exposure", note, _drawn(figures.exposed(story))))
    note = "Arenas and rings in memory, bases on the disk and beyond it; the log is not in it."
    parts.append(_section("Occupancy", note, _drawn(figures.occupied(story))))
    parts.append(
        _section("What happened", "Failures, recoveries and all that was not as it should be.", _incidents(story))
    )
    parts.append(
        _section("What the tuner decided", "Each number with its formula and what went into it.", _tuned(story))
    )
    return "\n".join(parts)


def _incidents(story: Story) -> str:
    rows = [[f"{when - story.began:.2f} s", kind, words] for when, kind, words in incidents(story)]
    return _table(["when", "what", "in words"], rows) if rows else "<p>Nothing is known.</p>"


def _tuned(story: Story) -> str:
    rows = []
    for event in story.events:
        if isinstance(event, Tuned):
            inputs = _inputs(event.inputs, event.assumed)
            rows.append(
                [f"{event.time - story.began:.2f} s", event.what, event.value, event.formula, event.bound, inputs]
            )
        if isinstance(event, Chose):
            inputs = _inputs(event.inputs)
            rows.append([f"{event.time - story.began:.2f} s", "strategy", event.strategy, event.reason, "", inputs])
    if not rows:
        return "<p>Nothing was decided: the run was told what to do, or was too short to be measured.</p>"
    return _table(["when", "what", "result", "formula, or why", "decided by", "inputs"], rows)


def _inputs(inputs: dict[str, float], assumed: Sequence[str] = ()) -> str:
    return ", ".join(f"{name} {value:.3g}{' (assumed)' if name in assumed else ''}" for name, value in inputs.items())


def _compared(titles: list[str], stories: Sequence[Story], steps: list[list[Steps]]) -> str:
    facts = [_facts(story, ranks) for story, ranks in zip(stories, steps, strict=True)]
    rows = [[name, *(one[name] for one in facts)] for name in facts[0]]
    replayed = [str(sum(e.steps for e in s.events if isinstance(e, Replayed) and e.rank == 0)) for s in stories]
    body = _table(["", *titles], [*rows, ["steps repeated from the log", *replayed]])
    named = [(f"{title}, ", story, ranks[:1]) for title, story, ranks in zip(titles, stories, steps, strict=True)]
    body += _drawn(figures.step_times(named))
    return f"<h1>{len(stories)} runs side by side</h1>" + _section("", "Each from its own beginning on; rank 0.", body)
