"""docs/choosing-tiers.md is true: its three spellings are the same tiers, and what it names exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from commands import options_of

from everstep.tiers import choose, gather, parse

TEXT = (Path(__file__).parents[2] / "docs/choosing-tiers.md").read_text()


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)
    assert found is not None
    return found[1]


def test_the_three_spellings_are_the_same(tmp_path: Path) -> None:
    (tmp_path / "everstep.toml").write_text(block("toml"))
    python = re.search(r"tiers=\[(.*)\]", block("python"))
    assert python is not None
    words = shlex.split(block("sh"))
    chosen = choose(tmp_path / "everstep.toml", {})
    assert chosen.shared is not None and chosen.protection is not None
    assert chosen == gather(parse(words[words.index("--tiers") + 1], "--tiers"))
    assert chosen == gather(parse(python[1].replace("everstep.", ""), "python"))


@pytest.mark.parametrize("words", sorted(set(re.findall(r"`((?:Partner|Parity|Shared|Objects|Disk)\([^`]*\))`", TEXT))))
def test_every_tier_that_is_named_can_be_chosen(words: str) -> None:
    numbers = {"copies=c": "copies=2", "(kind, group=g, losses=f)": "('rs', group=4, losses=2)", "(path)": "('/p')",
               "(url)": "('s3://b/p')", "(...)": "('/p')"}  # fmt: skip
    for letter, number in numbers.items():
        words = words.replace(letter, number)
    assert gather(parse(words, "the page"))


def test_every_command_that_is_shown_has_its_options() -> None:
    shown = re.findall(r"everstep (halt|run)([^\n`]*)", TEXT)
    assert len(shown) > 3
    for name, rest in shown:
        assert set(re.findall(r"--[a-z]+", rest.split(" -- ")[0])) <= options_of(name), rest
