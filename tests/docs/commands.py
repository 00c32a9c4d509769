"""What the command line takes, for documents that show it."""

from __future__ import annotations

from typer.main import get_command

from everstep.cli import app


def options_of(command: str) -> set[str]:
    found = get_command(app).get_command(None, command)  # type: ignore[attr-defined]
    assert found is not None, f"there is no everstep {command}"
    return {option for one in found.params for option in one.opts}
