"""The command line: the verbs of the library, for people, and with --json for machines. One file a command.

Exit codes: 0 all is well; 1 other errors, and what the doctor says must be fixed; 2 a wrong argument; 3 nothing to
restore; 4 damage found; 5 the checkpoint and the program differ; 6 the run is held by another process; 7 a medium or
memory refused; 8 no keeper.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from everstep.errors import EverstepError

COMMANDS = (
    "ls", "show", "status", "verify", "plan", "tune", "simulate", "inject", "top", "trace", "report", "import",
    "export", "halt", "doctor", "scavenge", "rewind", "rm", "gc", "run",
    "lab",
)  # fmt: skip
LAB = ("accuracy",)


class _Commands(TyperGroup):
    """Loads the file of a command when that one is called: nobody who lists checkpoints waits for the simulator."""

    names: tuple[str, ...] = COMMANDS
    prefix = ""  # of their files

    def list_commands(self, ctx: object) -> list[str]:
        return list(self.names)

    def get_command(self, ctx: object, cmd_name: str) -> Any:
        if cmd_name not in self.names:
            return None
        if cmd_name == "lab":
            return typer.main.get_command(lab)
        alone = typer.Typer(add_completion=False, rich_markup_mode=None)
        command = import_module(f"everstep.cli.{self.prefix}{cmd_name}").command
        alone.command(cmd_name, context_settings={"allow_interspersed_args": cmd_name != "run"})(command)
        return typer.main.get_command(alone)


class _Lab(_Commands):
    names = LAB
    prefix = "lab_"


lab = typer.Typer(cls=_Lab, no_args_is_help=True, add_completion=False, rich_markup_mode=None)


@lab.callback()
def _lab() -> None:
    """Experiments: what if ranks are lost?"""


app = typer.Typer(
    cls=_Commands,
    help="Reads, checks and exports what Everstep keeps of a training run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True)
def _main(version: bool = typer.Option(False, "--version", help="Print the version and leave.")) -> None:
    if version:
        from everstep import __version__

        print(f"everstep {__version__}")
        raise typer.Exit


def main() -> None:
    try:
        app()
    except EverstepError as error:
        print(f"everstep: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output left; nothing is wrong
        sys.exit(0)
    except OSError as error:
        print(f"everstep: {error}", file=sys.stderr)
        sys.exit(7)
