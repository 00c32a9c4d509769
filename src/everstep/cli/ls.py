"""`everstep ls`: the steps that can be restored."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from everstep.archive import open
from everstep.cli.output import Directory, Json, MemoryPath, ago, counted, human_bytes, note, print_json, print_table
from everstep.recover.reach import Kept


def command(directory: Directory, json: Json = False, memory: MemoryPath = None) -> None:
    """List the steps that can be restored, and where each is kept; with --json every step that the log leads to."""
    kept = open(directory, memory=memory).kept()
    if json:
        print_json(kept)
        return
    rows = list(_rows(kept))
    if rows:
        print_table(["step", "ranks", "size", "taken", "kept in", "as"], rows)
    else:
        print(f"{directory} holds no checkpoint that can be restored yet")


def _rows(kept: list[Kept]) -> Iterator[list[str]]:
    """A base is a row, and so are all records that follow it and are kept in the same places."""
    for (base, own, sources, world, replica), run in groupby(kept, key=_alike):
        steps = list(run)
        first, last = steps[0].step, steps[-1]
        yield [
            str(first) if first == last.step else f"{first}-{last.step}",
            str(world),
            human_bytes(sum(k.bytes for k in steps)),
            ago(last.cut_time) if last.cut_time is not None else "",
            " and ".join(sources) or "memory with disk",
            ("base" if own else f"{counted(len(steps), 'record')} after base {base}") + note(replica),
        ]


def _alike(kept: Kept) -> tuple[int, bool, tuple[str, ...], int, str]:
    return (kept.base, kept.base == kept.step, kept.sources, kept.world, kept.replica)
