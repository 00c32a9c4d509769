"""docs/accuracy.md is true: its options, strategies, costs and models are those of the program."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from everstep.cli import lab_accuracy
from everstep.lab.trial import LAYERS, MOST, WAYS, Costs

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "accuracy.md").read_text()


def test_every_option_that_is_named_exists_and_every_one_is_named() -> None:
    known = {f"--{name.replace('_', '-')}" for name in inspect.signature(lab_accuracy.command).parameters}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", TEXT)) == known


def test_every_strategy_has_its_row() -> None:
    rows = re.findall(r"^\| `([a-z][a-z-]*)` \|", TEXT[TEXT.index("| strategy |") :], re.MULTILINE)
    assert tuple(rows) == WAYS


def test_the_numbers_are_those_of_the_code() -> None:
    costs = dict(re.findall(r"^\| `--(\w+)-cost` \| ([\d.]+) \|", TEXT, re.MULTILINE))
    assert {name: float(value) for name, value in costs.items()} == {
        name: getattr(Costs(), name) for name in Costs.__dataclass_fields__
    }
    assert f"from 2 to {MOST['workers']} share" in TEXT
    assert f"({lab_accuracy._FAILURES} if nothing is said)" in TEXT
    for model in LAYERS:
        assert f"`{model}" in TEXT or f"--model {model}" in TEXT


def test_what_is_shown_is_there() -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", TEXT):
        assert (DOCS / target).exists(), target
