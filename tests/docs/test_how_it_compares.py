"""docs/how-it-compares.md is true: its scorecard is what was measured, of every peer, by a command that exists."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE, MEASURED = ((ROOT / name).read_text() for name in ("docs/how-it-compares.md", "bench/results/scorecard.md"))


def table(text: str, first: str) -> dict[str, dict[str, str]]:
    """The table whose first column is `first`: its rows by name, their cells by header."""
    lines = re.search(rf"^\| {first} \|.*\n\|[- |]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert lines is not None
    headers = cells(lines[0].splitlines()[0])
    return {cells(row)[0]: dict(zip(headers, cells(row), strict=True)) for row in lines[1].splitlines()}


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip().strip("|").split("|")]


def test_the_scorecard_is_what_was_measured() -> None:
    shown, measured = table(PAGE, "peer"), table(MEASURED, "peer")
    assert list(shown) == list(measured) and len(shown["Everstep"]) > 6
    for peer, row in shown.items():
        assert row == {header: measured[peer][header] for header in row}, peer


def test_the_commit_is_what_was_measured() -> None:
    pattern = r"torchft's should_commit alone takes [\d.]+ ms \(middle half [\d.]+ to [\d.]+\)"
    assert re.findall(pattern, PAGE) == re.findall(pattern, MEASURED) != []


def test_every_peer_of_the_program_was_measured() -> None:
    program = (ROOT / "bench/scorecard_peers.py").read_text()
    peers = re.search(r"^PEERS.*?\{(.*?)\}", program, re.DOTALL | re.MULTILINE)
    assert peers is not None
    assert re.findall(r'"([^"]+)":', peers[1]) == list(table(MEASURED, "peer"))


def test_every_package_and_option_that_is_named_is_one() -> None:
    pip = re.search(r"pip install (.*?)\npeers", PAGE, re.DOTALL)
    packages = re.search(r"^PACKAGES = \((.*?)\)", (ROOT / "bench/scorecard_peers.py").read_text(), re.M | re.S)
    assert pip is not None and packages is not None
    assert set(re.findall(r'"([^"]+)"', packages[1])) <= {word.split("==")[0] for word in pip[1].split()}
    command = re.search(r"^peers/bin/python bench/scorecard.py(.*)$", PAGE, re.MULTILINE)
    assert command is not None
    known = re.findall(r'add_argument\("(--[a-z]+)"', (ROOT / "bench/scorecard.py").read_text())
    assert {"--python", "--only"} == set(re.findall(r"--[a-z]+", command[1])) <= set(known)


@pytest.mark.soak
def test_what_is_exact_and_what_is_not_can_be_told(tmp_path: Path) -> None:
    def life(folder: str, *words: str) -> str:
        (tmp_path / folder).mkdir(exist_ok=True)
        program = [sys.executable, str(ROOT / "bench/scorecard_resume.py"), "torch.save", str(tmp_path / folder)]
        ended = subprocess.run([*program, *words], capture_output=True, text=True, timeout=120)
        return ended.stdout.strip()

    undisturbed = life("a", "undisturbed")
    assert (life("b", "begin"), life("c", "begin", "--by-hand")) == ("saved", "saved")
    assert life("c", "resume", "--by-hand") == undisturbed
    resumed, right = (json.loads(said.removeprefix("trained ")) for said in (life("b", "resume"), undisturbed))
    assert [part for part in right if resumed[part] != right[part]] == ["weights", "optimizer", "losses"]
