"""The page of a run, or of several beside each other."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from statistics import median
from typing import TextIO

from everstep.events import Chose, Finished, RanksLost, Replayed, Started, Tuned, WentOn
from everstep.report import figures
from everstep.report.markup import cards, drawn, headline, inputs_of, section, table, warning, write_html
from everstep.report.series import Steps, exposure, incidents, steps_of
from everstep.report.story import Story
from everstep.timeline import Kind


def write_page(stories: Sequence[Story], file: TextIO) -> None:
    """The first story, and the others beside it."""
    titles = _titles(stories)
    write_html(titles[0], _parts(titles, stories), file)


def _parts(titles: list[str], stories: Sequence[Story]) -> Iterator[str]:
    steps = [[one for one in map(steps_of, story.tracks) if one.steps] for story in stories]
    if len(stories) > 1:
        yield _compared(titles, stories, steps)
    for title, story, ranks in zip(titles, stories, steps, strict=True):
        yield "<hr>" if len(stories) > 1 else ""
        yield from _chapter(title, story, ranks)


def _titles(stories: Sequence[Story]) -> list[str]:
    names = [story.directory.name for story in stories]
    return [n if names.count(n) == 1 else str(s.directory) for n, s in zip(names, stories, strict=True)]


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
    """Of rank 0: loading and repeating in a new process; or, of the slowest, all until it went on within one."""
    live: dict[int, float] = {}
    for e in story.events:
        if isinstance(e, WentOn):
            live[e.view] = max(live.get(e.view, 0.0), e.stopped_s + e.met_s + e.restored_s)
    spans = [s for t in story.tracks if t.name == "rank 0" for s in t.spans if s.kind == Kind.RECOVERY]
    lived = [e.time for e in story.events if isinstance(e, WentOn) and e.rank == 0]
    return sum(live.values()) + sum(s.seconds for s in spans if not any(0 <= when - s.end < 5.0 for when in lived))


def _chapter(title: str, story: Story, ranks: list[Steps]) -> Iterator[str]:
    when = datetime.datetime.fromtimestamp(story.began, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    yield headline(title, f"run {story.run or 'without a name'} in {story.directory}, since {when}")
    yield warning(story.missing)
    yield cards(_facts(story, ranks))
    if any(track.spans for track in story.tracks):
        figure, said = figures.timeline(story)
        note = (
            "Drag to move, scroll to zoom, double-click to see all. Of a device these are the host's times: when work "
        )
        yield section("Timeline", f"{note}was handed over. {said}", drawn(figure))
    if ranks:
        note = "Filled: a base was copied beside the step. Hollow: none was."
        yield section("Step time", note, drawn(figures.step_times([("", story, ranks)])))
        note = "How many steps each kind of loss would have cost at that moment."
        yield section("Exposure", note, drawn(figures.exposed(story)))
    if any(track.spans for track in story.devices):
        note = "As NVML says, asked twenty times a second: the time in which anything at all was computed there."
        yield section("GPU utilisation", note, drawn(figures.utilised(story)))
    note = "Arenas and rings in memory, bases on the disk and beyond it; the log is not in it."
    yield section("Occupancy", note, drawn(figures.occupied(story)))
    yield section("What happened", "Failures, recoveries and all that was not as it should be.", _incidents(story))
    yield section("What the tuner decided", "Each number with its formula and what went into it.", _tuned(story))


def _incidents(story: Story) -> str:
    rows = [[f"{when - story.began:.2f} s", kind, words] for when, kind, words in incidents(story)]
    return table(["when", "what", "in words"], rows) if rows else "<p>Nothing is known.</p>"


def _tuned(story: Story) -> str:
    rows = []
    for event in story.events:
        if isinstance(event, Tuned):
            inputs = inputs_of(event.inputs, event.assumed)
            rows.append(
                [f"{event.time - story.began:.2f} s", event.what, event.value, event.formula, event.bound, inputs]
            )
        if isinstance(event, Chose):
            inputs = inputs_of(event.inputs)
            rows.append([f"{event.time - story.began:.2f} s", "strategy", event.strategy, event.reason, "", inputs])
    if not rows:
        return "<p>Nothing was decided: the run was told what to do, or was too short to be measured.</p>"
    return table(["when", "what", "result", "formula, or why", "decided by", "inputs"], rows)


def _compared(titles: list[str], stories: Sequence[Story], steps: list[list[Steps]]) -> str:
    facts = [_facts(story, ranks) for story, ranks in zip(stories, steps, strict=True)]
    rows = [[name, *(one[name] for one in facts)] for name in facts[0]]
    replayed = [str(sum(e.steps for e in s.events if isinstance(e, Replayed) and e.rank == 0)) for s in stories]
    body = table(["", *titles], [*rows, ["steps repeated from the log", *replayed]])
    named = [(f"{title}, ", story, ranks[:1]) for title, story, ranks in zip(titles, stories, steps, strict=True)]
    body += drawn(figures.step_times(named))
    return f"<h1>{len(stories)} runs side by side</h1>" + section("", "Each from its own beginning on; rank 0.", body)
