"""docs/tuning.md and docs/simulate.md are true: their outputs are those of the program, their keys are known."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest
from commands import options_of

from everstep.cli import main
from everstep.lab.scenario import scenario_of

DOCS = Path(__file__).parents[2] / "docs"
TUNING, SIMULATE = ((DOCS / name).read_text() for name in ("tuning.md", "simulate.md"))


def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int, *words: str) -> str:
    monkeypatch.setattr(sys, "argv", ["everstep", *words])
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit):
        main()
    return capsys.readouterr().out.rstrip()


def test_the_table_of_rules_is_what_tune_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = re.search(r"echo '(.*)' > machine.json", TUNING)
    assert machine is not None
    monkeypatch.chdir(tmp_path)
    Path("machine.json").write_text(machine[1])
    words = re.search(r"^everstep (tune .*)$", TUNING, re.MULTILINE)
    assert words is not None
    assert said(monkeypatch, capsys, 118, *words[1].split()) in TUNING


def test_the_simulated_table_is_what_simulate_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(monkeypatch, capsys, 112, "simulate", "spares") in SIMULATE


def test_the_scenario_that_is_shown_is_one() -> None:
    shown = re.search(r"```toml\n(.*?)```", SIMULATE, re.DOTALL)
    assert shown is not None
    found = scenario_of(tomllib.loads(shown[1]))
    assert [one.kind for one in found.strategies] == ["torch-save", "auto"]


def test_every_option_that_is_named_exists() -> None:
    for name, text in (("tune", TUNING), ("simulate", SIMULATE)):
        assert set(re.findall(r"`(--[a-z]+)", text)) <= options_of(name)
