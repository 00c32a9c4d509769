"""`everstep report`: one page, drawn by a real browser, that says what the run's files say."""

from __future__ import annotations

import html
import re
import resource
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from pages import body, drawn, report, sections
from said import Cli

import everstep
from everstep.events import Persisted, RanksLost, WentOn, read_events
from everstep.report.series import exposure, occupancy, steps_of
from everstep.report.story import Story, read_story
from everstep.timeline import Kind, Span, Track

SECTIONS = ("Timeline", "Step time", "Exposure", "Occupancy", "What happened", "What the tuner decided")
plotly = pytest.importorskip("plotly", reason="the report needs plotly: pip install 'everstep[report]'")


def test_a_browser_draws_every_picture_of_the_page(cli: Cli, resumed: Path, tmp_path: Path, chromium: str) -> None:
    page = tmp_path / "report.html"
    text = report(cli, page, resumed)
    assert not re.search(r"<(script|link|img|iframe)[^>]*(src|href)=", body(text))  # nothing is fetched
    seen = drawn(chromium, page, tmp_path)
    pictures = sections(seen)
    assert tuple(pictures) == SECTIONS
    for title in SECTIONS[:4]:
        assert "main-svg" in pictures[title], f"{title} was not drawn"
    assert "rank 0 · training" in pictures["Timeline"] and "rank 0 · recovery" in pictures["Timeline"]
    bars = len(re.findall(r'class="point"', pictures["Timeline"]))
    assert bars == sum(len(track.spans) for track in read_story(resumed).tracks)
    assert "the machine reboots" in pictures["Exposure"] and "disk (bases)" in pictures["Occupancy"]
    assert "started again" in pictures["Step time"]


def test_what_happened_is_told_in_the_order_of_time(cli: Cli, resumed: Path, tmp_path: Path) -> None:
    text = body(report(cli, tmp_path / "report.html", resumed))
    told = re.findall(r"<td>[\d.]+ s</td><td>(\w+)</td>", text[text.index("What happened") :])
    assert [word for word in told if word in ("Started", "Replayed", "Finished")] == [
        "Started", "Replayed", "Started", "Finished",
    ]  # fmt: skip


@pytest.mark.parametrize("broken", ["no timeline", "a torn timeline", "no events", "torn events", "no run.json"])
def test_what_is_missing_is_said_and_the_rest_is_shown(broken: str, cli: Cli, resumed: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(resumed, tmp_path / "copy"))
    timeline, events = copy / "timeline-rank-00000.bin", copy / "events-rank-00000.jsonl"
    match broken:
        case "no timeline":
            timeline.unlink()
            sentence = "There is no timeline: no file timeline-*.bin has a span that can be read."
        case "a torn timeline":
            timeline.write_bytes(timeline.read_bytes() + timeline.read_bytes()[:30])
            sentence = "30 bytes of it are torn or damaged."
        case "no events":
            events.unlink()
            sentence = "There are no events."
        case "torn events":
            events.write_bytes(b'{"event":"star\n' + events.read_bytes())
            sentence = "1 lines of the events are torn or unknown, and left out."
        case _:
            (copy / "run.json").unlink()
            sentence = f"run {everstep.open(resumed).run} in "  # which the commits know, too
    text = html.unescape(body(report(cli, tmp_path / "report.html", copy)))
    assert sentence in text
    assert ("<h2>Timeline</h2>" in text) == (broken != "no timeline")
    assert "<h2>What happened</h2>" in text


def test_runs_stand_side_by_side(cli: Cli, resumed: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(resumed, tmp_path / "other"))
    text = body(report(cli, tmp_path / "report.html", resumed, "--compare", other))
    assert "2 runs side by side" in text
    assert f"<th>{resumed.name}</th><th>other</th>" in text
    assert text.count("<h2>Timeline</h2>") == 2


def test_a_run_that_is_no_run_leaves_no_page(cli: Cli, resumed: Path, tmp_path: Path) -> None:
    said = cli("report", resumed, "--compare", tmp_path / "nothing", "-o", tmp_path / "report.html")
    assert said.code == 3 and "not a run's directory" in said.err
    assert list(tmp_path.iterdir()) == []


