"""`everstep trace`: what a viewer is given is what the run has marked and said."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from said import Cli

from everstep.events import Persisted, Replayed, Started, read_events
from everstep.report.rows import called, row_of
from everstep.timeline import Kind, Span, read_timeline


def traced(cli: Cli, directory: Path, folder: Path) -> dict[str, Any]:
    said = cli("trace", directory, "-o", folder / "trace.json")
    assert said.code == 0, said.err
    found: dict[str, Any] = json.loads((folder / "trace.json").read_text())
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []
    return found


def complete(trace: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [entry for entry in trace["traceEvents"] if entry["ph"] == "X" and entry["name"] == name]


def test_every_span_and_every_event_is_in_the_trace(cli: Cli, resumed: Path, tmp_path: Path) -> None:
    trace = traced(cli, resumed, tmp_path)
    spans = [span for track in read_timeline(resumed) for span in track.spans]
    seen = Counter((e["name"], e["args"]["step"]) for e in trace["traceEvents"] if e["ph"] == "X")
    assert seen == Counter((called(span.kind), span.step) for span in spans) and seen
    events = read_events(resumed)
    assert Counter(e["name"] for e in trace["traceEvents"] if e["ph"] == "i") == Counter(
        type(event).__name__.lower() for event in events
    )


def test_spans_are_where_the_events_say(cli: Cli, resumed: Path, tmp_path: Path) -> None:
    trace, events = traced(cli, resumed, tmp_path), read_events(resumed)
    began = trace["otherData"]["began"]
    persisted = [event for event in events if isinstance(event, Persisted)]
    # the life that was killed may have taken its last quarter of a second along
    for entry in complete(trace, "persist"):
        event = min(persisted, key=lambda e: abs(e.time - began - (entry["ts"] + entry["dur"]) / 1e6))
        assert (event.step, event.seconds) == (entry["args"]["step"], pytest.approx(entry["dur"] / 1e6, rel=1e-3))
    assert {entry["args"]["step"] for entry in complete(trace, "persist")} >= {12}
    (replayed,) = [event for event in events if isinstance(event, Replayed)]
    (entry,) = complete(trace, "replay")
    assert entry["dur"] / 1e6 >= replayed.seconds
    second = [event for event in events if isinstance(event, Started)][1]
    (recovery,) = complete(trace, "recovery")
    assert recovery["args"]["step"] == second.step
    assert (recovery["ts"] + recovery["dur"]) / 1e6 <= second.time - began + 0.01


def test_processes_and_rows_have_names_and_spans_of_a_row_never_cross(cli: Cli, resumed: Path, tmp_path: Path) -> None:
    trace = traced(cli, resumed, tmp_path)
    entries = trace["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in entries if e["name"] == "process_name"}
    assert sorted(processes.values()) == ["events of the run", "rank 0"]
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in entries if e["name"] == "thread_name"}
    spans = [e for e in entries if e["ph"] == "X"]
    assert {rows[e["pid"], e["tid"]] for e in spans} == set(rows.values())
    for row in rows:
        inside = sorted((e["ts"], -e["dur"]) for e in spans if (e["pid"], e["tid"]) == row)
        open_until: list[float] = []
        for begin, minus in inside:
            while open_until and open_until[-1] <= begin + 0.5:  # half a microsecond: durations have 24 bits
                open_until.pop()
            assert not open_until or begin - minus <= open_until[-1] + 0.5, (rows[row], begin)
            open_until.append(begin - minus)


def test_a_run_without_a_timeline_gives_its_events_and_says_so(cli: Cli, resumed: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(resumed, tmp_path / "copy"))
    for path in copy.glob("timeline-*"):
        path.unlink()
    said = cli("trace", copy, "-o", tmp_path / "trace.json")
    assert said.code == 0 and "There is no timeline" in said.out
    assert json.loads((tmp_path / "trace.json").read_text())["otherData"]["missing"]


def test_a_directory_that_is_no_run_is_refused_and_nothing_is_written(cli: Cli, tmp_path: Path) -> None:
    said = cli("trace", tmp_path, "-o", tmp_path / "trace.json")
    assert said.code == 3 and "not a run's directory" in said.err
    assert not (tmp_path / "trace.json").exists()


def test_ctrl_c_leaves_no_half_file(cli: Cli, resumed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import everstep.cli.trace as command

    def interrupted(story: object, file: Any) -> int:
        file.write("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "write_trace", interrupted)
    (tmp_path / "trace.json").write_text("an older one")
    assert cli("trace", resumed, "-o", tmp_path / "trace.json").code == 130
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("trace.json", "an older one")]


def test_what_a_later_version_marks_is_shown_by_its_number() -> None:
    span = Span(0.0, 1.0, 999, 0, 1, 1)
    assert (row_of(span), called(span.kind)) == ("other", "kind 999")
    assert all(row_of(Span(0.0, 1.0, kind, 0, 1, 1)) != "other" for kind in Kind)
