"""docs/doctor.md is true: its numbers, words and options are those of the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from commands import options_of

from everstep.cli import environment

TEXT = (Path(__file__).parents[2] / "docs/doctor.md").read_text()


def test_its_numbers_and_words_are_those_of_the_code() -> None:
    assert "128 MiB are written" in TEXT and environment.PROBE_BYTES == 128 << 20
    assert "for ten seconds\nat most" in TEXT and environment.PATIENCE_S == 10.0
    assert all(f"`{verdict}`" in TEXT for verdict in get_args(environment.Verdict))
    assert {"`what`", "`found`", "`verdict`", "`advice`"} <= set(re.findall(r"`\w+`", TEXT))
    assert {"--torch", "--json"} <= options_of("doctor") & set(re.findall(r"--\w+", TEXT))


def test_the_lines_that_are_shown_are_those_that_it_says() -> None:
    shown = set(re.findall(r"^│ (\S[^│]*?) +│", TEXT, re.MULTILINE))
    said = {line.what for line in environment.system_lines() if not line.what.startswith("everstep[")}
    assert said - {"NCCL"} <= shown