def test_a_page_that_the_disk_refuses_is_named(resumed: Path, tmp_path: Path) -> None:
    page, most = tmp_path / "report.html", (100_000, 100_000)
    command = [sys.executable, "-m", "everstep.cli", "report", str(resumed), "-o"]
    for path, limit in ((page, most), (tmp_path / "none" / "report.html", None)):
        ended = subprocess.run(
            [*command, str(path)], capture_output=True, text=True, timeout=60,
            preexec_fn=partial(resource.setrlimit, resource.RLIMIT_FSIZE, limit) if limit else None,
        )  # fmt: skip
        assert ended.returncode == 7
        assert "it cannot be written" in ended.stderr and f"'{path}'" in ended.stderr
    assert list(tmp_path.iterdir()) == []


# -- the numbers behind the pictures


def test_exposure_ends_with_nothing_to_lose_and_follows_the_durable_steps(resumed: Path) -> None:
    lines = exposure(read_story(resumed))
    assert lines["the machine reboots"][-1][1] == 0
    assert max(steps for _, steps in lines["the processes die"]) <= 2


def test_occupancy_is_the_sum_of_what_was_persisted_and_not_retired(resumed: Path) -> None:
    line = occupancy(read_story(resumed))["disk (bases)"]
    sizes = {event.step: event.bytes for event in read_events(resumed) if isinstance(event, Persisted)}
    there = [int(path.stem.removeprefix("step-")) for path in resumed.glob("step-*.json")]
    assert line[-1][1] == sum(sizes[step] for step in there)


def story_of(spans: list[Span]) -> Story:
    return Story(Path("run"), "", [], [Track("rank 0", sorted(spans), [])], [])


def test_a_step_counts_as_captured_if_a_base_was_copied_beside_it() -> None:
    def span(kind: Kind, step: int, begin: float, end: float) -> Span:
        return Span(begin, end - begin, kind, 0, step, 1)

    spans = [span(Kind.STEP, step, float(step), step + 1.0) for step in range(1, 5)]
    spans += [span(Kind.COPY, 1, 2.01, 2.5), span(Kind.COPY, 3, 4.01, 4.2)]
    spans += [span(Kind.CUT, 1, 2.0, 2.125), span(Kind.GATE, 2, 2.5, 2.625)]
    (track,) = story_of(spans).tracks
    steps = steps_of(track)
    assert steps.captured == [False, True, False, True]
    assert steps.spent == [0.0, 0.25, 0.0, 0.0]


def test_what_a_killed_rank_had_not_written_is_not_taken_for_a_loss() -> None:
    """The other rank is five steps further by then, in the files: nobody was five steps exposed."""

    def spans(last: int) -> list[Span]:
        found = [Span(float(step), 1.0, Kind.STEP, 0, step, 1) for step in range(1, last + 1)]
        return found + [Span(step + 1.0, 0.1, Kind.COPY, 0, step, 1) for step in range(1, last + 1)]

    tracks = [Track("rank 0", spans(9), []), Track("rank 1", spans(4), [])]
    lines = exposure(Story(Path("run"), "", [], tracks, []))
    assert max(steps for _, steps in lines["the processes die"]) == 1


def survived() -> Story:
    """Ranks make a step a second; at 20 s one is lost, and at 25 s both go on."""

    def spans() -> list[Span]:
        found = [Span(float(step), 1.0, Kind.STEP, 0, step, 1) for step in range(20)]
        return found + [Span(step + 5.0, 1.0, Kind.STEP, 0, step, 1) for step in range(20, 60)]

    def went_on(rank: int, restored_s: float) -> WentOn:
        return WentOn(
            time=25.0, view=1, rank=rank, world=2, policy="spare", step=19, left_at=19, exact=True, stopped_s=0.5,
            met_s=0.5, restored_s=restored_s,
        )  # fmt: skip

    lost = RanksLost(time=20.0, view=0, rank=1, how="its process ended")
    tracks = [Track("rank 0", spans(), []), Track("rank 1", spans(), [])]
    return Story(Path("run"), "", [lost, went_on(0, 1.0), went_on(1, 3.0)], tracks, [])


def test_the_timeline_opens_where_a_loss_was_survived() -> None:
    from everstep.report import figures

    story = survived()
    figure, _ = figures.timeline(story)
    begin, end = figure.layout.xaxis.range
    assert begin < 20.0 - story.began and 25.0 - story.began < end
    assert end - begin < 5.0 + 2 * 8
    untold = Story(Path("run"), "", [], story.tracks, [])
    begin, end = figures.timeline(untold)[0].layout.xaxis.range
    assert begin > 25.0 and end - begin <= 8 + 1  # the middle of it


def test_a_recovery_took_as_long_as_the_slowest_rank() -> None:
    from everstep.report import page

    assert page._recovery_s(survived()) == pytest.approx(0.5 + 0.5 + 3.0)
