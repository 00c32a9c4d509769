"""Prints docs/cli.md: what every command says of itself. `python docs/cli_reference.py > docs/cli.md`"""

from __future__ import annotations

from typer.testing import CliRunner

from everstep.cli import COMMANDS, LAB, app

_HEAD = """# Command line

Every command reads `--help`; those that print a table also print JSON with `--json`. Exit codes are in
[FAILURES.md](../FAILURES.md). This page is what the commands say of themselves (`python docs/cli_reference.py`).
"""


def reference() -> str:
    names = [(name,) for name in COMMANDS if name != "lab"] + [("lab", name) for name in LAB]
    return "\n".join([_HEAD, *map(_section, names)])


def _section(words: tuple[str, ...]) -> str:
    said = CliRunner().invoke(app, [*words, "--help"], prog_name="everstep", env={"COLUMNS": "100"}).output
    lines = [line.rstrip() for line in said.strip().splitlines()]
    return "\n".join([f"## everstep {' '.join(words)}", "", "```", *lines, "```", ""])


if __name__ == "__main__":
    print(reference(), end="")
