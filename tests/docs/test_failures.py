"""FAILURES.md is true: the tests that it names exist, and its exit codes are those of the errors."""

from __future__ import annotations

import re
from pathlib import Path

from everstep import errors

TESTS = Path(__file__).parents[1]
TEXT = (TESTS.parent / "FAILURES.md").read_text()


def test_every_test_that_is_named_exists() -> None:
    named = set(re.findall(r"`([a-z_/]+\.py)::(\w+)`", TEXT))
    assert len(named) > 40
    missing = [f"{file}::{name}" for file, name in named if f"def {name}(" not in (TESTS / file).read_text()]
    assert missing == []


def test_the_exit_codes_are_those_of_the_errors() -> None:
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \| (?:`(\w+)`)? ?\|", TEXT, re.MULTILINE)
    kinds = {kind.__name__: kind for kind in vars(errors).values() if isinstance(kind, type)}
    ours = {name: kind for name, kind in kinds.items() if issubclass(kind, errors.EverstepError)}
    assert {name for _, name, _ in rows} == set(ours)
    for code, name, builtin in rows:
        assert ours[name].exit_code == int(code), name
        assert not builtin or builtin in {base.__name__ for base in ours[name].__mro__}, name
