"""`everstep simulate`: tables, JSON, CSV, drawings; partial results after Ctrl-C; errors that name what is wrong."""

from __future__ import annotations

import csv
import json
import signal
from pathlib import Path
from xml.etree import ElementTree

import pytest
from said import Cli, interrupted

from everstep.lab import simulation
from everstep.lab.lifetime import Lifetime

SMALL = """
title = "two strategies"
duration = "6h"
seeds = 3
[cluster]
nodes = 8
nodes_per_rack = 2
spares = 1
repair = "30m"
[training]
step = "1s"
state = "8GB"
[[failures]]
mtbf = "20m"
[[strategies]]
kind = "dcp"
[[strategies]]
name = "live"
kind = "snapshot"
on_loss = ["spare", "rollback", "restart"]
"""


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


def test_strategies_stand_side_by_side(cli: Cli, scenario: Path) -> None:
    said = cli("simulate", scenario)
    assert (said.code, said.err) == (0, "")
    assert "two strategies: 6 runs" in said.out
    assert "dcp" in said.out and "live" in said.out and "±" in said.out
    found = cli("simulate", scenario, "--json").json
    dcp, live = found["summaries"]
    assert (found["runs"], found["of"], dcp["seeds"]) == (6, 6, 3)
    assert live["goodput"]["mean"] > dcp["goodput"]["mean"] > 0.3
    for one in found["runs_by_seed"]:
        assert one["useful_s"] + sum(one["wasted_s"].values()) == pytest.approx(one["elapsed_s"])
        assert one["series"][-1][0] == one["elapsed_s"]
    assert dcp["decisions"][0]["formula"].startswith("(sqrt(2 C M)")
    assert cli("simulate", scenario, "--json").json == found
    assert cli("simulate", scenario, "--json", "--seeds", 1).json["summaries"][0]["goodput"]["within"] is None


def test_every_run_is_a_line_and_a_drawing_is_a_drawing(cli: Cli, scenario: Path, tmp_path: Path) -> None:
    table, drawing, page = tmp_path / "runs.csv", tmp_path / "a.svg", tmp_path / "a.html"
    found = cli("simulate", scenario, "--csv", table, "--plot", drawing, "--json").json
    rows = list(csv.DictReader(table.open()))
    assert [float(row["goodput"]) for row in rows] == [one["goodput"] for one in found["runs_by_seed"]]
    assert float(rows[0]["lost_work_s"]) == found["runs_by_seed"][0]["wasted_s"]["lost work"]
    assert int(rows[1]["partner_bytes"]) > 0
    bars = [one for one in ElementTree.parse(drawing).iter() if one.tag.endswith("rect") and len(one)]
    assert len(bars) == 2 * 9
    cli("simulate", scenario, "--plot", page)
    assert page.read_text().startswith("<!doctype html>") and "<svg" in page.read_text()


def test_those_that_ship_are_listed_and_run_by_name(cli: Cli) -> None:
    said = cli("simulate", "--list").out
    assert all(name in said for name in ("llama3", "preemptible", "spares", "sweep"))
    assert "8 nodes and 4 spares, an error every 10 epochs: 6 runs" in cli("simulate", "spares").out


def test_what_is_done_when_somebody_interrupts_can_be_read(
    cli: Cli, scenario: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 0
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # who started this may have had it ignored

    class Interrupted(Lifetime):
        def run(self):  # type: ignore[no-untyped-def]
            nonlocal count
            count += 1
            if count == 4:
                signal.raise_signal(signal.SIGINT)
            return super().run()

    monkeypatch.setattr(simulation, "Lifetime", Interrupted)
    said = cli("simulate", scenario, "--json", "--csv", tmp_path / "runs.csv")
    assert said.code == 130
    found = json.loads(said.out)
    assert (found["runs"], found["of"], [one["seeds"] for one in found["summaries"]]) == (3, 6, [2, 1])
    assert len((tmp_path / "runs.csv").read_text().splitlines()) == 4
    count = 3
    said = cli("simulate", scenario)
    signal.signal(signal.SIGINT, before)
    assert said.code == 130 and "two strategies: 0 runs of 6, interrupted" in said.out


def test_a_process_that_is_interrupted_leaves_what_it_has(scenario: Path) -> None:
    """The real signal, in the middle of it."""
    said = interrupted("simulation", "Lifetime", "simulate", scenario, "--seeds", 100000, "--json")
    assert said.code == 130
    assert said.json["runs"] >= 1


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("simulate",), "simulate takes a .toml file or the name of a scenario; --list shows"),
        (("simulate", "llama4"), "llama4 is neither a .toml file nor a scenario that ships: llama3, preemptible"),
        (("simulate", "spares", "--plot", "a.png"), "--plot = 'a.png' must end in .svg or .html"),
        (("simulate", "absent.toml"), "absent.toml cannot be read"),
    ],
)
def test_a_wrong_word_is_named(cli: Cli, words: tuple[str, ...], named: str) -> None:
    said = cli(*words)
    assert said.code == 2
    assert named in said.err


def test_a_bad_scenario_is_named_with_its_file(cli: Cli, scenario: Path) -> None:
    scenario.write_text(SMALL.replace('repair = "30m"', 'repair = "-30m"'))
    said = cli("simulate", scenario)
    assert said.code == 2
    assert f"{scenario}: cluster.repair = '-30m' must be a duration such as" in said.err
