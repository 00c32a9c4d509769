"""docs/live-recovery.md is true: its commands, policies, events and numbers are those of the program."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import msgspec
from commands import options_of

from everstep.config import Policy
from everstep.events import Called, RanksLost, WentOn
from everstep.live import crew

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/live-recovery.md").read_text()


def test_every_policy_has_its_row() -> None:
    assert re.findall(r'^\| `"(\w+)"` \|', TEXT, re.MULTILINE) == list(get_args(Policy))


def test_every_command_that_is_shown_has_its_options_and_its_program() -> None:
    shown = re.findall(r"everstep run ([^\n`]*)", TEXT)
    assert len(shown) > 3
    for words in shown:
        before = re.split(r" -- |\S+\.py", words)[0]
        assert set(re.findall(r"--[a-z-]+", before)) <= options_of("run"), words
    assert all((ROOT / program).exists() for program in re.findall(r"examples/\w+\.py", TEXT))


def test_the_events_that_are_shown_have_the_fields_of_real_ones() -> None:
    lines = re.findall(r'^\{"event".*\}$', TEXT, re.MULTILINE)
    kinds = {"rankslost": RanksLost, "called": Called, "wenton": WentOn}
    assert len(lines) == 10
    for line in lines:
        fields = msgspec.json.decode(line).keys() - {"event"}
        kind = kinds[msgspec.json.decode(line)["event"]]
        assert fields == {field.name for field in msgspec.structs.fields(kind)} - {"time"}
        msgspec.json.decode(line, type=kind)


def test_the_numbers_are_those_of_the_code() -> None:
    assert f"`--max-restarts` ({crew.Size(workers=1).max_restarts})" in TEXT
    assert f"after {crew._GRACE_S:.0f} s is killed" in TEXT
