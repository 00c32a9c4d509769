"""docs/import-export.md is true: its options, names and formats are those of the code."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from commands import options_of

from everstep.integrations import adopt, dcp_files, foreign

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/import-export.md").read_text()


def test_every_command_that_is_shown_has_its_options() -> None:
    shown = re.findall(r"^\$ everstep (\w+)([^\n]*)", TEXT, re.MULTILINE)
    assert [name for name, _ in shown] == ["import", "ls", "export"]
    for name, words in shown:
        assert set(re.findall(r"(?<= )-[-a-z]+", words)) <= options_of(name)
    assert {"--key", "--optimizer", "--json"} <= options_of("import")
    assert all(f"`{option}" in TEXT for option in ("--key", "--optimizer", "--format", "--only", "--step"))


def test_the_names_are_those_of_the_code() -> None:
    assert all(f"`{key}`" in TEXT for key in adopt._MODEL_KEYS)
    assert f"`{dcp_files.TABLE}`" in TEXT
    named = re.findall(r"`(\S+)\(\.index\.json\)`", TEXT)
    assert {*named, *(f"{name}.index.json" for name in named)} == set(foreign._INDEXED)
    assert f"adopt({', '.join(('source', 'directory', 'key=None', 'optimizer=None'))})" in TEXT
    assert list(inspect.signature(adopt.adopt).parameters)[:4] == ["source", "directory", "key", "optimizer"]


def test_what_is_named_is_there() -> None:
    for target in re.findall(r"`(tests/\S+\.py)`", TEXT):
        assert (ROOT / target).exists(), target
