"""How commands speak: a table for people, JSON for machines; rich is loaded only when a table is drawn."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

Directory = Annotated[Path, typer.Argument(help="The run's directory: the dir= of guard().")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
MemoryPath = Annotated[str | None, typer.Option("--memory", help="The path given to Memory(path=...), if one was.")]
Step = Annotated[int | None, typer.Option("--step", help="A step; by default the newest.")]

INTERRUPTED = 130  # the exit code after Ctrl-C
_PATIENCE_S = 2.0  # after which a person is shown how far it is


def to_json(value: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()


def print_json(value: Any) -> None:
    print(to_json(value))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title or None, title_justify="left", header_style="bold")
    for column in columns:
        numeric = column in ("step", "ranks", "size", "rank", "bytes", "steps lost", "work lost", "absent", "time")
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console().print(table, markup=False)


@contextmanager
def watching() -> Iterator[Callable[[str], None]]:
    """Something that may take longer than two seconds: what is being done is shown while a terminal looks on."""
    from rich.console import Console

    with Console(stderr=True).status("") as status:
        yield lambda doing: status.update(f"{doing} ...")


@contextmanager
def bar(doing: str, total: int) -> Iterator[Callable[[int], None]]:
    """The same, if it is known how much there is to do: a bar once it takes long. It is told how much is done."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(doing, total=total, visible=False)
        patience = threading.Timer(_PATIENCE_S, progress.update, (task,), {"visible": True})
        patience.start()
        try:
            yield lambda done: progress.update(task, completed=done)
        finally:
            patience.cancel()


def human_bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} EB"


def human_seconds(seconds: float | None) -> str:
    if seconds is None:
        return "all of it"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def note(replica: str) -> str:
    """What to say of a step that a replica made whose bits may not be those of training."""
    return f" (replica of {replica}, not bit for bit)" if replica else ""


def ago(when: float) -> str:
    return f"{human_seconds(max(0.0, time.time() - when))} ago"
