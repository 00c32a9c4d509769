"""The command line: the verbs of the library, for people, and with --json for machines. One file a command.

Exit codes: 0 all is well; 1 other errors; 2 a wrong argument; 3 nothing to restore; 4 damage found; 5 the checkpoint
and the program differ; 6 the run is held by another process; 7 a medium or memory refused; 8 no keeper.
"""

from __future__ import annotations

import sys

import typer

from everstep.cli import export, gc, halt, ls, plan, report, rm, run, scavenge, show, status, top, trace, tune, verify
from everstep.errors import EverstepError

app = typer.Typer(
    help="Reads, checks and exports what Everstep keeps of a training run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for module in (ls, show, status, verify, plan, tune, top, trace, report, export, halt, scavenge, rm, gc):
    app.command(module.__name__.rsplit(".", 1)[1])(module.command)
app.command("run", context_settings={"allow_interspersed_args": False})(run.command)


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
