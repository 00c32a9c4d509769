"""`everstep run`: start a job, with tiers, node and domain chosen on the command line, and keep its processes whole."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from everstep import tiers as choices
from everstep.errors import BadConfig
from everstep.launch import launched, missing
from everstep.live.crew import Crew, Size
from everstep.topology import check_name

_RESTARTS = Size(workers=1).max_restarts


def command(
    words: Annotated[
        list[str], typer.Argument(metavar="COMMAND...", help="What to start: with --nproc train.py, else torchrun, ...")
    ],
    nproc: Annotated[int | None, typer.Option("--nproc", help="Start so many workers on each node.")] = None,
    spares: Annotated[int | None, typer.Option("--spares", help="And so many on this node that stand by.")] = None,
    nodes: Annotated[int | None, typer.Option("--nodes", help="Nodes on which this is started; srun says it.")] = None,
    node_rank: Annotated[int | None, typer.Option("--node-rank", help="Which of them this is, from 0.")] = None,
    master: Annotated[str | None, typer.Option("--master", help="HOST:PORT of the first, where all meet.")] = None,
    stand_by: Annotated[
        bool, typer.Option("--stand-by", help="This node is new to a job, or comes back: its workers wait for places.")
    ] = False,
    max_restarts: Annotated[
        int | None, typer.Option("--max-restarts", help=f"Processes or jobs started again, at most; else {_RESTARTS}.")
    ] = None,
    tiers: Annotated[
        str | None, typer.Option("--tiers", help="As in Python: 'Partner(), Shared(\"/lustre/run7\", every=10)'.")
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", help="A file such as everstep.toml.")] = None,
    node: Annotated[str | None, typer.Option("--node", help="What this node is called.")] = None,
    domain: Annotated[str | None, typer.Option("--domain", help="What fails with it: a rack, a switch.")] = None,
) -> None:
    """Check the tiers, set them for every guard() that is given none, and become the command.

    With --nproc: start it so many times, and spares beside them. A worker that dies leaves the others alone and is
    replaced by a fresh spare; when nobody is left the job is started again.
    """
    environment = _environment(tiers, config, node, domain)
    given = {
        "spares": spares, "nodes": nodes, "node_rank": node_rank, "master": master, "max_restarts": max_restarts,
        "stands_by": stand_by or None,
    }  # fmt: skip
    chosen = {name: value for name, value in given.items() if value is not None}
    if nproc is not None:
        said = {} if stand_by else _said_by_launcher(environment, nodes)
        size = Size(workers=nproc, **{**said, **chosen})  # type: ignore[arg-type]
        program = [sys.executable, *words] if words[0].endswith(".py") else words
        raise typer.Exit(Crew(program, size, environment).work())
    if chosen:
        option = min(chosen).replace("stands", "stand").replace("_", "-")
        raise BadConfig(f"--{option} says how workers are started, and needs --nproc")
    try:
        os.execvpe(words[0], words, environment)
    except OSError as error:
        raise BadConfig(f"{words[0]} cannot be started: {error.strerror}") from None


def _environment(tiers: str | None, config: Path | None, node: str | None, domain: str | None) -> dict[str, str]:
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
    return environment


def _said_by_launcher(environment: Mapping[str, str], nodes: int | None) -> dict[str, object]:
    """Of the nodes, if nobody else says it: srun and mpirun start one of these on each."""
    said = launched(environment)
    if nodes is not None or said is None or said.world == 1:
        return {}
    known = {**environment, **missing(environment)}
    return {
        "nodes": said.world, "node_rank": said.rank, "master": f"{known['MASTER_ADDR']}:{known['MASTER_PORT']}"
    }  # fmt: skip
