"""docs/seeing-a-run.md is true: its commands and options exist, and its words are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from commands import options_of

from everstep import timeline
from everstep.capture import moments
from everstep.report import rows

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "seeing-a-run.md").read_text()


def test_every_command_that_is_shown_has_its_options() -> None:
    shown = re.findall(r"^\$ everstep (\w+)([^\n]*)", TEXT, re.MULTILINE)
    assert [name for name, _ in shown] == ["report", "trace", "top"]
    for name, words in shown:
        assert set(re.findall(r"(?<= )-[-a-z]+", words)) <= options_of(name)
    for option, name in (("--compare", "report"), ("--once", "top"), ("--json", "top")):
        assert f"`{option}" in TEXT
        assert option in options_of(name)


def test_the_rows_are_those_of_the_code() -> None:
    shown = re.findall(r"^\| ([a-z, ]+) \| ", TEXT[TEXT.index("| row | spans |") :], re.MULTILINE)
    named = [row for line in shown if line != "row" for row in line.split(", ")]
    assert sorted(named) == sorted(set(rows.ROWS) - {rows.OTHER})


def test_the_numbers_are_those_of_the_code() -> None:
    assert "below 4 MiB" in TEXT and timeline.LIMIT_BYTES == 4 << 20
    assert "quarter of a second" in TEXT and timeline._REST_S == 0.25
    assert "more than four optimizers" in TEXT and moments._FEW == 4


def test_the_number_of_spans_in_a_picture_is_that_of_the_code() -> None:
    pytest.importorskip("plotly")
    from everstep.report import figures

    assert "newest 20,000 spans" in TEXT.replace("\n  ", " ") and figures.MOST_SPANS == 20_000


def test_what_is_linked_is_there() -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", TEXT):
        assert (DOCS / target).exists(), target
