"""docs/sharded.md is true: its lines are those of the example, its options exist, its words are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/sharded.md").read_text()
EXAMPLE = (ROOT / "examples/train_fsdp.py").read_text()
SOURCE = "\n".join(path.read_text() for path in (ROOT / "src/everstep").glob("**/*.py"))


def test_its_first_lines_are_in_the_example() -> None:
    first = re.search(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert first is not None
    for line in first[1].splitlines()[:-1]:
        assert line.strip() in EXAMPLE


def test_the_options_of_its_command_are_those_of_the_example() -> None:
    (command,) = re.findall(r"^torchrun .*train_fsdp\.py (.*)$", TEXT, re.MULTILINE)
    asked = re.findall(r"--[\w-]+", command)
    assert asked == ["--dir", "--kill-at"] and all(f'"{option}"' in EXAMPLE for option in asked)


def test_what_it_prints_is_printed() -> None:
    assert "goes on from step 12" in TEXT and 'goes on from step {run.resumed_from}"' in EXAMPLE


def test_what_it_says_of_refusals_and_events_is_said() -> None:
    words = ["there is no log, every step is a base", "overlap_with_ddp", "FullyShardedDataParallel", "fully_shard"]
    assert all(one in TEXT and one in SOURCE for one in words)


def test_the_tests_that_it_names_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)`", TEXT)
    assert named and all((ROOT / name).exists() for name in named)
