"""Where a run stands at this moment: what `everstep status` knows, and how fast each rank is and what it did last."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import msgspec

from everstep.archive import Archive
from everstep.events import AnyEvent, read_events
from everstep.report.rows import called
from everstep.report.series import occupancy
from everstep.report.story import Story
from everstep.timeline import Kind, Track, read_timeline

_TAIL_BYTES = 64 << 10  # of each timeline: some hundred steps
_RECENT = 20  # steps that a pace is the median of


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """Of one rank or keeper, as far as it has written."""

    name: str
    pid: int
    step: int | None  # that it has done; of a keeper, that it has brought somewhere
    step_s: float | None
    doing: str  # last
    ago_s: float  # since then


class Now(msgspec.Struct, frozen=True, kw_only=True):
    status: dict[str, Any]
    paces: list[Pace]
    tiers: dict[str, int]  # bytes: of memory as it is, of the others as the events tell
    events: list[AnyEvent]  # the newest, the last one first


def look(archive: Archive, events: int = 8) -> Now:
    """Reads, and changes nothing; of the timelines only the ends."""
    said = read_events(archive.directory)
    story = Story(archive.directory, archive.run, said, [], [])
    status, told = archive.status(), {name: int(line[-1][1]) for name, line in occupancy(story).items()}
    paces = [_pace(track) for track in read_timeline(archive.directory, newest_bytes=_TAIL_BYTES) if track.spans]
    return Now(
        status=status, paces=paces, tiers=told | {"memory": status["arena_bytes"]}, events=said[: -events - 1 : -1]
    )  # fmt: skip


def _pace(track: Track) -> Pace:
    steps = [span for span in track.spans if span.kind == Kind.STEP]
    last = max(track.spans, key=lambda span: span.end)
    recent = [span.seconds for span in steps[-_RECENT:]]
    return Pace(
        name=track.name, pid=last.pid, step=(steps or [last])[-1].step, step_s=median(recent) if recent else None,
        doing=f"{called(last.kind)}, step {last.step}", ago_s=max(0.0, time.time() - last.end),
    )  # fmt: skip
