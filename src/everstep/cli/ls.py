"""`everstep ls`: the steps that can be restored."""

from __future__ import annotations

from everstep.archive import open
from everstep.cli.output import Directory, Json, MemoryPath, ago, human_bytes, note, print_json, print_table


def command(directory: Directory, json: Json = False, memory: MemoryPath = None) -> None:
    """List the steps that can be restored, and where each is kept."""
    kept = open(directory, memory=memory).kept()
    if json:
        print_json(kept)
        return
    rows = [
        [str(k.step), str(k.world), human_bytes(k.bytes), ago(k.cut_time), " and ".join(k.sources) + note(k.replica)]
        for k in kept
    ]
    if rows:
        print_table(["step", "ranks", "size", "taken", "kept in"], rows)
    else:
        print(f"{directory} holds no checkpoint that can be restored yet")
