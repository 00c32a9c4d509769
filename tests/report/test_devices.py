"""How busy accelerators were: the keeper asks where NVML is there. Here NVML is one of our own making."""

from __future__ import annotations

import io
import json
import os
from itertools import pairwise
from math import isnan
from pathlib import Path
from typing import Any

import pytest
from lives import must_finish, run_directory, train_tiny
from metered import until

import everstep
from everstep.keeper import devices
from everstep.report.series import utilisation
from everstep.report.story import Story, read_story
from everstep.report.trace import write_trace
from everstep.timeline import Kind, Span, Track, device_and_percent, device_part, read_devices, timeline_of_devices

CHANGING = (0, 50, 100, 20)
PYNVML = f"""
from types import SimpleNamespace
asked = [0, 0, 0]
class NVMLError(Exception):
    pass
def nvmlInit():
    pass
def nvmlDeviceGetCount():
    return 3
def nvmlDeviceGetHandleByIndex(index):
    return index
def nvmlDeviceGetUtilizationRates(index):
    asked[index] += 1
    if index == 1 and asked[1] % 2:
        raise NVMLError("a device that does not always answer")
    return SimpleNamespace(gpu={CHANGING}[asked[0] % 4] if index == 0 else 100 if index == 1 else 7, memory=1)
"""


def train_with(directory: Path, folder: Path, source: str | None) -> None:
    """One life, whose keeper finds this as pynvml; it goes on until there is something to be seen."""
    folder.mkdir()
    (folder / "pynvml.py").write_text(source if source is not None else "raise ImportError('no NVML here')")

    def at_step(run: everstep.Run) -> None:
        if run.step == 4 and source == PYNVML:
            until(lambda: len(by_device(read_devices(directory)).get(2, [])) >= 2)

    def life() -> dict[str, Any]:
        os.environ["PYTHONPATH"] = str(folder)
        return train_tiny(directory, at_step, keeper="process")

    must_finish(life)


def by_device(tracks: list[Track]) -> dict[int, list[tuple[int, Span]]]:
    found: dict[int, list[tuple[int, Span]]] = {}
    for span in (span for track in tracks for span in track.spans):
        device, percent = device_and_percent(span)
        found.setdefault(device, []).append((percent, span))
    return found


def test_a_keeper_asks_every_device_twenty_times_a_second_and_writes_down_what_changes(tmp_path: Path) -> None:
    with run_directory() as directory:
        train_with(directory, tmp_path / "nvml", PYNVML)
        (track,) = read_devices(directory)
        assert track.name.startswith("devices of ") and not track.problems
        found = by_device([track])
        assert {span.kind for _, span in found[0]} == {Kind.DEVICE}
        changing = [percent for percent, _ in found[0]]
        assert len(changing) >= 4
        for one, two in pairwise(changing):  # every answer is another one, so every one is there, in their order
            assert CHANGING[(CHANGING.index(one) + 1) % 4] == two
        for (_, one), (_, two) in pairwise(found[0]):
            assert one.end == pytest.approx(two.begin, abs=0.001)
            assert one.seconds >= devices.EVERY_S - 0.001
        assert {percent for percent, _ in found[1]} == {100}
        assert {percent for percent, _ in found[2]} == {7}
        whole = [span.seconds for _, span in found[2][:-1]]  # the same for long is one span a second
        assert whole and min(whole) >= 1.0


@pytest.mark.parametrize(
    "source", [None, "def nvmlInit():\n    raise RuntimeError('no driver')",
               PYNVML.replace("return 3", "return 0") + "# none"],
    ids=["no package", "no driver", "no device"],
)  # fmt: skip
def test_where_nvml_is_not_nothing_happens(source: str | None, tmp_path: Path) -> None:
    with run_directory() as directory:
        train_with(directory, tmp_path / "nvml", source)
        story = read_story(directory)
        assert read_devices(directory) == story.devices == [] and story.missing == []
        assert not list(directory.glob("timeline-devices-*"))


def test_a_report_draws_it_and_a_trace_has_it(tmp_path: Path) -> None:
    figures = pytest.importorskip("everstep.report.figures", reason="the report needs plotly", exc_type=ImportError)
    from everstep.report.page import write_page

    with run_directory() as directory:
        train_with(directory, tmp_path / "nvml", PYNVML)
        story = read_story(directory)
        node = story.devices[0].name.removeprefix("devices ")
        lines = figures.utilised(story).data
        assert [line.name for line in lines] == [
            f"device {device} {node}" for device in sorted(by_device(story.devices))
        ]
        page, other, trace = io.StringIO(), io.StringIO(), io.StringIO()
        write_page([story], page)
        assert "<h2>GPU utilisation</h2>" in page.getvalue()
        write_page([Story(directory, "", story.events, story.tracks, [])], other)
        assert "<h2>GPU utilisation</h2>" not in other.getvalue()
        write_trace(story, trace)
        counted = [event for event in json.loads(trace.getvalue())["traceEvents"] if event["ph"] == "C"]
        assert len(counted) == len(story.devices[0].spans)
        assert {event["args"]["busy, per cent"] for event in counted if event["name"] == "device 0"} <= set(CHANGING)


def test_where_nobody_asked_there_is_no_line() -> None:
    def span(begin: float, percent: int) -> Span:
        return Span(begin, 1.0, Kind.DEVICE, device_part(3, percent), 1, 1)

    track = Track("devices of here", [span(0.0, 10), span(1.0, 20), span(9.0, 30)], [])
    (line,) = utilisation(Story(Path("run"), "", [], [], [], [track])).values()
    assert [when for when, _ in line] == [0.0, 1.0, 1.0, 2.0, 2.0, 9.0, 10.0]
    assert [isnan(percent) for _, percent in line].index(True) == 4 and line[-1] == (10.0, 30)
    assert timeline_of_devices(Path("run"), "here").name == "timeline-devices-here.bin"
