"""`everstep run`: start a job with tiers, node and domain chosen on the command line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from everstep import tiers as choices
from everstep.errors import BadConfig
from everstep.topology import check_name


def command(
    words: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="What to start: torchrun, mpirun, ...")],
    tiers: Annotated[
        str | None, typer.Option("--tiers", help="As in Python: 'Partner(), Shared(\"/lustre/run7\", every=10)'.")
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", help="A file such as everstep.toml.")] = None,
    node: Annotated[str | None, typer.Option("--node", help="What this node is called.")] = None,
    domain: Annotated[str | None, typer.Option("--domain", help="What fails with it: a rack, a switch.")] = None,
) -> None:
    """Check the tiers, set them for every guard() that is given none, and become the command."""
    if tiers is not None and config is not None:
        raise BadConfig("--tiers and --config both name tiers; one of them is enough")
    environment = dict(os.environ)
    if tiers is not None:
        chosen = choices.gather(choices.parse(tiers, "--tiers"), "--tiers")
    else:
        chosen = choices.choose(config, os.environ)
    if chosen != choices.Tiers():
        environment["EVERSTEP_TIERS"] = str(chosen)
    for option, value in (("node", node), ("domain", domain)):
        if value is not None:
            environment[f"EVERSTEP_{option.upper()}"] = check_name(f"--{option}", value)
    try:
        os.execvpe(words[0], words, environment)
    except OSError as error:
        raise BadConfig(f"{words[0]} cannot be started: {error.strerror}") from None
