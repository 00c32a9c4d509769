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


def test_the_scenarios_can_be_played_both_ways_and_are_those_in_the_table() -> None:
    files = sorted((ROOT / "examples/inject").glob("*.toml"))
    assert len(files) == 4
    for file in files:
        assert load_inject(file)[1] == agreement._whole(str(file))
        title = agreement._whole(str(file)).title
        assert title in TEXT.replace("\n", " ")


def test_the_bound_is_that_of_the_code() -> None:
    assert f"within {agreement.WITHIN:.0%}".replace("%", " %") in TEXT
