"""docs/inject.md is true: its acts can be read, its options exist, and its scenarios are those of examples/inject."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import get_args

from commands import options_of

from everstep.checked import Table
from everstep.lab import agreement
from everstep.lab.injections import Deed, FileKind, inject_of
from everstep.lab.scenario import load_inject

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/inject.md").read_text()


def test_the_acts_that_are_shown_are_all_that_there_are() -> None:
    shown = re.search(r"```toml\n(.*?)```", TEXT, re.DOTALL)
    assert shown is not None
    found = inject_of(Table(tomllib.loads(shown[1]), file="docs").table("inject"), has_failures=False)
    assert {act.do for act in found.acts} == set(get_args(Deed))
    assert {act.target for act in found.acts} == {"rank", "node", "keeper"}
    assert all(kind in TEXT for kind in get_args(FileKind))


def test_every_option_that_is_named_exists() -> None:
    assert set(re.findall(r"`(--[a-z]+)", TEXT)) <= options_of("inject")


def test_the_scenarios_can_be_played_both_ways_and_are_those_in_the_table(tmp_path: Path) -> None:
    folder = ROOT / "examples/inject"
    shown = re.search(r"examples/inject/\{([a-z,]+)\}\.toml --simulate", TEXT)
    assert shown is not None
    names = shown[1].split(",")
    assert sorted(path.stem for path in folder.glob("*.toml")) == sorted([*names, "cut"])
    for scenario in agreement.planned([str(folder / f"{name}.toml") for name in names], tmp_path).values():
        assert f"│ {scenario.title} " in TEXT


def test_the_act_that_is_shown_alone_is_that_of_the_file() -> None:
    acts = load_inject(ROOT / "examples/inject/cut.toml")[0].acts
    assert "examples/inject/cut.toml" in TEXT
    for act in acts:
        assert re.search(str(act).replace("any", r"\d") + r": \d+ connections", TEXT)


def test_the_bound_is_that_of_the_code() -> None:
    assert f"within {agreement.WITHIN:.0%}".replace("%", " %") in TEXT
