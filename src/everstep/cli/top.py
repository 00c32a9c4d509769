"""`everstep top`: a run while it goes on."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from everstep.archive import open
from everstep.cli.output import Directory, Json, MemoryPath, ago, human_bytes, human_seconds, print_json
from everstep.report.now import Now, look
from everstep.report.series import in_words

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

_LOOK_S = 1.0


def command(
    directory: Directory,
    once: Annotated[bool, typer.Option("--once", help="Look once, print it, and leave.")] = False,
    json: Json = False,
    memory: MemoryPath = None,
) -> None:
    """Show a run as it goes: ranks, step times, what is safe where, what would be lost, the last events."""
    archive = open(directory, memory=memory)
    if json:
        print_json(look(archive))
        return
    from rich.console import Console
    from rich.live import Live

    console = Console()
    if once:
        console.print(_screen(look(archive)))
        return
    try:
        with Live(_screen(look(archive)), console=console, screen=console.is_terminal, auto_refresh=False) as live:
            while True:
                time.sleep(_LOOK_S)
                live.update(_screen(look(archive)), refresh=True)
    except KeyboardInterrupt:
        return


def _screen(now: Now) -> Group:
    from rich.console import Group
    from rich.text import Text

    status = now.status
    is_alive = "alive" if status["alive"] else "nobody trains"
    head = Text(
        f"{status['directory']}: {is_alive}, step {status['step']}; keeper {status['keeper'] or 'none'}", "bold"
    )
    levels = {
        "sealed": status["sealed_step"], "durable": status["durable_step"], "protected": status["protected_step"],
        "shared": status["shared_step"],
    }  # fmt: skip
    safe = Text("newest step " + ", ".join(f"{name} {step}" for name, step in levels.items() if step is not None))
    held = Text("on tiers: " + (", ".join(f"{n} {human_bytes(b)}" for n, b in now.tiers.items()) or "nothing is known"))
    return Group(head, safe, held, _paces(now), _exposure(now), _events(now))


def _paces(now: Now) -> Table:
    rows = [
        [p.name, str(p.pid), str(p.step), "" if p.step_s is None else f"{1000 * p.step_s:.1f} ms", p.doing,
         f"{human_seconds(p.ago_s)} ago"]
        for p in now.paces
    ]  # fmt: skip
    return _table(["who", "process", "step", "a step takes", "did last", "when"], rows)


def _exposure(now: Now) -> Table:
    rows = [[e.event, e.restored_from, str(e.steps), human_seconds(e.seconds)] for e in now.status["exposure"]]
    return _table(["if ...", "restored from", "steps lost", "work lost"], rows)


def _events(now: Now) -> Table:
    rows = [[ago(event.time), type(event).__name__, in_words(event)] for event in now.events]
    return _table(["when", "event", "in words"], rows)


def _table(columns: list[str], rows: list[list[str]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(header_style="bold", expand=True)
    for column in columns:
        table.add_column(column, justify="right" if column in ("step", "steps lost", "work lost") else "left")
    for row in rows:
        table.add_row(*map(Text, row))  # as it is: brackets are no markup
    return table
