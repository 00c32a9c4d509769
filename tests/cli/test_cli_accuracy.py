"""`everstep lab accuracy`: a table, JSON, a folder of results; partial results after Ctrl-C; errors that name it."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from said import Cli, interrupted

from everstep.cli import output

SMALL = ("lab", "accuracy", "--workers", 4, "--steps", 12, "--seeds", 2)


def test_strategies_stand_side_by_side_and_the_model_of_time_is_said(cli: Cli) -> None:
    said = cli(*SMALL, "--fail", "5:1:2", "--interval", 4, "--restart-cost", 9)
    assert said.code == 0
    assert "mlp, 4 workers, 12 steps of 128 samples, losses: 1 named: 12 trainings" in said.out
    assert "a step 1, a restart 9, a rollback 1.2, going forward 0.1, a checkpoint 0.5" in said.out
    for name in ("undisturbed", "restart, every 4", "rollback", "forward", "forward, unscaled", "forward, dropped"):
        assert name in said.out
    assert "2 of 2" in said.out and "0 of 2" in said.out and "±" in said.out


def test_the_folder_has_curves_results_and_a_drawing(cli: Cli, tmp_path: Path) -> None:
    words = (*SMALL, "--failures", 2, "--strategy", "rollback", "--strategy", "forward", "--json")
    said = cli(*words, "--out", tmp_path / "new" / "folder")
    folder = tmp_path / "new" / "folder"
    assert sorted(path.name for path in folder.iterdir()) == ["accuracy.svg", "curves.csv", "result.json"]
    found = json.loads((folder / "result.json").read_text())
    assert found == said.json == cli(*words).json
    assert (found["done"], found["of"], [one["exact"] for one in found["verdicts"]]) == (6, 6, [2, 2, 0])
    assert found["trial"]["costs"] == {"restart": 35, "rollback": 1.2, "forward": 0.1, "checkpoint": 0.5}
    rows = list(csv.DictReader((folder / "curves.csv").open()))
    points = [point for one in found["trainings"] for point in one["curve"]]
    assert [float(row["accuracy"]) for row in rows] == [point["accuracy"] for point in points]
    assert [float(row["time"]) for row in rows] == [point["time"] for point in points]
    drawn = list(ElementTree.parse(folder / "accuracy.svg").iter())
    assert sum(one.tag.endswith("polyline") for one in drawn) == 4 * 3
    assert sum(one.tag.endswith("circle") for one in drawn) == 3


def test_a_person_sees_how_far_it_is_once_it_takes_long(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    words = (*SMALL, "--strategy", "forward", "--json")
    monkeypatch.setattr(output, "_PATIENCE_S", 600.0)
    assert "training" not in cli(*words).err
    monkeypatch.setattr(output, "_PATIENCE_S", 0.0)
    said = cli(*words)
    assert "training" in said.err and "100%" in said.err
    assert said.json["done"] == 4


@pytest.mark.soak
def test_a_process_that_is_interrupted_leaves_what_it_has(tmp_path: Path) -> None:
    """The real signal, in the middle of it."""
    words = ("lab", "accuracy", "--workers", 2, "--steps", 10, "--seeds", 1000, "--json", "--out", tmp_path)
    said = interrupted("accuracy", "_Training", *words)
    assert said.code == 130
    found = said.json
    assert 1 <= found["done"] < found["of"] == 7000
    assert json.loads((tmp_path / "result.json").read_text()) == found
    assert {row["strategy"] for row in csv.DictReader((tmp_path / "curves.csv").open())} >= {"undisturbed"}
    assert (tmp_path / "accuracy.svg").exists()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--workers", 1), "--workers must be from 2 to 64, not 1"),
        (("--fail", "5:1"), "--fail 5:1 must be STEP:RANK:LAYER, three whole numbers"),
        (("--fail", "5:9:0"), "--fail 5:9:0: the rank must be from 0 to 3, not 9"),
        (("--fail", "5:1:0", "--failures", 2), "--fail names what fails, and --failures draws it: give one of them"),
        (("--strategy", "hope"), "--strategy hope must be one of restart, rollback, forward"),
        (("--seeds", "many"), "'--seeds'"),
    ],
)
def test_a_wrong_word_is_named_before_anything_is_trained(cli: Cli, words: tuple[object, ...], named: str) -> None:
    said = cli(*SMALL, *words)
    assert (said.code, said.out) == (2, "")
    assert named in said.err


def test_an_unknown_experiment_is_refused_and_the_known_are_listed(cli: Cli) -> None:
    assert cli("lab", "guessing").code == 2
    listed = cli("lab", "--help").out
    assert "accuracy" in listed and "simulate" not in listed
    assert "lab" in cli("--help").out


@pytest.mark.parametrize("words", ["lab accuracy --help", "lab --help"])
def test_help_starts_without_torch(words: str) -> None:
    code = "import sys\nfrom everstep.cli import app\napp(sys.argv[1:], standalone_mode=False)\n"
    code += "sys.stderr.write(str('torch' in sys.modules))"
    ended = subprocess.run([sys.executable, "-c", code, *words.split()], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "False")
