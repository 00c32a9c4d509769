"""A run as a trace that Perfetto and Chrome show: a process for each rank and keeper, a row for each kind of work.

Every span of the timeline is one complete event, to the microsecond, and every event of the run is an instant.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TextIO

import msgspec

from everstep.report.rows import ROWS, called, row_of
from everstep.report.story import Story
from everstep.timeline import Span, Track, device_and_percent

_EVENTS = 1  # the process that what happened to the whole run is shown in


def write_trace(story: Story, file: TextIO) -> int:
    """Returns how many spans it has."""
    encoder = msgspec.json.Encoder()
    spans, comma = 0, ""
    file.write('{"displayTimeUnit":"ms","otherData":' + _other(story) + ',"traceEvents":[\n')
    for entry in _entries(story):
        file.write(comma + encoder.encode(entry).decode())
        spans, comma = spans + (entry["ph"] == "X"), ",\n"
    file.write("\n]}\n")
    return spans


def _other(story: Story) -> str:
    facts = {"run": story.run, "began": story.began, "missing": story.missing}
    return msgspec.json.encode(facts).decode()


def _entries(story: Story) -> Iterator[dict[str, Any]]:
    began = story.began
    if story.events:
        yield _named("process_name", _EVENTS, 0, "events of the run")
    for event in story.events:
        fields = msgspec.to_builtins(event)
        when = _micro(fields.pop("time") - began)
        yield {"ph": "i", "s": "p", "name": fields.pop("event"), "pid": _EVENTS, "tid": 0, "ts": when, "args": fields}
    for number, track in enumerate(story.tracks, _EVENTS + 1):
        yield from _process(number, track, began)
    for number, track in enumerate(story.devices, _EVENTS + 1 + len(story.tracks)):
        yield _named("process_name", number, 0, track.name)
        yield from (_counted(number, span, began) for span in track.spans)


def _process(number: int, track: Track, began: float) -> Iterator[dict[str, Any]]:
    yield _named("process_name", number, 0, track.name)
    yield {"ph": "M", "name": "process_sort_index", "pid": number, "tid": 0, "args": {"sort_index": number}}
    used = {row_of(span) for span in track.spans}
    rows = {name: row for row, name in enumerate(ROWS, 1) if name in used}
    for name, row in rows.items():
        yield _named("thread_name", number, row, name)
        yield {"ph": "M", "name": "thread_sort_index", "pid": number, "tid": row, "args": {"sort_index": row}}
    for span in track.spans:
        yield _complete(number, rows[row_of(span)], span, began)


def _complete(process: int, row: int, span: Span, began: float) -> dict[str, Any]:
    facts = {"step": span.step, "part": span.part, "pid": span.pid}
    begin, end = _micro(span.begin - began), _micro(span.end - began)
    return {
        "ph": "X", "name": called(span.kind), "pid": process, "tid": row, "ts": begin, "dur": round(end - begin, 3),
        "args": facts,
    }  # fmt: skip


def _counted(process: int, span: Span, began: float) -> dict[str, Any]:
    """How busy a device was, as a line that Perfetto draws."""
    device, percent = device_and_percent(span)
    begin = _micro(span.begin - began)
    return {"ph": "C", "name": f"device {device}", "pid": process, "ts": begin, "args": {"busy, per cent": percent}}


def _named(what: str, process: int, row: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": row, "args": {"name": name}}


def _micro(seconds: float) -> float:
    return round(1e6 * seconds, 3)
