"""`everstep report` of a simulation: a page like that of a run, with the numbers that were simulated."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest
from pages import body, drawn, report, sections
from said import Cli

pytest.importorskip("plotly", reason="the report needs plotly: pip install 'everstep[report]'")
SECTIONS = ("Goodput", "Wasted time", "Wasted over time", "Side by side", "What the tuner decided")


@pytest.fixture
def simulation(cli: Cli, tmp_path: Path) -> Path:
    """As `everstep simulate spares --json > spares.json` leaves it."""
    path = tmp_path / "spares.json"
    path.write_text(cli("simulate", "spares", "--json").out)
    return path


def test_a_browser_draws_every_picture_of_a_simulation(
    cli: Cli, simulation: Path, tmp_path: Path, chromium: str
) -> None:
    page = tmp_path / "report.html"
    text = report(cli, page, simulation)
    assert not re.search(r"<(script|link|img|iframe)[^>]*(src|href)=", body(text))  # nothing is fetched
    seen = sections(drawn(chromium, page, tmp_path))
    assert tuple(seen) == SECTIONS
    summaries = json.loads(simulation.read_text())["summaries"]
    for title in SECTIONS[:3]:
        assert "main-svg" in seen[title], f"{title} was not drawn"
    assert len(re.findall(r'class="point"', seen["Goodput"])) == len(summaries)
    for one in summaries:
        assert f"{one['goodput']['mean']:.2%}" in seen["Goodput"]
        assert html.escape(one["strategy"]) in seen["Wasted over time"]
        for cause, share in one["wasted"].items():
            if share["mean"] >= 0.001:
                assert cause in seen["Wasted time"]


def figure_of(text: str, title: str) -> list[dict[str, Any]]:
    """What plotly is told to draw in a section."""
    drawing = sections(body(text))[title]
    found = re.search(r"Plotly\.newPlot\(\s*\"[^\"]+\",\s*(\[.*?\]),\s*\{\"", drawing, re.DOTALL)
    assert found is not None, drawing[:500]
    return list(json.loads(found[1]))


def test_the_numbers_in_the_pictures_are_those_of_the_file(cli: Cli, simulation: Path, tmp_path: Path) -> None:
    text = report(cli, tmp_path / "report.html", simulation)
    told = json.loads(simulation.read_text())
    (goodput,) = figure_of(text, "Goodput")
    assert goodput["x"] == pytest.approx([100 * one["goodput"]["mean"] for one in told["summaries"]])
    assert goodput["y"] == [one["strategy"] for one in told["summaries"]]
    for bar in figure_of(text, "Wasted time"):
        assert bar["x"] == pytest.approx([100 * one["wasted"][bar["name"]]["mean"] for one in told["summaries"]])
    lines = {line["name"]: line for line in figure_of(text, "Wasted over time")}
    for run in told["runs_by_seed"]:
        line = lines[run["strategy"]]
        assert line["y"][-1] == pytest.approx((run["elapsed_s"] - run["useful_s"]) / 3600)
        assert line["x"][-1] == pytest.approx(run["elapsed_s"] / 3600)


def test_of_several_sizes_goodput_is_drawn_over_them(cli: Cli, simulation: Path, tmp_path: Path) -> None:
    told = json.loads(simulation.read_text())
    for kind in ("summaries", "runs_by_seed"):
        told[kind] += [{**one, "nodes": 2 * one["nodes"], "gpus": 2 * one["gpus"]} for one in told[kind]]
    simulation.write_text(json.dumps(told))
    lines = figure_of(report(cli, tmp_path / "report.html", simulation), "Goodput")
    strategies = list(dict.fromkeys(one["strategy"] for one in told["summaries"]))
    assert [line["name"] for line in lines] == strategies
    assert all(len(line["x"]) == 2 for line in lines)


def test_one_that_was_interrupted_says_so(cli: Cli, simulation: Path, tmp_path: Path) -> None:
    told = json.loads(simulation.read_text())
    simulation.write_text(json.dumps({**told, "of": told["runs"] + 3}))
    text = report(cli, tmp_path / "report.html", simulation)
    assert f"It was interrupted: {told['runs']} of {told['runs'] + 3} runs are here." in text


@pytest.mark.parametrize(
    ("content", "named"),
    [("{", "is not what `everstep simulate --json` writes"), ('{"title": "a"}', "is not what `everstep simulate"),
     ('{"title":"a","runs":0,"of":6,"summaries":[],"runs_by_seed":[]}', "has no run that was simulated to its end")],
)  # fmt: skip
def test_a_file_that_is_no_simulation_is_named_and_leaves_no_page(
    content: str, named: str, cli: Cli, tmp_path: Path
) -> None:
    path = tmp_path / "some.json"
    path.write_text(content)
    said = cli("report", path, "-o", tmp_path / "report.html")
    assert said.code == 2 and f"{path} {named}" in said.err
    assert list(tmp_path.iterdir()) == [path]


def test_a_simulation_does_not_stand_beside_a_run(cli: Cli, simulation: Path, resumed: Path, tmp_path: Path) -> None:
    said = cli("report", simulation, "--compare", resumed, "-o", tmp_path / "report.html")
    assert said.code == 2 and "is a simulation: --compare is for runs" in said.err
